"""What the compiler did, from real compiles on the CPU and from torch's own functions that need no GPU."""

from __future__ import annotations

import inspect
import logging
import logging.config
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faulty_workloads import BreaksInALoop, BreaksItsGraph, BypassesItsBlocks, CompilesNothing, SuppressesErrors
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter
from torch._inductor.utils import fresh_cache
from torch._logging._internal import log_registry, log_state
from toy_workloads import Toy, ToyModel

from compile_sweep.contract.base import Workload
from compile_sweep.harness.apply import applied
from compile_sweep.harness.diagnostics.capture import Diagnostics, _Reader, capture_diagnostics
from compile_sweep.harness.diagnostics.coverage import Expectation
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning

CPU = torch.device("cpu")
QUICK = "backend=eager"
"""Dynamo alone, which decides on breaks, recompiles and what is left eager."""


def watched(workload: Workload, spelled: str) -> Diagnostics:
    """Runs one step on each batch of the pool."""
    torch._dynamo.reset()
    settings = CompileSettings.parse(spelled)
    prepared = prepare(workload, settings, CPU)
    model = workload.build_model()
    optimizer = workload.optimizer(model, settings.optimizer)
    expected = Expectation.of(prepared, model, optimizer)
    with capture_diagnostics(expected) as found, applied(prepared, model, optimizer) as step:
        for batch in workload.pool(settings.shape_policy(workload.max_length), rank=0, device=CPU):
            step(batch)
    return found


