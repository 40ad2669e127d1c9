"""Faults of torch.compile that people report: each is measured under its setting, gets its label, and is given advice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_measurement
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.outcome import Death, judge_death, judge_measurement
from compile_sweep.schema.settings import CompileSettings
from workloads import WorkloadFromModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
SHORT = Protocol(compared_steps=10, min_passes=2, max_passes=2, cpu_window_s=0.0)
STATIC = "scope=full,dynamic=static,backend=eager"
AUTO = "scope=full,dynamic=auto,backend=eager"
ALONE = "scope=modular,dynamic=auto,backend=eager"
TRACED_BACKWARD = "scope=full,dynamic=auto,backend=aot_eager"


class Body(nn.Module):
    """A classifier of 6 classes; subclasses add the fault."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class AnnealedTemperature(Body):
    def __init__(self) -> None:
        super().__init__()
        self.heat = 3.0

    def forward(self, x: Tensor) -> Tensor:
        self.heat *= 0.99
        return super().forward(x) / self.heat


class KeepsActivations(Body):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.means.append(y.detach().mean())
        return y


class CountsCalls(Body):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 500)


class ScaledByItsClass(Body):
    """Whose loss changes a number of the class from step to step."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * ScaledByItsClass.scale


class ScaledByItself(ScaledByItsClass):
    def forward(self, x: Tensor) -> Tensor:
        return Body.forward(self, x) * self.scale


def loss_that_anneals(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = plain_loss(model, batch)
    owner: Any = model if isinstance(model, ScaledByItself) else ScaledByItsClass
    owner.scale = max(0.5, owner.scale * 0.8)
    return loss


class KeepsInItsClass(Body):
    """Whose penalties are in a list of the class."""

    kept: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        KeepsInItsClass.kept.append(y.square().mean())
        return y


class KeepsItsOwn(KeepsInItsClass):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        y = Body.forward(self, x)
        self.kept.append(y.square().mean())
        return y


def loss_with_what_is_kept(model: Any, batch: dict[str, Tensor]) -> Tensor:
    model.kept.clear()
    return plain_loss(model, batch) + 0.5 * sum(model.kept, torch.zeros(()))


class StochasticDepth(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.7:
                x = x + layer(x).tanh()
        return super().forward(x)


class NumpyDepth(Body):
    def forward(self, x: Tensor) -> Tensor:
        if np.random.rand() < 0.9:
            x = x + x.tanh()
        return super().forward(x)


class TimesItself(Body):
    def forward(self, x: Tensor) -> Tensor:
        began = time.time()
        y = super().forward(x)
        self.took = time.time() - began
        return y


class CutsOut(Body):
    def forward(self, x: Tensor) -> Tensor:
        begin = random.randint(0, 8)
        x = x.clone()
        x[:, begin : begin + 4] = 0
        return super().forward(x)


class CountsRows(Body):
    def forward(self, x: Tensor) -> Tensor:
        counts = (x > 0).sum(1).tolist()
        return torch.stack([row / (1 + count) for row, count in zip(super().forward(x), counts, strict=True)])


class ChecksItsInput(Body):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return super().forward(x)


class KeepsByStep(Body):
    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.norms[len(self.norms)] = y.detach().norm()
        return y


class Router(Body):
    """Each expert is a block whose number of rows depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 12)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].sign() == number * 2 - 1).nonzero().squeeze(1)
            x = x.index_add(0, rows, expert(x[rows]))
        return super().forward(x)


class OwnNoise(Body):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.source))


class RoutesRows(Body):
    def __init__(self) -> None:
        super().__init__()
        self.routes = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, route in enumerate(self.routes):
            rows = (x[:, 0].sign() == number * 2 - 1).nonzero().squeeze(1)
            x = x.index_add(0, rows, route(x[rows]))
        return super().forward(x)


class Noisy(Body):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.4) + 0.3 * torch.randn_like(x))


class MovesItsCodes(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 12))
        self.codes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(-1)
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.01 * x)
        return super().forward(x + self.codes[nearest])


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen(x).tanh() + self.adapter(x)


class Adapters(Body):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


class GrowingTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 6), nn.Linear(6, 6)
        self.known, self.places = 0, torch.zeros(0, 1)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.known:
            self.known = ids.shape[1]
            self.places = torch.arange(self.known)[:, None] / 50
        return self.head(self.embed(ids) + self.places[: ids.shape[1]]).mean(1)


class DropsOut(Body):
    """Has enough layers for a backward that computes some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(nn.functional.dropout(x, 0.3)), 0.3)
        return super().forward(x)


class WarmsUp(nn.Module):
    """A loss that is another one for the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        self.step += 1
        return plain_loss(model, batch) if self.step > 50 else model(batch["x"]).square().mean()


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, places: Tensor) -> Tensor:
        return self.layers(places).sum()


