"""Compile seconds by phase: every moment is charged once, and little of a real compile is left over."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch._dynamo import utils as dynamo
from torch._inductor.cudagraph_trees import CUDAGraphTreeManager
from torch._inductor.utils import fresh_cache
from toy_workloads import Toy

from compile_sweep.harness.compile_phases import CompilePhase, PhaseClock, record_phases
from compile_sweep.harness.measure import measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.protocol import Protocol
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock in seconds, which tests set."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def charged(clock: PhaseClock) -> dict[str, float]:
    return {str(phase): seconds for phase, seconds in clock.seconds.items() if seconds}


def test_a_moment_belongs_to_the_innermost_span_that_says_what_it_is(now: list[float]) -> None:
    clock = PhaseClock()
    spans = [
        ("begin", "dynamo"),
        ("begin", "backend_compile"),
        ("begin", "inductor_compile"),
        ("begin", "a span no version of torch has"),
        ("begin", "async_compile.wait"),
        ("end", "async_compile.wait"),
        ("end", "a span no version of torch has"),
        ("end", "inductor_compile"),
        ("end", "backend_compile"),
        ("end", "dynamo"),
    ]
    for second, (what, span) in enumerate(spans):
        now[0] = float(second)
        getattr(clock, what)(span)
    assert charged(clock) == {"dynamo": 2.0, "other": 2.0, "inductor": 4.0, "kernel_compilation": 1.0}


def test_a_span_that_an_exception_left_open_closes_with_the_one_around_it(now: list[float]) -> None:
    clock = PhaseClock()
    clock.begin("dynamo")
    clock.begin("compiled_autograd")
    now[0] = 1.0
    clock.end("dynamo")
    now[0] = 5.0
    clock.end("never begun")
    clock.begin("code_gen")
    now[0] = 6.0
    clock.end("code_gen")
    assert charged(clock) == {"dynamo": 1.0, "inductor": 1.0}


def test_other_threads_count_only_while_this_one_is_in_no_span(now: list[float]) -> None:
    clock = PhaseClock()

    begun, finish, finished = threading.Event(), threading.Event(), threading.Event()

    def autograd() -> None:
        clock.begin("entire_backward_compile")
        begun.set()
        finish.wait()
        clock.end("entire_backward_compile")
        finished.set()

    thread = threading.Thread(target=autograd)
    thread.start()
    begun.wait()
    now[0] = 3.0
    clock.begin("async_compile.wait")
    now[0] = 5.0
    clock.end("async_compile.wait")
    now[0] = 6.0
    finish.set()
    finished.wait()
    thread.join()
    assert charged(clock) == {"aot_autograd": 4.0, "kernel_compilation": 2.0}


def test_parts_add_up_to_the_whole_whether_it_is_more_or_less_than_what_was_claimed(now: list[float]) -> None:
    clock = PhaseClock()
    clock.begin("build_guards")
    now[0] = 3.0
    clock.end("build_guards")
    clock.begin("CUDAGraphNode.record")
    now[0] = 4.0
    clock.end("CUDAGraphNode.record")
    more, less = clock.split(5.0), clock.split(2.0)
    assert list(more) == [str(phase) for phase in CompilePhase]
    assert {name: seconds for name, seconds in more.items() if seconds} == {"dynamo": 3.0, "cudagraph_capture": 1.0, "other": 1.0}
    assert {name: seconds for name, seconds in less.items() if seconds} == {"dynamo": 1.5, "cudagraph_capture": 0.5}
    assert set(PhaseClock().split(0.0).values()) == {0.0}


@pytest.mark.parametrize(
    ("span", "phase"),
    [
        ("aot_trace_joint_graph", CompilePhase.AOT_AUTOGRAD),
        ("CachingAutotuner.benchmark_all_configs", CompilePhase.AUTOTUNING),
        ("CachingAutotuner.slow_precompile_config", CompilePhase.KERNEL_COMPILATION),
        ("mm_template_precompiling", CompilePhase.KERNEL_COMPILATION),
        ("mm_template_autotuning", CompilePhase.AUTOTUNING),
        ("TritonBundler.load_cached_static_autotuners", CompilePhase.INDUCTOR),
        ("pgo.get_local_code_state", CompilePhase.DYNAMO),
        ("compile_fx.<locals>.bw_compiler", CompilePhase.INDUCTOR),
        ("cudagraphify.get_container", CompilePhase.CUDAGRAPH_CAPTURE),
    ],
)
def test_spans_that_cpus_never_see_have_their_phase(now: list[float], span: str, phase: CompilePhase) -> None:
    clock = PhaseClock()
    clock.begin(span)
    now[0] = 1.0
    clock.end(span)
    assert charged(clock) == {str(phase): 1.0}


@pytest.mark.parametrize(
    ("spelled", "graphs"),
    [("scope=full", 1), ("scope=regional,dynamic=auto,pad_multiple=4", 2), ("scope=eager,optimizer=compiled", 1)],
)
@pytest.mark.nightly("compiles cold with nothing beside it; the test below adds up the phases of a compile without Inductor")
@pytest.mark.slow
def test_at_least_nine_tenths_of_a_real_compile_have_a_name(spelled: str, graphs: int, tmp_path: Path) -> None:
    for _ in range(3):
        with fresh_cache(dir=str(tmp_path)):
            found = _measured(spelled)
        parts = found.compile_phases_s
        assert found.graphs == graphs
        assert sum(parts.values()) == pytest.approx(found.compile_s)
        assert all(parts[name] > 0 for name in ("dynamo", "aot_autograd", "inductor", "kernel_compilation")), parts
        if parts["other"] <= 0.1 * found.compile_s:
            return
    pytest.fail(f"three times in a row, what else the machine does being able to add to it: {parts}")


@pytest.mark.slow
def test_the_phases_of_a_real_compile_add_up_to_it() -> None:
    found = _measured("scope=full,backend=aot_eager")
    parts = found.compile_phases_s
    assert sum(parts.values()) == pytest.approx(found.compile_s)
    assert min(parts["dynamo"], parts["aot_autograd"]) > 0, parts


def _measured(spelled: str) -> Measurement:
    torch._dynamo.reset()
    protocol = Protocol(compared_steps=3, min_passes=2, max_passes=2, cpu_window_s=0.0)
    return measure(prepare(Toy("only", 0), CompileSettings.parse(spelled), CPU), protocol=protocol)


def test_running_and_capturing_a_graph_is_capture_and_torch_gets_its_methods_back(
    now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_two_seconds(*_: object) -> None:
        now[0] += 2.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for method in ("run_eager", "record_function"):
        monkeypatch.setattr(CUDAGraphTreeManager, method, takes_two_seconds)
    with record_phases() as clock:
        for method in ("run_eager", "record_function"):
            getattr(CUDAGraphTreeManager, method)(None, [], None)
    assert charged(clock) == {"cudagraph_capture": 4.0}
    assert CUDAGraphTreeManager.run_eager is takes_two_seconds


def test_torch_gets_its_logger_back() -> None:
    logger = dynamo.get_chromium_event_logger()
    before = dict(vars(logger))
    with record_phases() as clock, dynamo.dynamo_timed("build_guards"):
        pass
    assert clock.seconds[CompilePhase.DYNAMO] > 0
    assert dict(vars(logger)) == before


def test_a_torch_without_that_logger_leaves_everything_to_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dynamo, "get_chromium_event_logger")
    with record_phases() as clock:
        pass
    assert clock.split(2.0)["other"] == 2.0
