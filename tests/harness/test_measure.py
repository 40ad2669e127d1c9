"""The measuring protocol: its phases, and the consistency of its figures."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from toy_workloads import Toy

from compile_sweep.contract.base import Batch
from compile_sweep.harness import memory, steady
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import ShapePolicy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=2, min_passes=3, max_passes=3, cpu_window_s=0.0)


def measured(spelled: str, workload: Toy | None = None, protocol: Protocol = SHORT, pipeline: str = "resident") -> Measurement:
    return measure(prepare(workload or Toy("only", 0), CompileSettings.parse(spelled), CPU), protocol=protocol, pipeline=pipeline)


def test_no_full_collection_falls_among_timed_steps_and_the_collector_is_as_before_after(monkeypatch: pytest.MonkeyPatch) -> None:
    before, oldest = gc.get_threshold(), list[int]()

    for name in ("first_pass", "grow"):
        timed = getattr(steady, name)

        def watched(*arguments: Any, timed: Callable[..., Any] = timed, **named: Any) -> Any:
            oldest.append(gc.get_threshold()[2])
            return timed(*arguments, **named)

        monkeypatch.setattr(steady, name, watched)
    measured("scope=eager")
    assert len(oldest) == 2
    assert min(oldest) > 10**6, "full collections that young ones must come before"
    assert gc.get_threshold() == before


def test_phases_come_in_order_and_figures_agree_with_each_other() -> None:
    phases: list[Phase] = []
    settings = CompileSettings.parse("scope=eager")
    found = measure(prepare(Toy("only", 0), settings, CPU), protocol=SHORT, on_phase=phases.append)
    assert phases == [Phase.BUILDING, Phase.WARMING_UP, Phase.STEADY, Phase.CHECKING, Phase.EAGER_RUNS, Phase.DONE]
    assert found.steady_steps == len(found.step_ms) == 3 * Toy.pool_batches
    assert found.warmup_steps == 2 + 2  # two compared, one length visited twice
    assert found.step_ms_median == pytest.approx(statistics.median(found.step_ms), abs=1e-3)
    assert found.compile_s == pytest.approx(max(0, found.warmup_s - found.warmup_steps * found.step_ms_median / 1e3), abs=1e-9)
    assert sum(found.compile_phases_s.values()) == pytest.approx(found.compile_s)
    assert 0 < found.first_step_s <= found.warmup_s
    seconds = sum(found.step_ms) / 1e3
    assert found.samples_per_s == pytest.approx(found.steady_steps * Toy.batch_size / seconds, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(found.samples_per_s * Toy.max_length, rel=1e-6)
    low, high = found.samples_per_s_ci95
    assert low < found.samples_per_s < high
    assert found.mean_length == Toy.max_length
    assert found.peak_memory_bytes > 0
    assert "make_step" in found.source
    assert (found.pipeline, found.data_wait_share) == ("resident", None)
    assert len(found.eager_step_ms) == 3 * Toy.pool_batches


def test_the_warm_up_visits_every_length_even_those_the_pool_lacks() -> None:
    seen: list[int] = []

    class Watched(Toy):
        def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
            seen.append(length)
            return super().batch_of_length(length, rank=rank, device=device)

    found = measured("scope=eager,padding=longest,pad_multiple=2", Watched("only", 0))
    assert seen == [2, 8, 12, 14]  # the pool's are 6, 16, 10 and 4
    assert found.warmup_steps == 2 + 2 * 8


class Clock:
    """Stands still except for the time that steps claim to take, so that a busy host changes no figure."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the timed steps."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    return clock


