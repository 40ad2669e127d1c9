"""`python -m orchestrator.check --script`: what it says of a script within its time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob, leading_imports
from compile_sweep.script.trial import OutOfTime, RunFailed, ScriptTrial
from orchestrator import check
from orchestrator.run.forked_attempt import ForkedScriptRuns
from orchestrator.view import script_check
from tests.scripts.conftest import SHORT

Found = dict[str, Any]

AS_WRITTEN: Found = {
    "findings": ["module model: Net of 9,490 parameters"],
    "step_ms_median": 10.0,
    "data_wait_share": 0.02,
    "graphs": 0,
    "graph_break_reasons": [],
    "compile_s": 0.0,
}


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = check.main(["--script", "plain_loop.py", "--device", "cpu", *words])
    return code, capsys.readouterr().out


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Takes the place of runs: by key of the setting, figures that differ from those of the script as it is, or a progress."""
    ran: list[str] = []

    def replayed(results: dict[str, Found | script_check._Unfinished | script_check._Failed]) -> list[str]:
        def run(self: Any, settings: CompileSettings, on_phase: object) -> Any:
            ran.append(settings.key)
            result = results[settings.key]
            if not isinstance(result, dict):
                return result
            outcome = {"measurement": {**AS_WRITTEN, **result}, "findings": AS_WRITTEN["findings"], "has_blocks": True, **result}
            return script_check._Run(settings, outcome, Path())

        monkeypatch.setattr(script_check._ScriptCheck, "_run", run)
        for name in ("judge_measurement", "why_not_faster", "short_findings"):
            monkeypatch.setattr(script_check, name, _nothing_wrong if name == "judge_measurement" else lambda *given: [])
        return ran

    return replayed


def _nothing_wrong(figures: object, *, claims_cudagraphs: bool) -> Any:
    from compile_sweep.schema.outcome import Status, Verdict

    return Verdict(status=Status.OK, label=None, reason=None)


EAGER, FULL = "scope=eager,as_written=on", "scope=full,backend=aot_eager,dynamic=auto"
REGIONAL, FINAL = "scope=regional,backend=aot_eager,dynamic=auto", "scope=full,dynamic=auto"


def key(text: str) -> str:
    return CompileSettings.parse(text).key


