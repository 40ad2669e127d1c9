"""The workload's own loader: delays show in the figures, and no batch is lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_workloads import Toy

from compile_sweep.contract.base import Batch
from compile_sweep.harness.pipeline import parse_pipeline, prefetch_to_device, real_passes
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import ShapePolicy

CPU = torch.device("cpu")
POLICY = CompileSettings.parse("scope=eager,padding=longest,pad_multiple=1").shape_policy(Toy.max_length)
STEP_S = 0.01
ONE_THIRD = Toy.batch_size / (3 * STEP_S)
"""Samples per second of a step that waits twice its own time for data; a busy host only lowers it."""


def step(batch: Batch) -> Tensor:
    time.sleep(STEP_S)
    return torch.tensor(1.0)


class Loaded(Toy):
    """Has a loader that takes `batch_s` for each batch and is `ahead` batches ahead of the first step."""

    batch_s = 0.0
    ahead = 0
    endless = True

    def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
        batches = self.pool(policy, rank=rank, device=CPU)
        return _Stream([replace(batch, tokens=batch.tokens - 1) for batch in batches], self.batch_s, self.ahead, self.endless)


class _Stream:
    def __init__(self, batches: list[Batch], batch_s: float, ahead: int, endless: bool) -> None:
        self._batches, self._batch_s, self._ahead, self._endless = batches, batch_s, ahead, endless

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for batch in self._batches:
                if self._ahead:
                    self._ahead -= 1
                else:
                    time.sleep(self._batch_s)
                yield batch
            if not self._endless:
                return


def rate(workload: Toy) -> tuple[float, int, int]:
    found = real_passes(step, workload, POLICY, steps=4, passes=2, rank=0, device=CPU)
    assert [len(times) for times in found.step_ms] == [4, 4]
    return found.throughput().samples_per_s, found.samples, found.tokens


def test_waiting_for_batches_counts_to_the_steps_that_wait() -> None:
    fast, slow = Loaded("only", 0), Loaded("only", 0)
    slow.batch_s = 2 * STEP_S
    at_once, samples, tokens = rate(fast)
    assert samples == 2 * 4 * Toy.batch_size
    assert tokens == 2 * sum(batch.tokens - 1 for batch in fast.pool(POLICY, rank=0, device=CPU))
    assert rate(slow)[0] <= ONE_THIRD < at_once


def test_batches_that_were_ready_before_the_first_step_hide_no_slow_loader() -> None:
    workload = Loaded("only", 0)
    workload.batch_s, workload.ahead = 2 * STEP_S, 4
    assert rate(workload)[0] <= ONE_THIRD


def test_a_loader_that_ends_is_begun_again() -> None:
    workload = Loaded("only", 0)
    workload.endless = False
    assert rate(workload)[1] == 2 * 4 * Toy.batch_size


def test_a_workload_without_batches_or_without_a_loader_says_so() -> None:
    class Empty(Toy):
        def loader(self, policy: ShapePolicy, *, rank: int) -> Iterable[Batch]:
            return []

    with pytest.raises(WorkloadError, match="the loader of Empty gives no batches"):
        rate(Empty("only", 0))
    with pytest.raises(WorkloadError, match="Toy has no loader"):
        rate(Toy("only", 0))
    with pytest.raises(WorkloadError, match="pipeline=reel does not exist; use one of resident, real"):
        parse_pipeline("reel")


@pytest.mark.gpu
def test_batches_arrive_on_the_device_in_order_and_whole_while_the_device_computes() -> None:
    device = torch.device("cuda")

    def batches() -> Iterator[Batch]:
        for index in range(50):
            yield Batch(inputs={"x": torch.full((1 << 20,), float(index)).pin_memory()}, length=1, samples=1, tokens=1)

    weight = torch.randn(2048, 2048, device=device)
    sums = []
    for batch in prefetch_to_device(batches(), device):
        weight = torch.nn.functional.normalize(weight @ weight)  # keeps the stream busy, so that copies run beside it
        sums.append(batch.inputs["x"].sum())
    assert [round(float(total)) for total in sums] == [index << 20 for index in range(50)]