def line_of(function: object, code: str) -> str:
    """`file:line` of the line with this code."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    offset = next(index for index, line in enumerate(lines) if code in line)
    return f"{Path(inspect.getfile(function)).name}:{first + offset}"  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelled",
    [
        f"scope=full,{QUICK}",
        f"scope=full,dynamic=auto,pad_multiple=4,{QUICK}",
        f"scope=modular,dynamic=mark,pad_multiple=4,{QUICK}",
        f"scope=regional,{QUICK}",
        f"scope=regional,dynamic=mark,pad_multiple=4,{QUICK}",
        f"scope=regional,optimizer=compiled,{QUICK}",
        "scope=eager",
    ],
)
def test_nothing_speaks_against_a_sound_workload(spelled: str) -> None:
    found = watched(Toy("only", 0), spelled)
    assert (found.fallbacks, found.recompile_limit_hits, found.cudagraph_skips) == ([], [], 0)
    assert [reason for reason in found.graph_break_reasons if "torch/optim/" not in reason] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "scope",
    [
        pytest.param(scope, marks=pytest.mark.nightly("test_apply.py measures captioning, full and regional, without a fallback"))
        for scope in ("regional", "full", "modular")
    ],
)
def test_blocks_of_a_library_that_wraps_their_forwards_are_seen_to_be_compiled(scope: str) -> None:
    found = watched(Captioning("tiny", 0), f"scope={scope},{QUICK}")
    assert (found.fallbacks, found.graph_break_reasons) == ([], [])
    assert found.graphs > 0


@pytest.mark.slow
def test_a_graph_break_names_the_models_line_its_code_and_what_torch_advises() -> None:
    found = watched(BreaksItsGraph("only", 0), f"scope=full,{QUICK}")
    assert found.graphs == 2
    assert len(found.graph_break_reasons) == 1
    head, *rest = found.graph_break_reasons[0].splitlines()
    line = line_of(BreaksItsGraph.model_class.spoiled, "graph_break()")
    assert head == f"{line} in spoiled: Call to `torch._dynamo.graph_break()`"
    assert "  code: torch._dynamo.graph_break()" in rest
    assert "  hint: Remove the `torch._dynamo.graph_break()` call." in rest
    assert found.fallbacks == []  # both halves are compiled


@pytest.mark.slow
def test_a_break_that_keeps_a_function_from_being_compiled_is_a_fallback_too() -> None:
    found = watched(BreaksInALoop("only", 0), f"scope=full,{QUICK}")
    line = line_of(BreaksInALoop.model_class.forward, "graph_break()")
    assert [reason.splitlines()[0].split(" ")[0] for reason in found.graph_break_reasons] == [line]
    assert len(found.fallbacks) == 1
    assert found.fallbacks[0].startswith("forward (faulty_workloads.py:")
    assert "graph break in loop" in found.fallbacks[0]
    assert found.fallbacks[0].endswith(f"at {line}")
    assert found.graphs > 0  # what the loop calls is compiled, so the number of graphs would not show it


def test_a_suppressed_error_of_the_back_end_is_a_fallback() -> None:
    workload = SuppressesErrors("only", 0)
    with workload.process_settings():
        found = watched(workload, f"scope=full,backend={workload.backend}")
    assert found.graphs == 0
    assert "its compile failed and the error was suppressed (BackendCompilerFailed" in found.fallbacks[0]
    assert "this back-end compiles nothing" in found.fallbacks[0]
    assert found.fallbacks[-1] == "nothing was compiled: torch made no graph, though the settings say scope=full"


@pytest.mark.parametrize("spelled", [f"scope=full,{QUICK}", f"scope=full,optimizer=compiled,{QUICK}"])
def test_a_switched_off_compiler_is_a_fallback(spelled: str) -> None:
    with torch._dynamo.config.patch(disable=True):
        found = watched(Toy("only", 0), spelled)
    assert len(found.fallbacks) == 1
    assert found.fallbacks[0].startswith("nothing was compiled: torch made no graph, though the settings say scope=full")


def test_a_forward_that_dynamo_must_not_touch_is_a_fallback() -> None:
    found = watched(CompilesNothing("only", 0), f"scope=full,{QUICK}")
    assert found.fallbacks == ["nothing was compiled: torch made no graph, though the settings say scope=full"]


@pytest.mark.slow
def test_regions_that_are_never_called_are_a_fallback_though_other_things_are_compiled() -> None:
    found = watched(BypassesItsBlocks("only", 0), f"scope=regional,optimizer=compiled,{QUICK}")
    assert found.graphs == 1
    names = "3 modules (body.blocks.0 to body.blocks.2) of class Block"
    assert found.fallbacks == [f"{names} were meant to be compiled and never were"]


@pytest.mark.slow
def test_a_recompile_names_the_function_and_the_guard_that_failed() -> None:
    found = watched(Toy("only", 0), f"scope=modular,dynamic=buckets,bucket_size=8,{QUICK}")
    assert len(found.recompile_reasons) == 2
    line = line_of(inspect.getmodule(ToyModel).Body.forward, "def forward")  # type: ignore[union-attr]
    assert found.recompile_reasons[0] == f"Body.forward ({line}): tensor 'ids' size mismatch at index 1. expected 8, actual 16"


@pytest.mark.slow
def test_a_hit_recompile_limit_names_the_function_the_limit_and_the_guard() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        found = watched(Toy("only", 0), f"scope=full,dynamic=buckets,bucket_size=4,{QUICK}")
    assert len(found.recompile_limit_hits) == 1
    assert "forward (toy_workloads.py:" in found.recompile_limit_hits[0]
    assert "hit recompile_limit 2: tensor" in found.recompile_limit_hits[0]
    assert found.fallbacks == []  # it has a label of its own


@pytest.mark.slow
def test_torchs_performance_hints_are_collected_once_each() -> None:
    square = torch.compile(lambda x: x @ x, dynamic=False)  # two graphs without a kernel that takes a C++ compiler
    with fresh_cache(), capture_diagnostics() as found:  # a graph from a cache is not compiled, and logs nothing
        square(torch.ones(4, 4)), square(torch.ones(8, 8))
    assert found.graphs == 2
    assert found.perf_hints == ["Skip comprehensive padding on CPU"]


@pytest.mark.parametrize("cudagraphs", [True, False])
def test_gradients_copied_for_cuda_graphs_are_a_hint_only_where_there_are_some(cudagraphs: bool) -> None:
    names = ["L['self'].param_groups[0]['params'][0].grad", "L['self'].param_groups[0]['params'][1].grad"]
    with capture_diagnostics(Expectation(what="", targets={}, cudagraphs=cudagraphs)) as found:
        log = logging.getLogger("torch._dynamo.variables.optimizer.__perf_hints")
        log.warning(("Grad tensors %s will be copied.", "Use mark_static_address."), names)  # type: ignore[arg-type] # as torch does
    assert found.perf_hints == (["Grad tensors [2 of them] will be copied. Use mark_static_address."] if cudagraphs else [])


def test_a_warning_of_inductor_is_a_performance_hint_and_still_a_warning() -> None:
    inductor = str(Path(torch.__file__).parent / "_inductor" / "compile_fx.py")
    with warnings.catch_warnings(record=True, action="always") as shown, capture_diagnostics() as found:
        warnings.warn_explicit("TensorFloat32 is available but not enabled", UserWarning, inductor, 1)
        warnings.warn_explicit("TensorFloat32 is what a user calls it", UserWarning, __file__, 1)
        logging.getLogger("torch._inductor.utils").warning("Not enough SMs to use max_autotune_gemm mode")
    assert found.perf_hints == ["TensorFloat32 is available but not enabled", "Not enough SMs to use max_autotune_gemm mode"]
    assert len(shown) == 2


@pytest.mark.parametrize("how", ["dictConfig", "disable"])
def test_findings_do_not_depend_on_loggers_that_are_switched_on(how: str) -> None:
    log = logging.getLogger("torch._dynamo.guards.__recompiles")
    loggers = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger) and not one.disabled]
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        logging.config.dictConfig({"version": 1}) if how == "dictConfig" else logging.disable(logging.CRITICAL)
        torch._dynamo.reset()
        with capture_diagnostics() as found:
            double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
            double(torch.ones(3)), double(torch.ones(4))
        assert (log.disabled, log.isEnabledFor(logging.CRITICAL)) == (how == "dictConfig", False)
    finally:
        logging.disable(logging.NOTSET)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        for one in loggers:
            one.disabled = False
    assert len(found.recompile_reasons) == 1


def test_skipped_cuda_graphs_are_counted_and_say_why_and_where() -> None:
    stack = f'  File "{__file__}", line 12, in forward\n    labels.masked_fill_(mask, -100)\n'
    with capture_diagnostics() as found:
        for _ in range(2):
            log_cudagraph_skip_and_bump_counter(
                f"skipping cudagraphs due to mutated inputs (1 instances). Found from : \n {stack}"
            )
    where = "test_capture.py:12: labels.masked_fill_(mask, -100)"
    assert found.cudagraph_skip_reasons == [f"skipping cudagraphs due to mutated inputs (1 instances), at {where}"]
    assert found.cudagraph_skips == 2


def test_many_captured_sizes_are_a_hint_and_no_skip() -> None:
    with capture_diagnostics() as found:
        log = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
        log.warning("CUDAGraph supports dynamic shapes by recording a new graph. We have observed 9 distinct sizes.")
    assert (found.cudagraph_skips, found.cudagraph_skip_reasons) == (0, [])
    assert "9 distinct sizes" in found.perf_hints[0]


@pytest.mark.parametrize("recorded", [True, False])
def test_cuda_graphs_that_were_claimed_and_never_recorded_count_as_skipped(recorded: bool) -> None:
    with capture_diagnostics(Expectation(what="", targets={}, cudagraphs=True)) as found:
        scheduler = logging.getLogger("torch._inductor.scheduler.__cudagraphs")
        scheduler.debug("    %s: %s", "buf3", "reason=cpu ops, ir=ComputedBuffer, fx=aten.add.Tensor(x, 1)")
        for line in (f'File "{__file__}", line 40, in forward', "  x = x.cpu() + 1"):
            scheduler.debug("         %s", line)
        if recorded:
            logging.getLogger("torch._inductor.cudagraph_trees.__cudagraphs").info("[%s] Recording cudagraph tree for", "0/0")
    outside = "a part of a graph runs outside its CUDA graphs: cpu ops in aten.add.Tensor, at test_capture.py:40: x = x.cpu() + 1"
    assert found.perf_hints == [outside]
    assert found.cudagraph_skips == (0 if recorded else 1)
    assert found.cudagraph_skip_reasons == ([] if recorded else [f"no CUDA graph was recorded; {outside}"])


@pytest.mark.parametrize("cudagraphs", [True, False])
def test_the_thousands_of_records_about_nodes_outside_cuda_graphs_are_not_written_to_the_log(cudagraphs: bool) -> None:
    scheduler, written = logging.getLogger("torch._inductor.scheduler.__cudagraphs"), []
    handler = logging.Handler()
    handler.emit = written.append  # type: ignore[method-assign]
    logging.getLogger("torch").addHandler(handler)
    try:
        with capture_diagnostics(Expectation(what="", targets={}, cudagraphs=cudagraphs)):
            assert scheduler.isEnabledFor(logging.DEBUG) == cudagraphs
            scheduler.debug("    %s: %s", "buf3", "reason=partition includes all ops when cudagraphs is disabled")
    finally:
        logging.getLogger("torch").removeHandler(handler)
    assert written == []
    assert scheduler.propagate


@pytest.mark.slow
def test_no_text_holds_a_path_of_this_machine() -> None:
    texts: list[str] = []
    for workload, spelled in (
        (BreaksItsGraph("only", 0), f"scope=full,dynamic=auto,pad_multiple=4,optimizer=compiled,{QUICK}"),
        (BreaksInALoop("only", 0), f"scope=full,{QUICK}"),
    ):
        found = watched(workload, spelled)
        texts += [*found.graph_break_reasons, *found.recompile_reasons, *found.fallbacks]
    assert len(texts) > 4
    folders = {str(Path(path).parent) for path in (torch.__file__, __file__, inspect.getfile(Toy), os.__file__)}
    assert [text for text in texts for folder in folders if folder in text] == []


def settings_of_torchs_logs() -> list[object]:
    loggers = [logging.getLogger(name) for name in _Reader(Diagnostics()).sources()]
    hooks = list(torch._dynamo.convert_frame._bytecode_hooks.values())
    state: list[object] = [set(log_state.artifact_names), warnings.showwarning, hooks]
    return [*state, *((logger.level, logger.propagate, list(logger.handlers)) for logger in loggers)]


def test_torchs_logging_is_as_before_even_after_an_error() -> None:
    before = settings_of_torchs_logs()
    with suppress(KeyError), capture_diagnostics():
        assert settings_of_torchs_logs() != before
        raise KeyError
    assert settings_of_torchs_logs() == before


def test_a_record_that_cannot_be_read_does_not_end_a_compile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch._inductor.graph.__perf_hints")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])  # pytest's own, wherever it is, would raise
    with capture_diagnostics():
        logger.info("%d ops", "many")
    assert "TypeError" in capsys.readouterr().err


def artifact_loggers() -> Iterator[str]:
    import torch._inductor.codegen.simd
    import torch._inductor.compile_fx
    import torch._inductor.cudagraph_trees  # noqa: F401 - all three register loggers

    kinds = ("graph_breaks", "recompiles", "recompiles_verbose", "cudagraphs", "perf_hints")
    yield from (name for name in log_registry.get_artifact_log_qnames() if name.rpartition(".__")[2] in kinds)


def test_every_logger_the_installed_torch_has_for_these_findings_is_listened_to() -> None:
    passed_on = {"torch._dynamo.exc.__graph_breaks"}  # Dynamo logs each of these once more, with the user's line
    assert set(artifact_loggers()) - passed_on <= _Reader(Diagnostics()).sources().keys()


WATCH = """
import torch
from compile_sweep.harness.diagnostics.capture import capture_diagnostics
@torch.compile(backend="aot_eager", dynamic=False)
def double(x):
    torch._dynamo.graph_break()
    return x * 2