class Paced(Toy):
    """Takes a millisecond per token on the clock, and with its first model half a second more, as if it compiled."""

    compile_s = 0.5

    def __init__(self, clock: Clock, paces: Iterable[float] = ()) -> None:
        super().__init__("only", 0)
        self.clock = clock
        self._paces = iter(paces)

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()

        def run(module: torch.nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
            compile_s, self.compile_s = self.compile_s, 0.0
            self.clock.advance(compile_s + next(self._paces, 1.0) * kwargs["ids"].size(1) / 1e3)

        model.register_forward_pre_hook(run, with_kwargs=True)
        return model


def test_compile_seconds_are_free_of_a_warm_up_that_visits_long_batches_more_often_than_the_pool(clock: Clock) -> None:
    found = measured("scope=eager,padding=longest,pad_multiple=1", Paced(clock))
    assert found.warmup_s == pytest.approx(0.5 + (2 * sum(range(1, 17)) + 5 + 16) / 1e3)  # each length twice, and the compared
    assert found.compile_s == pytest.approx(0.5)
    assert found.first_step_s == pytest.approx(0.505)
    assert found.step_ms_median == pytest.approx((5 + 16 + 9 + 3) / 4)
    assert found.stable


def test_eager_against_eager_is_no_faster_whatever_the_clock_does(clock: Clock) -> None:
    slower_and_slower = (1 + 0.002 * step for step in range(1000))
    protocol = Protocol(compared_steps=2, min_passes=6, max_passes=6, cpu_window_s=0.0, cpu_target_width=0.05)
    found = measured("scope=eager,padding=longest,pad_multiple=1", Paced(clock, slower_and_slower), protocol)
    assert found.speedup_eager == pytest.approx(1.0, abs=0.01)
    assert found.speedup_eager_ci95 is not None
    assert found.clock_drift is not None
    assert 0.05 < found.clock_drift < 0.2
    assert not found.stable


def test_without_room_for_an_eager_reference_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "has_room", lambda peak_bytes, device: False)
    found = measured("scope=eager")
    assert (found.eager_step_ms, found.speedup_eager, found.speedup_eager_ci95, found.clock_drift) == ([], None, None, None)
    assert found.steady_steps == 3 * Toy.pool_batches
    assert found.numerics["status"] == "ok"


def test_an_eager_reference_that_does_not_fit_after_all_is_done_without() -> None:
    class Hungry(Toy):
        """Its second model runs out of memory in the middle of its second block."""

        built = 0

        def build_model(self) -> torch.nn.Module:
            model = super().build_model()
            self.built += 1
            if self.built == 2:
                steps = iter(range(2 + 2 + 7))

                def allocate(*_: object) -> None:
                    if next(steps, None) is None:
                        raise torch.OutOfMemoryError("CUDA out of memory")

                model.register_forward_pre_hook(allocate)
            return model

    found = measured("scope=eager", Hungry("only", 0))
    assert (found.eager_step_ms, found.speedup_eager) == ([], None)
    assert found.steady_steps == 3 * Toy.pool_batches
    assert found.numerics["status"] == "ok"


@pytest.mark.parametrize(("budget_s", "batches"), [(10.0, 4), (0.2, 3), (0.1, 0)])
def test_slow_eager_steps_are_few_or_none(clock: Clock, budget_s: float, batches: int) -> None:
    protocol = Protocol(compared_steps=1, min_passes=3, max_passes=3, cpu_window_s=0.0, eager_budget_s=budget_s)
    # 16 ms per step, three blocks, each with one more step that is not timed.
    found = measured("scope=eager", Paced(clock), protocol)
    assert len(found.eager_step_ms) == 3 * batches
    assert found.steady_steps == 3 * Toy.pool_batches


def test_a_noisy_window_ends_at_its_limit_and_is_called_unstable(clock: Clock) -> None:
    noisy = Paced(clock, itertools.cycle([0.2, 2.0, 0.5]))
    found = measured("scope=eager", noisy, Protocol(compared_steps=1, min_passes=2, max_passes=5, cpu_window_s=0.0))
    assert found.steady_steps == 5 * Toy.pool_batches
    assert not found.stable
    assert found.outliers > 0


def test_equal_seeds_give_equal_losses() -> None:
    losses = {measured("scope=eager", Toy("only", 7)).numerics["last_loss"] for _ in range(2)}
    assert len(losses) == 1
    assert losses.pop() > 0


class _SlowlyLoaded(Paced):
    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
        while True:
            for batch in self.pool(policy, rank=rank, device=CPU):
                self.clock.advance(0.03)
                yield batch


def test_a_real_pipeline_gives_its_own_throughput_and_the_share_of_it_that_waits(clock: Clock) -> None:
    found = measured("scope=eager", _SlowlyLoaded(clock), pipeline="real")
    assert found.pipeline == "real"
    assert found.step_ms_median == pytest.approx(16)
    assert found.samples_per_s == pytest.approx(Toy.batch_size / (0.03 + 0.016))
    assert found.tokens_per_s == pytest.approx(found.samples_per_s * Toy.max_length)
    assert found.data_wait_share == pytest.approx(30 / 46)


def test_a_pipeline_of_another_name_is_refused_before_anything_is_built() -> None:
    with pytest.raises(WorkloadError, match="pipeline=reel does not exist; use one of resident, real"):
        measured("scope=eager", pipeline="reel")