@pytest.mark.slow
def test_what_was_not_looked_at_in_time_is_said_and_not_guessed(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    late = script_check._Unfinished({"phase": "warming up"})
    ran = replay(
        {key(EAGER): {}, key(FULL): {"graphs": 2, "graph_break_reasons": ["item()"]}, key(REGIONAL): late, key(FINAL): late}
    )
    code, said = checked(capsys)
    assert code == 0
    assert ran == [key(EAGER), key(FULL), key(REGIONAL), key(FINAL)], "what is found first, then breaks, then what it costs"
    assert "module model: Net" in said
    assert "a step takes about 10.2 ms; of that it waits for its data 2%\n" in said
    assert "2 graphs, 1 graph break\n" in said
    assert "not known: breaks under regional; the time budget of 100 s was used up" in said
    assert "not known: how long compiling takes, what it gains" in said
    assert "if it compiles as fast as other models" in said


@pytest.mark.parametrize(
    ("quickly", "said"),
    [
        ("ok", "with backend=aot_eager its numbers are right: code that Inductor generates is at fault"),
        ("diverges", "with backend=aot_eager its numbers are not right either: Inductor is not at fault"),
    ],
)
def test_the_part_of_torch_that_computes_other_numbers_is_named(
    quickly: str,
    said: str,
    replay: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses = iter(["diverges", quickly])
    monkeypatch.setattr(
        ScriptTrial, "judge_numbers", lambda self, *given: {"numerics": {"status": next(statuses), "worst": "", "advice": None}}
    )
    replay({key(EAGER): {}, key(FULL): {"graphs": 1}, key(REGIONAL): {}, key(FINAL): {"graphs": 1}})
    _, printed = checked(capsys)
    assert said in printed


def test_advice_that_several_findings_share_is_printed_once(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from compile_sweep.schema.outcome import Label, verdict_of

    replay({key(EAGER): {}, key(FULL): {"graphs": 8}, key(REGIONAL): {}, key(FINAL): {"graphs": 8}})
    right = {"numerics": {"status": "ok", "worst": "loss: off by 0%"}}
    monkeypatch.setattr(ScriptTrial, "judge_numbers", lambda self, *given: right)
    recompiled = ["recompile: f", "  → make it a tensor"]
    monkeypatch.setattr(script_check, "short_findings", lambda found: recompiled * (found["graphs"] > 1))
    limit = verdict_of(Label.RECOMPILE_LIMIT, "f hit recompile_limit 8; make it a tensor")
    monkeypatch.setattr(
        script_check,
        "judge_measurement",
        lambda figures, claims_cudagraphs: limit if figures["graphs"] > 1 else _nothing_wrong(figures, claims_cudagraphs=False),
    )
    _, said = checked(capsys)
    assert said.count("make it a tensor") == 1
    assert said.count("do not use: recompile-limit: f hit recompile_limit 8; what helps stands above\n") == 2
    assert "    → as above\n" in said


def test_numbers_are_judged_as_those_of_the_compiled_setting_which_decides_the_advice(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []

    def judge(self: ScriptTrial, *given: object) -> Found:
        judged.append(self.settings.key)
        return {"numerics": {"status": "ok", "worst": "loss: off by 0%"}}

    monkeypatch.setattr(ScriptTrial, "judge_numbers", judge)
    replay({key(EAGER): {}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): {"graphs": 1}})
    _, said = checked(capsys)
    assert judged == [key(FINAL)]
    assert "its numbers beside those of eager runs: ok (loss: off by 0%)" in said


def test_the_time_of_a_step_includes_its_wait_for_data(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_check._ScriptCheck, "_say_numbers", lambda *given: None)
    slower = {"step_ms_median": 12.0, "data_wait_share": 0.2, "graphs": 1}
    replay({key(EAGER): {"data_wait_share": 0.5}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): slower})
    _, said = checked(capsys)
    assert "a step takes about 20 ms; of that it waits for its data 50%\n  without the wait, it takes 10 ms\n" in said
    assert (
        "a step takes about 15 ms; of that it waits for its data 20%\n  without the wait, it takes 12 ms, which is 0.83 times"
        in said
    )


def test_a_wait_for_data_is_not_told_of_a_script_that_has_no_loader(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_check._ScriptCheck, "_say_numbers", lambda *given: None)
    replay({key(EAGER): {"data_wait_share": 0.0}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): {"data_wait_share": 0.001}})
    _, said = checked(capsys)
    assert "a step takes about 10 ms\n\n" in said, "nothing follows of data"
    assert said.count("waits for its data 0%") == 1, "of the run that waited a little"


@pytest.mark.parametrize(("step_ms", "ratio"), [(3000.0, "0.0033"), (120.0, "0.083"), (12.0, "0.83"), (0.5, "20.00")])
def test_a_ratio_of_speeds_has_two_significant_digits_or_more(
    step_ms: float,
    ratio: str,
    replay: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_check._ScriptCheck, "_say_numbers", lambda *given: None)
    replay({key(EAGER): {}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): {"step_ms_median": step_ms, "graphs": 1}})
    _, said = checked(capsys)
    assert f"which is {ratio} times as fast as the script as it is" in said


@pytest.mark.parametrize("busy", [EAGER, FINAL])
def test_a_ratio_of_speeds_is_not_told_where_other_processes_had_the_cores(
    busy: str,
    replay: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_check._ScriptCheck, "_say_numbers", lambda *given: None)
    faster = {"step_ms_median": 10 / 76, "graphs": 1, "core_wait_share": 0.0}
    results: Found = {key(EAGER): {}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): faster}
    results[key(busy)] = {**results[key(busy)], "core_wait_share": 0.6}
    replay(results)
    _, said = checked(capsys)
    assert "times as fast" not in said
    said = " ".join(said.split())
    assert "not known: how fast that is beside the script as it is; other processes had the cores for up to 60% of" in said


def test_a_loss_that_is_not_finite_in_eager_training_is_not_well(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_check._ScriptCheck, "_say_numbers", lambda *given: None)
    results: Found = {key(EAGER): {}, key(FULL): {}, key(REGIONAL): {}, key(FINAL): {}}
    replay(results)
    assert checked(capsys)[0] == 0
    replay({**results, key(EAGER): {"losses": [1.0, float("nan")]}})
    assert checked(capsys)[0] == 1


