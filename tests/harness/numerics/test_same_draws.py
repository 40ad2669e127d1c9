"""Runs that draw eager's random numbers are compared with eager runs of the same draws, and not allowed what other draws do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, check_numerics, draws_eagers
from compile_sweep.harness.numerics.references import build_model_on, record_run, run_references
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.prepare import Prepared, prepare
from compile_sweep.schema.settings import CompileSettings
from workloads import WorkloadFromModel

CPU = torch.device("cpu")
STEPS = 10


class Noisy(nn.Module):
    """Draws noise and dropout; the head's gradient is `factor` times what it should be, but only if compiled."""

    def __init__(self, factor: float, skips: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16), nn.GELU())
        self.head, self.factor, self.skips = nn.Linear(16, 10), factor, skips

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        if torch.compiler.is_compiling():  # the same value, another gradient
            weight = self.factor * weight - ((self.factor - 1) * weight).detach()
            torch.rand(self.skips)
        return nn.functional.linear(self.body(x + 0.2 * torch.randn_like(x)), weight, self.head.bias)


def prepared(factor: float = 1.0, *, skips: int = 0, seed: int = 0) -> Prepared:
    def batch(number: int) -> dict[str, Tensor]:
        return {"x": torch.randn(16, 12), "target": torch.randint(10, (16,))}

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model(inputs["x"]), inputs["target"])

    workload: Any = WorkloadFromModel(lambda: Noisy(factor, skips), batch, loss)
    settings = CompileSettings.parse("scope=full,dynamic=auto,backend=aot_eager")
    return prepare(workload("only", seed), settings, CPU)


def checked(about: Prepared, *, seeded: int | None = None) -> Numerics:
    """Judges a run by its steps alone, without a check of its gradients by finite differences."""
    pool = about.workload.pool(about.policy, rank=0, device=CPU)
    batches = [pool[number % len(pool)] for number in range(STEPS)]
    model = build_model_on(about.workload, CPU)
    optimizer = about.optimizer(model)
    seed_all(about.workload.seed if seeded is None else seeded)
    with applied(about, model, optimizer) as step:
        compiled = record_run(about.workload, model, step, batches)
    torch._dynamo.reset()
    return check_numerics(about, batches, compiled, [1.0])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(5))
def test_a_run_with_eagers_draws_is_allowed_roundings_only(seed: int) -> None:
    found = checked(prepared(seed=seed))
    assert (found.status, found.random, found.judged_steps) == (NumericsStatus.OK, True, STEPS), found.worst
    assert all((gap.tolerance or 0) < 0.001 for gap in [found.loss, *found.gradients.values()])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_small_error_that_other_draws_would_hide_is_found() -> None:
    found = checked(prepared(1.01))
    assert found.status is NumericsStatus.DIVERGES
    assert "head" in found.worst
    assert found.random
    assert found.gradients["model.head"].share > 10


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_with_other_draws_is_allowed_their_scatter() -> None:
    assert (found := checked(prepared(), seeded=77)).status is NumericsStatus.OK
    assert max(gap.tolerance or 0 for gap in found.gradients.values()) > 0.1
    assert checked(prepared(skips=3)).status is NumericsStatus.OK


def with_losses(run: Trajectory, *losses: float) -> Trajectory:
    return replace(run, losses=losses)


def test_every_loss_must_be_close_to_eagers() -> None:
    about = prepared()
    pool = about.workload.pool(about.policy, rank=0, device=CPU)
    references = run_references(about, pool[:3])
    eager = references.eager
    assert eager.random
    assert draws_eagers(eager, references)
    far = max(abs(one - other) for run in references.runs for one, other in zip(run.losses, eager.losses, strict=True))
    for number in range(3):
        losses = list(eager.losses)
        losses[number] += far
        assert not draws_eagers(with_losses(eager, *losses), references)
    assert not draws_eagers(eager, replace(references, same_draws=True))
    assert not draws_eagers(eager, replace(references, rounding=2.0**-9)), "compiled code rounds less often"
    assert not draws_eagers(eager, replace(references, eager=replace(eager, random=False)))