with capture_diagnostics() as found:
    double(torch.ones(2)), double(torch.ones(3))
print(len(found.graph_break_reasons), len(found.recompile_reasons), found.graphs)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "logs",
    [
        pytest.param("", marks=pytest.mark.nightly("every other test in the file covers this case")),
        pytest.param("perf_hints", marks=pytest.mark.nightly("starts a process; `make test` runs one with more logs")),
        "+dynamo,recompiles_verbose,perf_hints",
    ],
)
def test_findings_do_not_depend_on_what_torch_is_told_to_log(logs: str, repository: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repository), "TORCH_LOGS": logs}
    if not logs:
        del environment["TORCH_LOGS"]
    run = subprocess.run([sys.executable, "-c", WATCH], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["1", "1", "2"]


@pytest.mark.parametrize(
    ("headline", "explanation", "tells"),
    [
        ("Dynamic shape operator", "Operator `aten.nonzero.default`'s output shape depends on input Tensor data.", True),
        ("Call to `torch._dynamo.graph_break()`", "User-inserted graph break. Message: None", False),
    ],
)
def test_a_break_tells_more_than_speed_if_an_option_mends_it(headline: str, explanation: str, tells: bool) -> None:
    found = Diagnostics(graph_break_reasons=[f"model.py:3 in forward: {headline}\n  explanation: {explanation}"])
    assert found.tells_more_than_speed is tells
