"""Measurements of several workers become one."""

from __future__ import annotations

from typing import Any

import pytest

from compile_sweep.harness import protocol
from compile_sweep.harness.protocol import combined, told_by_all
from compile_sweep.schema.record import Measurement


def own(**fields: Any) -> Measurement:
    """The measurement of one worker."""
    usual: dict[str, Any] = {
        "device": "cpu", "compile_s": 10.0, "compile_phases_s": {"dynamo": 4.0, "other": 6.0}, "first_step_s": 9.0,
        "warmup_s": 11.0, "warmup_steps": 20, "steady_steps": 32, "step_ms_median": 100.0, "step_ms_ci95": (99.0, 101.0),
        "stable": True, "outliers": 0, "samples_per_s": 640.0, "samples_per_s_ci95": (630.0, 650.0), "tokens_per_s": 14_000.0,
        "mean_length": 100.0, "eager_step_ms": [], "speedup_eager": None, "speedup_eager_ci95": None, "clock_drift": None,
        "peak_memory_bytes": 100, "peak_reserved_bytes": None, "compile_peak_memory_bytes": None, "cudagraph_pool_bytes": None,
        "pipeline": "resident", "data_wait_share": None, "source": "pass", "numerics": {"status": "ok"}, "graphs": 1,
        "graph_break_reasons": [], "recompile_reasons": [], "recompile_limit_hits": [], "cudagraph_skips": 0,
        "cudagraph_skip_reasons": [], "perf_hints": [], "fallbacks": [], "step_ms": [100.0],
    }  # fmt: skip
    return Measurement(**(usual | fields))


def test_rates_add_up_and_each_worker_has_its_share() -> None:
    group = combined([own(), own(tokens_per_s=16_000.0, mean_length=120.0)])
    assert (group.samples_per_s, group.samples_per_s_per_worker, group.tokens_per_s) == (1280.0, 640.0, 30_000.0)
    assert group.samples_per_s_ci95 == pytest.approx((1260.0, 1300.0))
    assert group.mean_length == 110.0


def test_the_group_waits_for_the_slowest_and_needs_room_for_the_largest() -> None:
    slow = own(compile_s=12.0, compile_phases_s={"dynamo": 5.0, "other": 7.0}, warmup_s=13.0, peak_memory_bytes=120)
    group = combined([own(), slow, own(first_step_s=9.5)])
    assert (group.compile_s, group.first_step_s, group.warmup_s, group.peak_memory_bytes) == (12.0, 9.5, 13.0, 120)
    assert sum(group.compile_phases_s.values()) == group.compile_s
    assert (group.compile_s_by_rank, group.peak_memory_bytes_by_rank) == ([10.0, 12.0, 10.0], [100, 120, 100])
    assert group.peak_reserved_bytes is None


def test_a_finding_counts_whoever_made_it() -> None:
    group = combined([own(fallbacks=["a"]), own(fallbacks=["a", "b"], recompile_limit_hits=["step"], cudagraph_skips=2)])
    assert group.fallbacks == ["a", "worker 1: b"]
    assert group.recompile_limit_hits == ["worker 1: step"]
    assert group.cudagraph_skips == 2


def test_a_stranger_on_the_gpu_of_any_worker_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "by_rank", lambda own: [own, ["process 7, 2.0 GiB"], []])
    assert told_by_all([]) == ["worker 1: process 7, 2.0 GiB"]
    assert told_by_all(["process 5"]) == ["process 5", "worker 1: process 7, 2.0 GiB"]


@pytest.mark.parametrize(
    ("statuses", "worst"), [(("ok", "nan", "diverges"), "nan"), (("ok", "eager_unstable"), "eager_unstable"), (("ok",), "ok")]
)
def test_the_numbers_hold_only_where_every_workers_do(statuses: tuple[str, ...], worst: str) -> None:
    assert combined([own(numerics={"status": status}) for status in statuses]).numerics["status"] == worst


def test_one_worker_is_its_own_group() -> None:
    group = combined([own()])
    assert (group.samples_per_s, group.samples_per_s_per_worker, group.compile_s_by_rank) == (640.0, 640.0, [10.0])