def atoms(number: int) -> dict[str, Tensor]:
    return {"places": torch.randn(16, 4), "forces": torch.randn(16, 4)}


def loss_of_forces(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    places = batch["places"].clone().requires_grad_()
    (forces,) = torch.autograd.grad(model(places), places, create_graph=True)
    return mse_loss(forces, batch["forces"])


def rows(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 12), "target": torch.randint(6, (16,))}


def sentences(number: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(30, (4, 16 + 16 * (number % 3))), "target": torch.randint(6, (4,))}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch.get("x", batch.get("ids"))), batch["target"])


SHOWN: dict[str, float] = {}


def loss_with_a_shown_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["x"])
    SHOWN["entropy"] = scores.softmax(-1).log().mean().item()
    return cross_entropy(scores, batch["target"])


def loss_with_teacher(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.eval()
    with torch.no_grad():
        taught = model(batch["x"])
    model.train()
    return mse_loss(model(batch["x"]), taught + 1)


class LateUnfreezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    @torch.compiler.disable(recursive=False)
    def forward(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        model.first.requires_grad_(self.step > 1)
        self.step += 1
        return plain_loss(model, batch)


@dataclass(frozen=True)
class Fault:
    model: type[nn.Module]
    settings: str
    label: str | None
    words: tuple[str, ...]
    """In what the verdict and the explanation say."""
    never: tuple[str, ...] = ()
    loss: Callable[..., Tensor] | Callable[[], nn.Module] = plain_loss
    batch: Callable[[int], dict[str, Tensor]] = rows
    memory_budget: float = 1.0


LENGTHS = ("fewer lengths", "dynamic=mark")

FAULTS = [
    Fault(
        DropsOut, TRACED_BACKWARD, "diverges",
        ("do not belong to the loss", "set torch._functorch.config.activation_memory_budget = 1: at 0.3"), memory_budget=0.3,
    ),
    Fault(Body, AUTO, "recompile-limit", ("step == 0, then", "register_buffer('step', "), LENGTHS, WarmsUp),
    Fault(AnnealedTemperature, STATIC, "recompile-limit", ("heat == 3.0, then", "hand it in as a tensor"), LENGTHS),
    Fault(AnnealedTemperature, TRACED_BACKWARD, "recompile-limit", ("heat", "hand it in as a tensor"), ("dynamic=auto",)),
    Fault(KeepsActivations, AUTO, "recompile-limit", ("means", "(8 times)", "keep what grows out of the forward"), LENGTHS),
    Fault(CountsCalls, AUTO, "recompile-limit", ("calls == 0, then 1, 2, 3, 4, …, 7 (8 times)", "keep it in a buffer"), LENGTHS),
    Fault(Body, STATIC, "recompile-limit", ("dynamic=auto, does not",), LENGTHS, loss_with_a_shown_number),
    Fault(Body, AUTO, None, ("Tensor.item()", "or read it after the step"), (), loss_with_a_shown_number),
    Fault(StochasticDepth, AUTO, "silent-fallback", ("draw with torch",), ("print, log",)),
    Fault(NumpyDepth, AUTO, None, ("numpy.random.rand", "draw with torch"), (".item() after the step", "print, log")),
    Fault(TimesItself, STATIC, "recompile-limit", ("read files and clocks",), (*LENGTHS, "keep the value a tensor")),
    Fault(CutsOut, AUTO, "silent-fallback", ("draw with torch",), ("remove the graph break",)),
    Fault(CountsRows, AUTO, None, ("keep the value a tensor",), ("register_buffer",)),
    Fault(ChecksItsInput, AUTO, None, ("1 graph of",)),
    Fault(KeepsByStep, AUTO, "recompile-limit", ("norms", "keep what grows out of the forward"), LENGTHS),
    Fault(
        Router, "scope=regional,dynamic=static,backend=eager", "recompile-limit",
        ("size mismatch", "weight them by a mask", "dynamic=auto"),
    ),
    Fault(OwnNoise, AUTO, None, ("torch.Generator of your own",), ("enter the context",)),
    Fault(RoutesRows, AUTO, "silent-fallback", ("weight them by a mask", ".nonzero()"), ("torch.where instead",)),
    Fault(Noisy, AUTO, None, ("graph of the model and its loss as one",), ("diverges",)),
    Fault(MovesItsCodes, AUTO, None, ("1 graph of",), ("diverges",)),
    Fault(Adapters, "scope=regional,dynamic=auto,backend=eager", None, ("call requires_grad_() on it",), ("diverges",)),
    Fault(Noisy, AUTO, None, ("1 graph of",), ("diverges",), loss_with_teacher),
    *(
        [Fault(Body, AUTO, None, ("requires_grad of first.bias", "if layers are unfrozen once"), (), LateUnfreezing)]
        if torch_version() >= (2, 12)
        else [Fault(Body, TRACED_BACKWARD, None, ("requires_grad of first.bias",), ("diverges",), LateUnfreezing)]
    ),
    *(
        [
            Fault(ScaledByItsClass, AUTO, None, ("ScaledByItsClass.scale",), ("diverges",), loss_that_anneals),
            Fault(KeepsInItsClass, ALONE, None, ("ok",), ("diverges",), loss_with_what_is_kept),
        ]
        if torch_version() >= (2, 13)
        else [
            Fault(ScaledByItsClass, AUTO, "diverges", ("keep ScaledByItsClass.scale in the model",), (), loss_that_anneals),
            Fault(KeepsInItsClass, ALONE, "diverges", ("self.seen = [] in __init__",), (), loss_with_what_is_kept),
        ]
    ),
    Fault(ScaledByItself, AUTO, None, ("scale",), ("diverges",), loss_that_anneals),
    Fault(KeepsItsOwn, ALONE, None, ("ok",), ("diverges",), loss_with_what_is_kept),
    Fault(
        GrowingTable, "scope=full,dynamic=mark,pad_multiple=16,backend=eager", None,
        ("known", "build it once in __init__, at its largest"), ("register_buffer",), plain_loss, sentences,
    ),
]  # fmt: skip


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20), nn.LeakyReLU(), nn.Linear(20, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def step_with_a_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["places"].clone().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    loss = scores.mean() + slope.square().sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("model", "told", "settings"),
    [
        (Energy, {"loss_fn": loss_of_forces}, TRACED_BACKWARD),
        (Critic, {"step_fn": step_with_a_penalty}, TRACED_BACKWARD.replace("full", "modular")),
    ],
)
def test_a_gradient_in_the_loss_is_a_compile_error_with_advice(
    model: type[nn.Module], told: dict[str, Any], settings: str
) -> None:
    torch._dynamo.reset()
    workload = WorkloadFromModel(model, atoms, num_batches=2, **told)()
    with pytest.raises(RuntimeError) as raised:
        measure(prepare(workload, CompileSettings.parse(settings), CPU), protocol=SHORT)
    times = {"in_phase_s": 1.0, "elapsed_s": 9.0, "compile_deadline_s": 60.0, "trial_deadline_s": 90.0}
    error: dict[str, Any] = {"error_type": "builtins.RuntimeError", "error_text": str(raised.value)}
    verdict = judge_death(Death(phase="warming-up", **times, **error, error_is_compilers=is_compiler_error(raised.value)))
    assert verdict.label == "compile-error"
    assert "leave the module that is differentiated twice eager" in (verdict.reason or "")


def test_a_last_batch_with_fewer_rows_is_left_out_or_refused_and_never_filled_up() -> None:
    def rows_of_a_set(number: int) -> dict[str, Tensor]:
        return rows(number) if number % 3 < 2 else {name: values[:5] for name, values in rows(number).items()}

    (left_out,) = WorkloadFromModel(Body, rows_of_a_set, plain_loss, num_batches=3)().remarks()
    assert "5" in left_out
    with pytest.raises(WorkloadError, match="batches of 5 and 16 samples cannot be timed together; leave odd ones out"):
        WorkloadFromModel(Body, rows_of_a_set, plain_loss, num_batches=6)().remarks()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.model.__name__} {fault.settings.split(',')[1]}")
def test_a_reported_fault_has_its_label_and_what_helps(fault: Fault) -> None:
    loss: Any = fault.loss() if isinstance(fault.loss, type) else fault.loss
    workload = WorkloadFromModel(fault.model, fault.batch, loss, num_batches=6)()
    settings = CompileSettings.parse(fault.settings)
    with torch._functorch.config.patch(activation_memory_budget=fault.memory_budget):
        found = measure(prepare(workload, settings, CPU), protocol=SHORT).to_dict()
    verdict = judge_measurement(found, claims_cudagraphs=False)
    sizes = KnownSizes(settings=settings, max_length=workload.max_length, batch_size=workload.batch_size)
    lines = [line for section in explain_measurement(found, settings, sizes, ()) for line in section.lines]
    said = "\n".join([verdict.reason or "", *lines])
    assert verdict.label == fault.label, said
    assert [words for words in fault.words if words not in said] == [], said
    assert [words for words in fault.never if words in said] == [], said
