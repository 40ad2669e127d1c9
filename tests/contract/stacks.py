"""Workloads with a small model of blocks, for the tests of `WorkloadFromModel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep import WorkloadFromModel, measure
from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.harness.measure import Protocol
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=2, min_passes=2, max_passes=2, cpu_window_s=0.0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden).relu()


class Scale(nn.Module):
    """A layer of an own class, which holds a weight and no modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.weight).relu()


class Stack(nn.Module):
    """Two kinds of lists, one inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])])
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.mixed = nn.ModuleList([Layer(), nn.Sequential(nn.Linear(4, 4))])

    def forward(self, hidden: Tensor) -> Tensor:
        for stage in self.stages:
            for layer in stage:
                hidden = layer(hidden)
        return hidden


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["hidden"]).square().mean()


def rows_of(*lengths: int, samples: int = 2) -> Callable[[int], dict[str, Tensor]]:
    return lambda number: {"hidden": torch.randn(samples, lengths[number % len(lengths)], 4), "kind": torch.arange(samples)}


def made(batch_fn: Callable[[int], Any] | None = None, **told: Any) -> ModelWorkload:
    workload = WorkloadFromModel(Stack, batch_fn or rows_of(3, 7, 5), loss_of, **{"num_batches": 3, **told})("only", 0)
    assert isinstance(workload, ModelWorkload)
    return workload


def measured(workload: Workload, spelled: str) -> Measurement:
    return measure(prepare(workload, CompileSettings.parse(spelled), CPU), protocol=SHORT)
