"""The largest batch that fits, with a device whose memory ends at a number of samples."""

from __future__ import annotations

import pytest
import torch
from toy_workloads import EndsAt, Sized, Toy

from compile_sweep.harness.diagnostics.largest_batch import MOST_TIMES, bisected, largest_batch
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.record import largest_batch_text
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run import worker

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EAGER = CompileSettings.parse("scope=eager")


@pytest.mark.parametrize("start", [1, 3, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 63, 100, 150])
def test_bisection_finds_the_largest_size_that_fits(start: int, limit: int) -> None:
    tried = bisected(lambda size: 10 * size if size <= limit else None, start=start)
    fitting = [one for one in tried if one.peak_memory_bytes is not None]
    largest = max(fitting, key=lambda one: one.batch_size, default=None)
    sizes = [one.batch_size for one in tried]
    assert len(sizes) == len(set(sizes)) <= 16
    assert min(sizes) >= 1
    if limit >= 2 * start * MOST_TIMES or limit > max(sizes):
        assert max(sizes) == MOST_TIMES * start if start > 1 else 64  # nothing larger is tried
    elif limit == 0:
        assert largest is None
    else:
        assert largest is not None
        assert limit * (1 - 1 / 32) - 1 <= largest.batch_size <= limit
        assert largest.peak_memory_bytes == 10 * largest.batch_size


@pytest.mark.parametrize(
    ("fixed", "by_sample", "bend"), [(2**30, 44 * 2**20, 0), (3 * 2**30, 2**20, 0), (2**30, 44 * 2**20, 20_000)]
)
def test_where_the_memory_is_known_a_few_sizes_are_enough(fixed: int, by_sample: int, bend: int) -> None:
    capacity = 80 * 2**30

    def peak_of(size: int) -> int | None:
        peak = fixed + by_sample * size + bend * size * size
        return peak if peak <= 0.98 * capacity else None  # the last part is in fragments

    tried = bisected(peak_of, start=128, capacity_bytes=capacity)
    plain = bisected(peak_of, start=128)
    assert len(tried) <= len(plain)
    largest = max(one.batch_size for one in tried if one.peak_memory_bytes is not None)
    true = max(size for size in range(1, 64 * 128 + 1) if peak_of(size) is not None)
    assert true * (1 - 1 / 32) - 1 <= largest <= true
    assert len(tried) <= 6


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]
)
def test_steps_that_run_out_of_memory_do_not_fit_and_all_others_have_a_peak(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndsAt, "error", error)
    workload = Sized("only", 0)
    tried = largest_batch(workload, EAGER, CPU)
    assert [one.batch_size for one in tried] == [3, 6, 12, 9, 10, 11]
    assert [one.batch_size for one in tried if one.peak_memory_bytes is None] == [12]
    assert min(one.peak_memory_bytes or 2**40 for one in tried) > 2**20
    assert workload.batch_size == 3


def test_another_error_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndsAt, "error", RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        largest_batch(Sized("only", 0), EAGER, CPU)


def test_a_workload_without_a_batch_size_is_refused() -> None:
    with pytest.raises(SettingsError, match="Toy takes no batch size"):
        largest_batch(Toy("only", 0), EAGER, CPU)


def test_a_batch_that_is_split_keeps_even_parts() -> None:
    tried = largest_batch(Sized("only", 0), CompileSettings.parse("scope=eager,accumulate=3"), CPU)
    assert [one.batch_size for one in tried] == [3, 6, 12, 24, 48, 36, 30, 33]
    assert max(one.batch_size for one in tried if one.peak_memory_bytes is not None) == 33  # three parts of 11


def test_a_search_ends_in_time() -> None:
    taken_s = iter([0.0, 0.0, 1000.0, 1000.0])  # begins, then two readings for each size

    def tried_within(budget_s: float) -> list[int]:
        return [one.batch_size for one in bisected(lambda size: size, start=1, budget_s=budget_s)]

    assert tried_within(0.0) == []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("compile_sweep.harness.diagnostics.largest_batch.time.monotonic", lambda: next(taken_s))
        assert tried_within(2500.0) == [1]


def test_a_search_that_fails_costs_the_measurement_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndsAt, "error", RuntimeError("shapes do not fit"))
    workload = Sized("only", 0)
    found = worker._largest_batch(workload, prepare(workload, EAGER, CPU), ["a finding"], 60.0)
    assert found == {"findings": ["a finding", "the largest batch was not found: RuntimeError: shapes do not fit"]}


GIB = 2**30


@pytest.mark.parametrize(
    ("peaks", "words"),
    [
        (
            {"8": GIB, "16": 2 * GIB, "32": None, "24": 3 * GIB},
            "the largest batch that fits: 24, 3 times 8 (memory by batch size: 8 1.00 GiB, 16 2.00 GiB, 24 3.00 GiB, 32 does not "
            "fit)",
        ),
        ({"8": GIB}, "a batch of 8 fits; nothing larger was tried (memory by batch size: 8 1.00 GiB)"),
        ({"2": None, "1": None}, "no batch fits, not even one sample"),
        ({}, "no batch size was tried"),
    ],
)
def test_what_was_tried_is_one_line(peaks: dict[str, float | None], words: str) -> None:
    assert largest_batch_text(peaks, 8) == words