def test_a_check_that_its_budget_cuts_says_that_the_loss_is_not_finite(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    early = {"early": {"step_ms_median": 2.0}, "data_wait_share": 0.0, "findings": ["module model: Net"]}
    replay({key(EAGER): script_check._Unfinished({**early, "not_finite": "the script's own loss is NaN"})})
    _, said = checked(capsys)
    assert "the script's own loss is NaN" in said
    replay({key(EAGER): script_check._Unfinished({**early, "not_finite": None})})
    assert "own loss" not in checked(capsys)[1]


@pytest.mark.parametrize("blocks_work", [False, True])
def test_a_sweep_that_only_compiles_is_not_proposed_where_nothing_can_be_compiled(
    blocks_work: bool, replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    fails = script_check._Failed("the script differentiates the gradients of net again (create_graph=True)")
    ran = replay({key(EAGER): {}, key(FULL): fails, key(REGIONAL): {"graphs": 1} if blocks_work else fails})
    code, said = checked(capsys)
    assert code == 1
    assert ran == [key(EAGER), key(FULL), key(REGIONAL)]
    assert ("compile-sweep sweep quickstart --script plain_loop.py" in said) is blocks_work
    assert ("if it compiles as fast as other models" in said) is blocks_work
    assert ("compile-sweep sweep auto --script plain_loop.py" in said) is not blocks_work


def test_a_script_that_is_not_measured_in_time_still_says_what_it_trains(
    replay: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    replay({key(EAGER): script_check._Unfinished({"phase": "warming up", "findings": ["module model: Net"]})})
    code, said = checked(capsys, "--time-budget-s", "60")
    assert code == 1
    assert "module model: Net" in said
    assert "not known: how long a step takes, what it waits for; the time budget of 60 s was used up" in said
    assert "not known: breaks, and what a sweep would cost" in said


def test_a_budget_that_allows_nothing_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = checked(capsys, "--time-budget-s", "1")
    assert code == 1
    assert "not known: what the script trains, how long a step takes, what it waits for; the time budget of 1 s" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--script", "plain_loop.py", "--time-budget-s", "0"], "--time-budget-s 0 is not an amount of time"),
        (["layers", "--time-budget-s", "9"], "--time-budget-s is for a script"),
    ],
)
def test_a_budget_that_does_not_apply_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([*words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_packages_that_a_script_begins_with_are_imported_once(folder: Path) -> None:
    (folder / "train.py").write_text(
        '"""Trains."""\nfrom __future__ import annotations\nimport json\nimport net, os\nfrom net import Net\n'
        "from torch import nn\nfrom .near import x\nos.environ['X'] = '1'\nimport numpy\n"
    )
    (folder / "net.py").write_text("import math\nfrom torch.nn import functional as F\n")
    assert leading_imports(ScriptJob.of("train.py")) == (
        "import json",
        "from torch import nn",
        "import math",
        "from torch.nn import functional as F",
    ), "not those of the person's folder, nor what follows a statement that may decide how packages are imported"
    (folder / "train.py").write_text("def f(:\n")
    assert leading_imports(ScriptJob.of("train.py")) == ()


@pytest.mark.slow
def test_runs_are_forked_one_after_the_other_and_end_with_their_time(folder: Path, tmp_path: Path) -> None:
    (folder / "endless.py").write_text("import time\ntime.sleep(600)\n")
    (folder / "own.py").write_text(
        "import os, orchestrator, torch\n"
        "raise SystemExit(f'{orchestrator.WHOSE}, {torch.get_num_threads()} thread, {os.environ.get(\"RANK\")}')\n"
    )
    (folder / "orchestrator.py").write_text("WHOSE = 'of its own'\n")
    (folder / "server.py").write_text("import no_such_package\n")
    job = ScriptJob.of("server.py", folder=str(folder))
    with closing(ForkedScriptRuns(job, {"CUDA_VISIBLE_DEVICES": "", "RANK": "0"}, use_gpu=False)) as runs:

        def run(script: str, *arguments: str, within_s: float = 300) -> Found:
            base = tmp_path / script
            (base / "run").mkdir(parents=True)
            return ScriptTrial(
                job=ScriptJob.of(script, arguments, folder=str(folder)),
                settings=CompileSettings.parse(EAGER),
                base=base,
                references=tmp_path / "references",
                protocol=SHORT,
                environment={"OMP_NUM_THREADS": "1"},
                shows_output=False,
                start=runs.start,
                ends_at=time.monotonic() + within_s,
            ).run_once(base / "run")

        outcome = run("plain_loop.py", "--width", "8")
        assert outcome["findings"][0].startswith("module model: Net")
        assert outcome["has_blocks"] is True
        facts = outcome["measurement"]["model_facts"]
        assert (facts["memory_format"], facts["has_blocks"], facts["has_attention"]) == (None, True, False)
        assert facts["regional_share"] > 0
        assert facts["classes"] == ["Block", "Net"]
        assert (facts["batches_change"], facts["shapes_recur"]) == (False, True)
        step_ms = outcome["measurement"]["step_ms_median"]
        assert step_ms > 0
        assert facts["num_shapes"] == 1
        calls = 2  # a step, which accumulates
        assert facts["us_per_operator"] == pytest.approx(1e3 * step_ms / calls / facts["num_operators"], rel=0.02)
        with pytest.raises(OutOfTime):
            run("endless.py", within_s=1)
        with pytest.raises(RunFailed, match="with the message 'of its own, 1 thread, None'"):
            run("own.py")
