"""Code that asks whether it is being compiled: it is named where compiled training differs from eager, and only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_check import EAGER, RIGHT
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.numerics.check import judge
from compile_sweep.harness.numerics.compiling_branches import compiling_branches
from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings, Scope
from workloads import WorkloadFromModel

CPU = torch.device("cpu")
SHORT = Protocol(min_passes=2, max_passes=2, cpu_window_s=0.0)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Rounded(nn.Module):
    """Rounds without a gradient where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def rounded(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x.round()
        return StraightThrough.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.rounded(4 * self.layer(x)) / 4)
        return y


class RoundedAlike(Rounded):
    def rounded(self, x: Tensor) -> Tensor:
        return x + (x.round() - x).detach()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def batch_fn(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 8), "y": torch.randint(4, (16,))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Rounded, RoundedAlike])
def test_a_branch_that_trains_another_model_where_it_is_compiled_is_named_and_one_formula_for_both_is_right(
    kind: type[Rounded],
) -> None:
    workload = WorkloadFromModel(kind, batch_fn, loss_fn)
    settings = CompileSettings(scope=Scope.FULL, backend="aot_eager")
    numerics = measure(prepare(workload("only", 0), settings, CPU), protocol=SHORT).numerics
    assert numerics["status"] == ("diverges" if kind is Rounded else "ok")
    if kind is Rounded:
        assert numerics["worst"].startswith("gradients of model.layer are zero in every compared step")
        assert numerics["advice"] is not None
        assert numerics["advice"].startswith(
            "compute the same in both branches where Rounded.rounded (test_compiling_branches.py:"
        )
        assert "asks torch.compiler.is_compiling()" in numerics["advice"]


def asks_in_a_lambda(x: Tensor) -> Any:
    return lambda: torch.compiler.is_dynamo_compiling()


def test_functions_of_the_users_files_are_searched_and_those_of_torch_are_not() -> None:
    found = compiling_branches(nn.Sequential(Rounded(), nn.MultiheadAttention(4, 1)))
    assert [name.partition(" (")[0] for name in found] == ["Rounded.rounded", "asks_in_a_lambda"]
    assert compiling_branches(nn.Sequential(nn.MultiheadAttention(4, 1))) == []


def test_a_right_run_and_an_eager_setting_are_not_told_of_branches() -> None:
    asked = GradientCheck(outcome=Outcome.OK, compiling_branches=["Rounded.rounded (model.py:3)"])
    assert judge(RIGHT, EAGER, [1.0], gradient_check=asked).advice is None
    wrong = replace(asked, outcome=Outcome.WRONG, error=0.2, allowed=0.003, layers={"head": 0.2})
    told = judge(RIGHT, EAGER, [1.0], gradient_check=wrong).advice
    assert told is not None
    assert told.startswith("compute the same in both branches where Rounded.rounded (model.py:3) asks")
    eager = judge(RIGHT, EAGER, [1.0], gradient_check=wrong, settings=CompileSettings(scope=Scope.EAGER)).advice
    assert "is_compiling" not in (eager or "")
