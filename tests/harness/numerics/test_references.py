"""The eager runs that a setting is judged by: batches whose rows must keep their order, and numbers of several precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from toy_workloads import Toy, ToyModel

from compile_sweep import WorkloadFromModel
from compile_sweep.contract.base import Batch
from compile_sweep.harness.numerics import references
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, judge
from compile_sweep.harness.numerics.references import References, build_model_on, eager_reference, record_run, run_references
from compile_sweep.harness.numerics.trajectory import Trajectory
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import ShapePolicy

CPU = torch.device("cpu")
EAGER = CompileSettings.parse("scope=eager")
STEPS = 10


def batches_of(workload: Toy) -> list[Batch]:
    pool = workload.pool(EAGER.shape_policy(workload.max_length), rank=0, device=CPU)
    return [pool[i % len(pool)] for i in range(STEPS)]


def trained(workload: Toy, spoil: Callable[[nn.Module], object] = lambda model: None, *, seed: int = 0) -> Trajectory:
    """A run in place of a compiled one, with an injected fault."""
    with eager_reference(prepare(workload, EAGER, CPU), seed=seed) as (model, step):
        spoil(model)
        return record_run(workload, model, step, batches_of(workload))


@cache
def references_of(workload_class: type[Toy]) -> References:
    """The eager runs, the same for every run of a workload."""
    workload = workload_class("only", 0)
    return run_references(prepare(workload, EAGER, CPU), batches_of(workload))


def judged(workload: Toy, run: Trajectory) -> Numerics:
    return judge(run, references_of(type(workload)), [1.0])


def a_wrong_gradient(model: nn.Module) -> None:
    for parameter in model.get_submodule("body.blocks.1").parameters():
        parameter.register_hook(lambda gradient: gradient * 1.01)


class _DropsWhileItTrains(ToyModel):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.body.embedding(ids), 0.1, training=self.training)
        loss: Tensor = self.loss(self.body.output(hidden), labels)
        return loss


class DropsWhileItTrains(Toy):
    """Draws random numbers in every training step, and none in evaluation."""

    model_class = _DropsWhileItTrains


class _Double(ToyModel):
    def __init__(self) -> None:
        super().__init__()
        self.double()


class Double(Toy):
    """Computes in float64."""

    model_class = _Double


def test_a_model_in_float64_is_compared_with_nothing_coarser() -> None:
    right = judged(Double("only", 0), trained(Double("only", 0)))
    assert (right.status, right.reference) == (NumericsStatus.OK, None)
    assert references_of(Double).rounding == 2.0**-53

    def slightly_off(model: nn.Module) -> None:
        model.register_forward_hook(lambda module, inputs, loss: loss + 1e-5 * loss.detach())

    assert judged(Double("only", 0), trained(Double("only", 0), slightly_off)).status is NumericsStatus.DIVERGES


class _Rotated(ToyModel):
    """Rotates embeddings by complex numbers, like rotary position embeddings; one is in the model, one in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        pairs = torch.view_as_complex(self.body.embedding(ids).unflatten(-1, (4, 2)))
        hidden = torch.view_as_real(pairs * self.turns * more).flatten(-2)
        for block in self.body.blocks:
            hidden = block(hidden)
        loss: Tensor = self.loss(self.body.output(hidden), labels)
        return loss


class Rotated(Toy):
    """Contains complex numbers."""

    model_class = _Rotated

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        more = torch.polar(torch.ones(4), 1 + torch.arange(4.0))
        return [replace(one, inputs={**one.inputs, "more": more}) for one in super().pool(policy, rank=rank, device=device)]


def test_complex_numbers_keep_both_parts_in_the_more_precise_run_so_that_faults_are_found() -> None:
    right = judged(Rotated("only", 0), trained(Rotated("only", 0)))
    assert (right.status, right.reference) == (NumericsStatus.OK, "float64")
    assert right.loss.tolerance is not None
    assert right.loss.tolerance < 1e-5
    wrong = judged(Rotated("only", 0), trained(Rotated("only", 0), a_wrong_gradient))
    assert (wrong.status, wrong.first_bad_step) == (NumericsStatus.DIVERGES, 0)
    model = build_model_on(Rotated("only", 0), CPU, torch.float64)
    assert model.turns.dtype is torch.complex128
    assert model.turns.imag.any()  # type: ignore[union-attr]


class _Weighted(ToyModel):
    """Classes have weights, and there are as many classes as rows; dropout only if the class says so."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.body.output.weight)  # so that the loss depends only on the biases at the start

    def forward(self, ids: Tensor, labels: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        hidden = nn.functional.dropout(self.body.embedding(ids), self.dropout, training=self.training)
        for block in self.body.blocks:
            hidden = block(hidden * weights.mean())
        logits = self.body.output(hidden * weights.repeat(3)[:8])
        loss: Tensor = self.loss(logits, labels)
        return loss


class _WeightedWithDropout(_Weighted):
    dropout = 0.1


class Weighted(Toy):
    """Batches with as many rows as a tensor without rows has elements."""

    model_class = _Weighted

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        weights = torch.tensor([0.5, 1.0, 2.0])
        return [replace(one, inputs={**one.inputs, "weights": weights}) for one in super().pool(policy, rank=rank, device=device)]


class WeightedWithDropout(Weighted):
    """Also draws random numbers."""

    model_class = _WeightedWithDropout


@pytest.mark.parametrize("kind", [Weighted, WeightedWithDropout])
def test_a_tensor_that_is_as_long_as_the_batch_by_chance_is_not_shuffled_with_the_rows(kind: type[Toy]) -> None:
    found = references_of(kind)
    assert found.eager.random is (kind is WeightedWithDropout)
    rerun = trained_alike(kind, found)
    assert [run.losses for run in found.permuted] == [run.losses for run in rerun]
    verdict = judged(kind("only", 0), trained(kind("only", 0)))
    assert verdict.status is NumericsStatus.OK
    if kind is Weighted:
        assert verdict.loss.tolerance is not None
        assert verdict.loss.tolerance < 1e-5


def trained_alike(kind: type[Toy], found: References) -> list[Trajectory]:
    """Runs with the seeds of the permuted ones, on batches with unchanged rows."""
    return [trained(kind("only", 0), seed=1 + number) for number in range(len(found.permuted))]


@pytest.mark.parametrize("kind", [Toy, DropsWhileItTrains])
def test_rows_are_in_another_order_wherever_the_loss_does_not_depend_on_it(kind: type[Toy]) -> None:
    found = references_of(kind)
    assert found.eager.random is (kind is DropsWhileItTrains)
    assert [run.losses for run in found.permuted] != [run.losses for run in trained_alike(kind, found)]


def test_a_step_may_call_requires_grad_on_its_batch_as_checkpoints_need_it() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"].requires_grad_()) - batch["y"]).square().mean()

    workload = WorkloadFromModel(
        lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 3)),  # draws random numbers, so that eager runs several times
        lambda _: {"x": torch.randn(4, 3), "y": torch.randn(4, 3)},
        loss,
        num_batches=2,
    )()
    pool = workload.pool(EAGER.shape_policy(1), rank=0, device=CPU)
    found = run_references(prepare(workload, EAGER, CPU), [pool[step % 2] for step in range(STEPS)])
    assert len(found.permuted) > 1


def test_sparse_tensors_keep_the_order_of_their_rows() -> None:
    batch = Batch(inputs={"edges": torch.eye(4).to_sparse(), "x": torch.ones(4, 2)}, length=1, samples=4, tokens=4)
    assert [name for name in batch.inputs if references._has_rows(batch, name)] == ["x"]
