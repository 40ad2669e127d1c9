"""Frozen weights that a forward moves by itself, as those of a momentum encoder: put back, and no reason to doubt gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.numerics.finite_differences import (
    PRECISIONS,
    Differentiated,
    FiniteDifferences,
    untrained_tensors,
)
from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome, check_gradients
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from workloads import WorkloadFromModel

pytestmark = pytest.mark.slow  # for `make quick`

CPU = torch.device("cpu")
FLOAT32 = 2.0**-24
SHORT = Protocol(min_passes=2, max_passes=2, cpu_window_s=0.0)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))


class Momentum(nn.Module):
    """Contrasts a trained encoder's output with that of one that follows it, and with a queue of earlier ones (MoCo).

    Args:
        momentum: What the follower keeps of its weights in a step.
        as_data: Whether its weights are new tensors, rather than changed in place.
        at_end: Whether it follows after it has computed.
        in_place: Whether the queue is changed in place.
    """

    queue: Tensor
    place: Tensor

    def __init__(
        self,
        drop: float = 0.0,
        *,
        momentum: float = 0.99,
        as_data: bool = False,
        at_end: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.drop, self.momentum, self.as_data, self.at_end, self.in_place = drop, momentum, as_data, at_end, in_place
        self.q, self.k = encoder(), encoder()
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(16, 64), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def follow(self) -> None:
        for ours, theirs in zip(self.q.parameters(), self.k.parameters(), strict=True):
            if self.as_data:
                theirs.data = theirs.data * self.momentum + ours.data * (1 - self.momentum)
            else:
                theirs.mul_(self.momentum).add_(ours, alpha=1 - self.momentum)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.drop:
            a, b = a + self.drop * torch.randn_like(a), b + self.drop * torch.randn_like(b)
        q = normalize(self.q(dropout(a, self.drop)), dim=1)
        with torch.no_grad():
            if not self.at_end:
                self.follow()
            k = normalize(self.k(b), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.07
        with torch.no_grad():
            if self.at_end:
                self.follow()
            where = self.place + torch.arange(16)
            if self.in_place:
                self.queue.index_copy_(1, where, k.T)
                self.place.add_(16).remainder_(64)
            else:
                self.queue = self.queue.index_copy(1, where, k.T)
                self.place = (self.place + 16) % 64
        return scores


class Clipped(Momentum):
    """Clips its trained weights by itself before it computes, as a Wasserstein critic may."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for weights in self.q.parameters():
                weights.clamp_(-0.2, 0.2)
        return super().forward(a, b)


class Subject:
    """A step in plain Python; what stands for compiled code draws other random numbers, and may have wrong gradients."""

    def __init__(self, model: Momentum, seed: int, *, factor: float = 1.0) -> None:
        torch.manual_seed(seed)
        self.model, self.factor, self.is_eager = model, factor, False
        self.a = torch.randn(16, 12)
        self.b = self.a + 0.1 * torch.randn(16, 12)

    def run(self) -> float:
        if not self.is_eager:
            torch.rand(3)
        loss = cross_entropy(self.model(self.a, self.b), torch.zeros(16, dtype=torch.long))
        loss.backward()  # type: ignore[no-untyped-call]
        if not self.is_eager:
            weights = self.model.get_parameter("q.0.weight")
            assert weights.grad is not None
            weights.grad *= self.factor
        return float(loss.detach())

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        self.is_eager = True
        yield
        self.is_eager = False

    def check(self) -> GradientCheck:
        step = Differentiated.of_model(self.model, self.run, CPU)
        return check_gradients(step, rounding=FLOAT32, draws=self.model.drop > 0, eagerly=self.eagerly)


def moved_by_training(model: Momentum, seed: int) -> Subject:
    """Returns a step of a model whose follower is no longer where it started."""
    subject = Subject(model, seed)
    optimizer = torch.optim.SGD(model.q.parameters(), 0.05)
    for _ in range(3):
        subject.run()
        optimizer.step()
        optimizer.zero_grad()
    return subject


