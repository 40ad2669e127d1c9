"""Settings that capture what scripts train as CUDA graphs; on a CPU, with those of `graphs_on_cpu.py`."""

import pytest
import torch
from graphs_on_cpu import Recorder

import compile_sweep
from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.schema.causes.errors import advice_on_cudagraph_skip
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import session_results
from compile_sweep.script.apply.captured import with_uncaptured
from compile_sweep.script.apply.frozen import apply_to_discovered
from compile_sweep.script.apply.in_place import OwnCompile
from compile_sweep.script.discover import Discovery, Target
from compile_sweep.script.job import refuse_outside_scripts
from tests.scripts.conftest import Run
from tests.scripts.test_captured import Counts, Net


def test_settings_capture_what_a_script_trains_and_say_what_they_do_not(recorder: Recorder) -> None:
    settings = CompileSettings.parse("scope=eager,cudagraphs=on")
    net, counts = Net(), Counts()
    found = Discovery(targets=[Target(net, net, "net"), Target(counts, counts, "counts")])
    apply_to_discovered(settings, found, OwnCompile())
    for _ in range(3):
        for one in (net, counts):
            one(torch.ones(4, 6))["logits"].sum().backward()
    assert (recorder.recorded, recorder.replayed) == (1, 2)
    told = with_uncaptured(Diagnostics(), found.targets)
    assert told.cudagraph_skips == 2
    assert told.cudagraph_skip_reasons == ["counts runs eagerly: its forward sets Counts.calls, which a CUDA graph would not"]
    assert advice_on_cudagraph_skip("x runs eagerly: it returns an object of class DynamicCache").startswith("add use_cache=off")
    assert "leave cudagraphs out, or compile it" in advice_on_cudagraph_skip(told.cudagraph_skip_reasons[0])
    applied = compile_sweep.apply(Net(), settings=settings)
    assert str(applied) == "eager, CUDA graphs: Net captured"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("plain_loop.py", None),
        ("gan.py", None),
        ("trainer.py", "it draws random numbers on the CPU"),  # which multiplies its loss in place
        ("accelerated.py", None),
        ("reinforce.py", None),  # each step calls its policy several times
        ("seq2seq.py", None),  # in parts
        (
            "recomputed.py",
            "a trial run of a call raised RuntimeError: When use_reentrant=True, torch.utils.checkpoint is incompatible",
        ),
    ],
)
def test_a_script_trains_the_same_with_its_modules_captured(
    script: str, reason: str | None, run: Run, recorder: Recorder
) -> None:
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=eager,cudagraphs=on"):
        session, error = run(script, settings)
        assert error is None
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[0] == losses[1]
    told = with_uncaptured(session.diagnostics, session.found.targets)
    assert (recorder.replayed > 10) is (reason is None)
    assert bool(told.cudagraph_skips) is (reason is not None)
    assert all(f"runs eagerly: {reason}" in sentence for sentence in told.cudagraph_skip_reasons)
    in_parts = "it returns an object of class EncoderDecoderCache; captured as CUDA graphs of its own: encoder; with use_"
    assert any(in_parts in one for one in session_results.findings(session)) is (script == "seq2seq.py")


def test_a_model_outside_of_scripts_is_not_captured() -> None:
    with pytest.raises(SettingsError, match="scope=eager captures CUDA graphs of scripts alone; leave cudagraphs out"):
        refuse_outside_scripts({"scope": "eager", "cudagraphs": "on"}, is_script=False)
    refuse_outside_scripts({"scope": "eager", "cudagraphs": "on"}, is_script=True)
