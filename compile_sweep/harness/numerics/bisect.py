"""Finds the module whose compiled code is wrong: compiles parts of the model until the first one that does not follow eager.

Background: if a setting `diverges`, gradients and updates name the layers with wrong results, which need not be the layers
with wrong code, because an error propagates through the backward pass. With one module compiled and all others eager, only that
module can be at fault. Modules are tried together first, then by halves of their order, then inside the one that was found, as
torch's own minifier does with graphs. Finally the back-end is bisected the same way: without Inductor, then without AOTAutograd.

Output: a `Bisection`, which names the innermost module, or says that no module is wrong by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compile_sweep.contract.base import Batch, unwrap_ddp
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics.check import NumericsStatus, judge
from compile_sweep.harness.numerics.gradient_check import check_step
from compile_sweep.harness.numerics.references import build_model_on, record_run, run_references
from compile_sweep.harness.prepare import Prepared

_WRONG = (NumericsStatus.DIVERGES, NumericsStatus.NAN)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # modules without a forward of their own

_OF_INDUCTOR: dict[str, Any] = dict.fromkeys(("mode", "cudagraphs", "shape_padding", "options", "activation_memory_budget"))
"""Settings that other back-ends do not accept."""

STAGES = (("eager", "Dynamo"), ("aot_eager", "AOTAutograd"))
"""Back-ends from the one that does least to the one that does most, and what is at fault if each is the first to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result of a bisection."""

    is_wrong: bool
    """Whether the setting itself is wrong."""
    module: str = ""
    """Dotted name of the innermost module that is wrong when it is compiled alone; empty if there is none."""
    class_name: str = ""
    worst: str = ""
    """How that module differs from eager."""
    stage: str = ""
    """Part of the compiler at fault; empty if it was not looked for."""
    tried: list[str] = field(default_factory=list)
    """What was compiled and with what result, a sentence each, in order."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that cross processes."""
        return asdict(self)


def bisect(prepared: Prepared, batches: Sequence[Batch]) -> Bisection:
    """Finds the module whose compiled code is wrong."""
    search = _Search(prepared, batches)
    worst = search.fault(prepared, "as the setting says")
    if worst is None:
        return Bisection(is_wrong=False, tried=search.tried)
    model = build_model_on(prepared.workload, torch.device("cpu"))
    module = search.innermost(unwrap_ddp(model))
    if not module:
        return Bisection(is_wrong=True, worst=worst, tried=search.tried)
    return Bisection(
        is_wrong=True,
        module=module,
        class_name=type(unwrap_ddp(model).get_submodule(module)).__qualname__,
        worst=search.fault_of([module]) or worst,
        stage=search.stage(module),
        tried=search.tried,
    )


class _Search:
    def __init__(self, prepared: Prepared, batches: Sequence[Batch]) -> None:
        self._prepared, self._batches = prepared, batches
        self._references = run_references(prepared, batches)
        self._known: dict[tuple[str, ...], str | None] = {}
        self.tried: list[str] = []

    def innermost(self, model: nn.Module) -> str:
        """Returns the innermost module that is wrong by itself; empty if there is none."""
        found = ""
        while inside := first_wrong(children_of(model, found), lambda names: self.fault_of(names) is not None):
            found = inside
        return found

    def stage(self, module: str) -> str:
        """Returns the first stage of the compiler that makes the module wrong."""
        if self._prepared.settings.backend is not None:
            return f"back-end {self._prepared.settings.backend}"
        apart = self._prepared.compiling([module])
        for backend, stage in STAGES:
            settings = replace(apart.settings, backend=backend, **_OF_INDUCTOR)
            if self.fault(apart.with_settings(settings).compiling([module]), f"{module} with backend={backend}") is not None:
                return stage
        return "Inductor"

    def fault_of(self, modules: Sequence[str]) -> str | None:
        """Describes how the model differs from eager if only these modules are compiled; None if it does not."""
        key = tuple(modules)
        if key not in self._known:
            self._known[key] = self.fault(self._prepared.compiling(modules), named(modules))
        return self._known[key]

    def fault(self, prepared: Prepared, what: str) -> str | None:
        """Describes how the model differs from eager under these settings; None if it does not."""
        workload = prepared.workload
        model = build_model_on(workload, prepared.device)
        optimizer = prepared.optimizer(model)
        seed_all(workload.seed)
        with applied(prepared, model, optimizer) as step:
            trajectory = record_run(workload, model, step, self._batches)
            gradient_check = check_step(prepared, model, step, self._batches[0], draws=trajectory.random)
        del step, model, optimizer
        torch._dynamo.reset()
        memory.free(prepared.device)
        found = judge(trajectory, self._references, [], gradient_check=gradient_check)
        self.tried.append(f"{what}: {found.status}, {found.worst}")
        return found.worst if found.status in _WRONG else None


def named(modules: Sequence[str]) -> str:
    """Describes modules in a few words."""
    return modules[0] if len(modules) == 1 else f"{len(modules)} modules, {modules[0]} to {modules[-1]}"


def children_of(model: nn.Module, name: str) -> list[str]:
    """Lists the dotted names of a module's descendants that compute something and can be compiled by themselves."""
    found = []
    for child, module in model.get_submodule(name).named_children():
        inside = f"{name}.{child}" if name else child
        found += children_of(model, inside) if isinstance(module, _CONTAINERS) else [inside]
    return found


def first_wrong(modules: Sequence[str], is_wrong: Callable[[Sequence[str]], bool]) -> str:
    """Finds the first module such that it and those before it are wrong together; empty if all together are right."""
    if not modules or not is_wrong(modules):
        return ""
    right, wrong = 0, len(modules)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_wrong(modules[:middle]):
            wrong = middle
        else:
            right = middle
    return modules[wrong - 1]