@pytest.mark.parametrize("kind", [Momentum, Clipped])
@pytest.mark.parametrize("as_data", [False, True])
def test_weights_that_a_forward_moves_are_what_they_were(kind: type[Momentum], as_data: bool) -> None:
    seed_all(0)
    subject = Subject(kind(0.2, as_data=as_data), 0)
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    subject.check()
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_that_loss_follows_a_momentum_encoder_and_gradients_do_not_is_no_error(seed: int, drop: float) -> None:
    seed_all(seed)
    kinds: list[dict[str, Any]] = [{"as_data": True}, {"at_end": True}, {"momentum": 0.9}]
    for about in kinds:
        subject = moved_by_training(Momentum(drop, **about), seed)
        found = subject.check()
        assert (found.outcome, found.reason) == (Outcome.OK, None), (about, found)
        assert found.allowed == pytest.approx(0.003)
        assert found.eager_error is None, about


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("about", [{"as_data": True}, {"at_end": True}, {}], ids=str)
def test_an_error_is_found_beside_a_momentum_encoder(about: dict[str, Any], drop: float) -> None:
    seed_all(1)
    subject = moved_by_training(Momentum(drop, **about), 1)
    subject.factor = 1.02
    found = subject.check()
    assert (found.outcome, list(found.layers)) == (Outcome.WRONG, ["q.0"]), found


def test_frozen_weights_that_nothing_moves_are_not_copied_again_and_again() -> None:
    seed_all(0)
    model = Momentum()
    model.unused = nn.Linear(4, 4).requires_grad_(False)
    subject = Subject(model, 0)
    step = Differentiated.of_model(model, subject.run, CPU)
    moved = FiniteDifferences(
        step, PRECISIONS[0][1], rounding=FLOAT32, seed=0, draws=False, eagerly=subject.eagerly, starts_nearby=False
    )
    moved._evaluate()
    assert set(moved._untrained) == {"queue", "place", *(f"k.{name}" for name, _ in model.k.named_parameters())}
    model.unused.weight.fill_(torch.nan)
    found = subject.check()
    assert (found.outcome, found.reason) == (Outcome.OK, None)


def test_frozen_weights_below_adapters_are_not_copied_because_they_may_be_most_of_the_memory() -> None:
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2), nn.BatchNorm1d(2))
    buffers = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert set(untrained_tensors(model)) == buffers
    assert set(untrained_tensors(nn.Sequential(model, nn.Linear(64, 64)))) > {f"0.{name}" for name in buffers}


def workload(*, in_place: bool) -> type[WorkloadFromModel]:
    def batch(number: int) -> dict[str, Tensor]:
        a = torch.randn(16, 12)
        return {"a": a, "b": a + 0.1 * torch.randn(16, 12)}

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model(inputs["a"], inputs["b"]), torch.zeros(16, dtype=torch.long))

    made: Any = WorkloadFromModel(lambda: Momentum(0.2, as_data=True, in_place=in_place), batch, loss)
    return made  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(torch_version() >= (2, 15), reason="torch 2.15 reads the queue in time")
@pytest.mark.parametrize("draws", ["", ",inductor.fallback_random=on"])
def test_a_queue_that_inductor_reads_too_late_is_found_beside_a_momentum_encoder_with_noise(draws: str) -> None:
    settings = CompileSettings.parse(f"scope=full,dynamic=auto{draws}")
    wrong = measure(prepare(workload(in_place=True)("only", 0), settings, CPU), protocol=SHORT).numerics
    assert wrong["status"] == "diverges", "pytorch/pytorch#197039; if torch has fixed it, this test has served its time"
    assert "instead of changing model.queue in place" in wrong["advice"]
    right = measure(prepare(workload(in_place=False)("only", 0), settings, CPU), protocol=SHORT).numerics
    assert (right["status"], right["gradient_check"]["outcome"]) == ("ok", "ok"), right
