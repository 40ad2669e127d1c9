"""Optimizers of `WorkloadFromModel`: arguments added to the constructor, and those that the user sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from compile_sweep import WorkloadFromModel, measure
from compile_sweep.contract.base import Workload
from compile_sweep.harness.apply import applied
from compile_sweep.harness.measure import Protocol
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings, OptimizerKind

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=2, min_passes=2, max_passes=2, cpu_window_s=0.0)
AdamW = torch.optim.AdamW


class Signs(torch.optim.Optimizer):
    """Does not accept `foreach`."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    weights.add_(weights.grad.sign(), alpha=-group["lr"])


def any_options(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return AdamW(parameters, **options)


def workload_with(optimizer_fn: Callable[..., torch.optim.Optimizer]) -> Workload:
    return WorkloadFromModel(
        lambda: nn.Linear(8, 8),
        lambda number: {"x": torch.randn(4, 8)},
        lambda model, batch: model(batch["x"]).square().mean(),
        num_batches=2,
        optimizer_fn=optimizer_fn,
    )("only", 0)


@pytest.mark.parametrize(
    ("optimizer_fn", "kind", "foreach", "fused"),
    [
        (AdamW, OptimizerKind.FOREACH, True, None),
        (AdamW, OptimizerKind.COMPILED, True, None),
        (AdamW, OptimizerKind.FUSED, None, True),
        (partial(AdamW, fused=True), OptimizerKind.FOREACH, None, True),
        (partial(AdamW, foreach=False), OptimizerKind.FOREACH, False, None),
        (partial(AdamW, foreach=True), OptimizerKind.FUSED, False, True),
        (any_options, OptimizerKind.FOREACH, True, None),
        (any_options, OptimizerKind.FUSED, None, True),
        (lambda parameters: AdamW(parameters, lr=0.5), OptimizerKind.FOREACH, None, None),
    ],
)
def test_foreach_and_fused_are_added_where_they_are_taken_and_left_open(
    optimizer_fn: Callable[..., torch.optim.Optimizer], kind: OptimizerKind, foreach: bool | None, fused: bool | None
) -> None:
    workload = workload_with(optimizer_fn)
    optimizer = workload.optimizer(workload.build_model(), kind)
    assert optimizer is not None
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (foreach, fused)


@pytest.mark.parametrize("optimizer_fn", [partial(AdamW, lr=3e-4, fused=True), Signs, partial(Signs, lr=1e-4)])
def test_a_fused_one_and_ones_own_are_measured(optimizer_fn: Callable[..., torch.optim.Optimizer]) -> None:
    found = measure(prepare(workload_with(optimizer_fn), CompileSettings.parse("scope=eager"), CPU), protocol=SHORT)
    assert found.numerics["status"] == "ok"


@pytest.mark.parametrize("optimizer_fn", [Signs, partial(Signs, lr=1e-4)])
def test_an_optimizer_that_cannot_be_fused_is_named(optimizer_fn: Callable[..., torch.optim.Optimizer]) -> None:
    workload = workload_with(optimizer_fn)
    with pytest.raises(SettingsError, match=r"^optimizer=fused: Signs takes no fused=; leave optimizer=fused out$"):
        workload.optimizer(workload.build_model(), OptimizerKind.FUSED)


def test_a_schedule_steps_after_each_step_and_torch_warns_of_nothing() -> None:
    workload = WorkloadFromModel(
        lambda: nn.Linear(4, 4),
        lambda number: {"x": torch.randn(2, 4)},
        lambda model, batch: model(batch["x"]).square().mean(),
        scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        num_batches=2,
    )()
    model = workload.build_model()
    optimizer = workload.optimizer(model, OptimizerKind.FOREACH)
    assert optimizer is not None
    rates = []
    with applied(prepare(workload, CompileSettings.parse("scope=eager"), CPU), model, optimizer) as step:
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            step(workload.batch_of_length(1, rank=0, device=CPU))
    assert rates == [1e-4, 0.5e-4, 0.25e-4]
