"""Finds the module whose compiled code is wrong: compiles parts of the model until the first one that does not follow eager.

Background: if a setting `diverges`, gradients and updates name the layers with wrong results, which need not be the layers
with wrong code, because an error propagates through the backward pass. First the compiler is bisected, as torch's own minifier
does with graphs: without AOTAutograd, then without Inductor, then as the setting says. With the first back-end that is wrong,
which is the one that compiles fastest, some modules are compiled and all others are eager, so that only these can be at fault:
all together first, then halves of their order, then inside the one that was found.

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
from compile_sweep.harness.numerics.check import Numerics, NumericsStatus, judge
from compile_sweep.harness.numerics.references import build_model_on, record_run, run_references
from compile_sweep.harness.numerics.step_check import check_step
from compile_sweep.harness.numerics.what_to_try import advice_on_changed
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.errors import one_line_message
from compile_sweep.schema.settings import Scope

_WRONG = (NumericsStatus.DIVERGES, NumericsStatus.NAN)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # modules without a forward of their own

_OF_INDUCTOR: dict[str, Any] = dict.fromkeys(("mode", "cudagraphs", "shape_padding", "options", "activation_memory_budget"))
"""Settings that other back-ends do not accept."""

STAGES = (
    ("eager", "Dynamo, or code that does something else where torch.compiler.is_compiling()"),
    ("aot_eager", "AOTAutograd"),
)
"""Back-ends from the one that does least to the one that does most, and what is at fault if each is the first to be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result of a bisection."""

    is_wrong: bool
    """Whether the setting itself is wrong."""
    module: str = ""
    """Dotted name of the innermost module that is wrong when it is compiled alone; empty if there is none."""
    class_name: str = ""
    is_whole: bool = False
    """Whether the module has parts, none of which is wrong by itself."""
    worst: str = ""
    """How the setting, or that module alone, differs from eager."""
    stage: str = ""
    """Part of the compiler at fault; empty if the setting is right."""
    without_regions: bool = False
    """Whether the setting is right with scope=full in place of scope=nested."""
    changed: list[str] = field(default_factory=list)
    """Tensors that the forward reads and then changes in place, if gradients are wrong; a usual cause."""
    advice: str = ""
    """What to write instead, if there are any."""
    tried: list[str] = field(default_factory=list)
    """What was compiled and with what result, a sentence each, in order."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values that cross processes."""
        return asdict(self)


def bisect(prepared: Prepared, batches: Sequence[Batch], report: Callable[[str], None] = lambda what: None) -> Bisection:
    """Finds the module whose compiled code is wrong; reports what is compiled before each attempt."""
    report("eager runs to compare with")
    search = _Search(prepared, batches, report)
    worst, stage = search.first_stage()
    if worst is None:
        return Bisection(is_wrong=False, tried=search.tried)
    changed, advice = search.changed, advice_on_changed(search.changed) if search.changed else ""
    found = Bisection(is_wrong=True, worst=worst, stage=stage, changed=changed, advice=advice, tried=search.tried)
    if prepared.settings.scope is Scope.NESTED and search.is_right_without_regions():
        return replace(found, without_regions=True)
    model = unwrap_ddp(build_model_on(prepared.workload, torch.device("cpu")))
    module = search.innermost(model, prepared.compiled_apart(model))
    if not module:
        return found
    return replace(
        found,
        module=module,
        class_name=type(model.get_submodule(module)).__qualname__,
        is_whole=bool(children_of(model, module)),
        worst=search.fault_of([module]) or worst,
    )


class _Search:
    def __init__(self, prepared: Prepared, batches: Sequence[Batch], report: Callable[[str], None]) -> None:
        self._prepared, self._batches, self._report = prepared, batches, report
        self._references = run_references(prepared, batches)
        self._known: dict[tuple[str, ...], str | None] = {}
        self.tried: list[str] = []
        self.changed: list[str] = []

    def first_stage(self) -> tuple[str | None, str]:
        """Returns how the setting differs from eager, if it does, and the stage from which on; the search goes on with that."""
        settings = self._prepared.settings
        for backend, stage in STAGES if settings.backend is None else ():
            lesser = self._prepared.with_settings(replace(settings, backend=backend, **_OF_INDUCTOR))
            if (worst := self.fault(lesser, f"with backend={backend}")) is not None:
                self._prepared = lesser
                return worst, stage
        worst = self.fault(self._prepared, "as the setting says", is_part=False)
        return worst, "Inductor" if settings.backend is None else f"back-end {settings.backend}"

    def is_right_without_regions(self) -> bool:
        """Tells whether the setting is right with scope=full."""
        whole = self._prepared.with_settings(replace(self._prepared.settings, scope=Scope.FULL))
        return self.fault(whole, "with scope=full") is None

    def innermost(self, model: nn.Module, targets: Sequence[str]) -> str:
        """Returns the innermost module that is wrong by itself, within those that are compiled apart; empty if there is none."""
        found, inside = "", targets or children_of(model, "")
        while first := first_wrong(inside, lambda names: self.fault_of(names) is not None):
            found, inside = first, children_of(model, first)
        return found

    def fault_of(self, modules: Sequence[str]) -> str | None:
        """Describes how the model differs from eager if only these modules are compiled; None if it does not."""
        key = tuple(modules)
        if key not in self._known:
            self._known[key] = self.fault(self._prepared.compiling(modules), f"only {named(modules)}")
        return self._known[key]

    def fault(self, prepared: Prepared, what: str, *, is_part: bool = True) -> str | None:
        """Describes how the model differs from eager under these settings; None if it does not, or a part cannot be compiled."""
        self._report(what)
        try:
            found = self._judged(prepared)
        except Exception as error:
            if not is_part:
                raise
            self.tried.append(f"{what}: raises {one_line_message(error)}")
            return None
        finally:
            torch._dynamo.reset()
            memory.free(prepared.device)
        self.tried.append(f"{what}: {found.status}, {found.worst}")
        if found.gradient_check is not None and found.status in _WRONG:
            self.changed = self.changed or list(found.gradient_check.read_then_changed)
        return found.worst if found.status in _WRONG else None

    def _judged(self, prepared: Prepared) -> Numerics:
        workload = prepared.workload
        model = build_model_on(workload, prepared.device)
        optimizer = prepared.optimizer(model)
        seed_all(workload.seed)
        with applied(prepared, model, optimizer) as step:
            trajectory = record_run(workload, model, step, self._batches)
            gradient_check = check_step(prepared, model, step, self._batches[0], draws=trajectory.random)
        return judge(trajectory, self._references, [], gradient_check=gradient_check)


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
