"""Compiles after the warm-up are reported, and do not hide in the figures as ordinary steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.late_compiles import LateCompiles
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.steady import MAX_RESTARTS, Limits, Window, find_shift, first_pass, grow
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings
from workloads import WorkloadFromModel

CPU = torch.device("cpu")
LIMITS = Limits(min_passes=4, max_passes=4, min_window_s=0.0, target_width=0.0)


class Switching(nn.Module):
    """Leaves out its deeper layers at first, by a counter of its own; from step `limit` on it includes them."""

    limit = 1

    def __init__(self) -> None:
        super().__init__()
        self.body, self.deep, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.body(x)
        return self.deep(x) if self.seen > self.limit else x


def batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 8)}


def measured(limit: int, more: str = "") -> Measurement:
    class Limited(Switching):
        pass

    Limited.limit = limit
    workload = WorkloadFromModel(Limited, batch, lambda model, inputs: model(inputs["x"]).square().mean(), num_batches=4)()
    settings = CompileSettings.parse(f"scope=full,dynamic=auto,backend=aot_eager,dynamo.allow_unspec_int_on_nn_module=on{more}")
    protocol = Protocol(compared_steps=3, min_passes=4, max_passes=4, cpu_window_s=0.0)
    return measure(prepare(workload, settings, CPU), protocol=protocol)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_switch_among_the_timed_steps_is_told_with_its_step_and_its_guard_and_timing_begins_anew() -> None:
    found = measured(limit=13)
    (told,) = (text for text in found.findings if text.startswith("compiled"))
    assert "compiled 1 graph after the warm-up, at step 13, in" in told
    assert "seen <= 12" in told
    assert "only steps after the last of these are timed" in told
    assert found.steady_steps == 4 * 4
    assert len(found.recompile_reasons) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_switch_within_the_warm_up_is_the_warm_ups_and_nothing_is_told() -> None:
    found = measured(limit=2)
    assert not [text for text in found.findings if text.startswith("compiled")]
    assert len(found.recompile_reasons) == 2


def stepping(compiles_at: set[int], seen: list[str], name: str, graphs: list[int]) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        if seen.count(name) in compiles_at:
            graphs[0] += 1
        seen.append(name)
        return torch.tensor(1.0)

    return step


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_sweep.harness.steady.largest_everywhere", lambda lengths, device: list(lengths))


class Sized(int):
    length = 8


def window_of(compiles_at: set[int]) -> tuple[Window, list[str]]:
    seen: list[str] = []
    graphs = [0]
    pool: list[Any] = [Sized(0), Sized(1), Sized(2)]
    compiled = stepping(compiles_at, seen, "compiled", graphs)
    window = first_pass(compiled, pool, CPU, steps=10, compiled_graphs=lambda: graphs[0])
    window.chosen, window.eager_steps = [1], 5
    grow(window, compiled, pool, LIMITS, CPU, reference=stepping(set(), seen, "eager", [0]))
    return window, seen


def test_passes_before_the_last_compile_are_dropped_and_eager_catches_up() -> None:
    window, seen = window_of({9})
    assert (window.restarts, window.is_settled, len(window.passes), len(window.eager_blocks)) == (1, True, 4, 4)
    assert window.steps == 10 + seen.count("compiled")
    assert window.eager_steps == 5 + seen.count("eager")
    assert window.steps <= window.eager_steps <= window.steps + 2


def test_without_a_compile_eager_runs_its_blocks_only() -> None:
    window, seen = window_of(set())
    assert (window.restarts, seen.count("eager")) == (0, 4 * 2)


def test_compiling_that_never_stops_ends_the_restarts_and_is_projected_onto_a_job() -> None:
    window, _ = window_of(set(range(100)))
    assert (window.restarts, window.is_settled, len(window.passes)) == (MAX_RESTARTS, False, 4)
    graphs = torch._dynamo.utils.counters["stats"]
    reasons: list[str] = []

    def step(batch: Any) -> Tensor:
        graphs["unique_graphs"] += 1
        reasons.append(f"forward (model.py:3): self.steps == {len(reasons)}")
        return torch.tensor(1.0)

    before = graphs["unique_graphs"]
    late = LateCompiles(step, reasons, steps=12)
    for _ in range(10):
        late(None)  # type: ignore[arg-type]
    graphs["unique_graphs"] = before
    (told,) = late.sentences(has_stopped=False)
    assert told.startswith("compiled 10 graphs after the warm-up, at step 12, 13, 14, … 21, in ")
    assert "forward (model.py:3): self.steps == 0, then 1, 2, 3, 4, …, 9 (10 times)" in told
    assert "compiling has not stopped" in told
    assert "100,000 steps compile 100,000 graphs" in told


def test_nothing_is_told_where_nothing_was_compiled() -> None:
    late = LateCompiles(lambda batch: torch.tensor(1.0), [], steps=3)
    late(None)  # type: ignore[arg-type]
    assert late.sentences(has_stopped=True) == []


@pytest.mark.parametrize(
    ("passes", "after"),
    [
        ([10.0] * 5 + [13.0] * 5, 5),
        ([13.0] * 3 + [10.0] * 6, 3),
        ([10.0, 13.0] * 5, None),
        ([10.0] * 5 + [11.5] * 5, None),
        ([10.0] * 9 + [13.0], None),
        ([10.0, 20.0], None),
    ],
)
def test_steps_that_change_for_good_are_a_shift_and_outliers_are_none(passes: list[float], after: int | None) -> None:
    shift = find_shift([[total] * 3 for total in passes])
    assert (shift.after_passes if shift else None) == after
