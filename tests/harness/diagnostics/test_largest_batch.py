"""The largest batch that fits, with a device whose memory ends at a number of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from toy_workloads import Toy, ToyModel

from compile_sweep.contract.options import Option
from compile_sweep.harness.diagnostics.largest_batch import MOST_TIMES, TriedBatch, bisected, largest_batch
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.check import batch_lines

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


class _EndsAt(ToyModel):
    """Raises what a device without memory left raises, above some samples."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if len(ids) > 11:
            raise self.error
        return super().forward(ids, labels)


class Sized(Toy):
    """Takes a batch size."""

    options: ClassVar[Mapping[str, Option]] = {"batch_size": int}
    model_class = _EndsAt


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]
)
def test_steps_that_run_out_of_memory_do_not_fit_and_all_others_have_a_peak(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_EndsAt, "error", error)
    workload = Sized("only", 0)
    tried = largest_batch(workload, EAGER, CPU)
    assert [one.batch_size for one in tried] == [3, 6, 12, 9, 10, 11]
    assert [one.batch_size for one in tried if one.peak_memory_bytes is None] == [12]
    assert min(one.peak_memory_bytes or 2**40 for one in tried) > 2**20
    assert workload.batch_size == 3


def test_another_error_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_EndsAt, "error", RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        largest_batch(Sized("only", 0), EAGER, CPU)


def test_a_workload_without_a_batch_size_is_refused() -> None:
    with pytest.raises(SettingsError, match="Toy takes no batch size"):
        largest_batch(Toy("only", 0), EAGER, CPU)


def test_what_was_tried_is_shown_by_size_with_its_memory() -> None:
    sizes = {8: 2**30, 16: 2 * 2**30, 32: None, 24: 3 * 2**30}
    tried = [TriedBatch(batch_size=size, peak_memory_bytes=peak) for size, peak in sizes.items()]
    lines, largest = batch_lines([{"batch_size": one.batch_size, "peak_memory_bytes": one.peak_memory_bytes} for one in tried], 8)
    assert lines == [
        "batch_size=8: 1.00 GiB", "batch_size=16: 2.00 GiB", "batch_size=24: 3.00 GiB", "batch_size=32: does not fit",
        "the largest that fits: 24, 3 times the workload's 8",
    ]  # fmt: skip
    assert largest == 24
