"""Finds what settings should compile and torch never compiled, which nothing else reports.

A region whose forward is never called, or called in another way than through `forward`, silently compiles to nothing; so does
everything where torch.compile is disabled. Dynamo reports each frame it converts; these are compared with the expected ones.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from compile_sweep.contract.base import unwrap_ddp
from compile_sweep.harness.diagnostics.torch_logs import module_path
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS
from compile_sweep.schema.settings import OptimizerKind, Scope

_INLINE_WRAPPER = "torch/_dynamo/external_utils.py"
"""File in which torch wraps a function that it would not convert by itself, such as a forward of `torch.nn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a run under some settings must compile and capture to be believed."""

    what: str  # the settings in words, for the sentence that nothing was compiled; empty if nothing should be
    targets: Mapping[str, Sequence[Callable[..., Any]]]
    """What is compiled separately, by its name for a person: functions of which at least one is compiled."""
    cudagraphs: bool
    names: Mapping[str, str] = field(default_factory=dict)  # as `forward_names` returns them

    @classmethod
    def of(cls, prepared: Prepared, model: nn.Module, optimizer: Optimizer | None) -> Expectation:
        """Returns what the prepared settings should compile in this model, before they are applied."""
        settings, inner = prepared.settings, unwrap_ddp(model)
        targets: dict[str, Sequence[Callable[..., Any]]] = {
            name: [inner.get_submodule(name).forward] for name in prepared.compiled_apart(model)
        }
        words = [f"scope={settings.scope}"] if settings.scope is not Scope.EAGER else []
        if settings.optimizer in COMPILED_OPTIMIZERS:
            words.append(f"optimizer={settings.optimizer}")
        if settings.optimizer is OptimizerKind.COMPILED and optimizer is not None:
            targets["the optimizer's step"] = steps_of(optimizer)
        names = forward_names(inner.modules())
        return cls(what=", ".join(words), targets=targets, cudagraphs=settings.compiles_graphs, names=names)

    def missed(self, converted: Set[CodeType], graphs: int) -> list[str]:
        """Returns a sentence for each kind of thing that should have been compiled and never was."""
        if self.what and not graphs:
            return [f"nothing was compiled: torch made no graph, though the settings say {self.what}"]
        places = {_place(code) for code in converted}
        wrapped = any(module_path(code.co_filename).endswith(_INLINE_WRAPPER) for code in converted)
        missing: dict[str, list[str]] = defaultdict(list)
        for name, functions in self.targets.items():
            if not any(_is_converted(function, places, wrapped=wrapped) for function in functions):
                missing[_owner(functions[0])].append(name)
        return [_sentence(owner, names) for owner, names in missing.items()]


def steps_of(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Returns the optimizer's step and those that it overrides: torch breaks the graph before each and may compile the last."""
    return [vars(owner)["step"] for owner in type(optimizer).__mro__ if "step" in vars(owner) and owner is not Optimizer]


def forward_names(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Returns what to call forwards, by what Dynamo calls them: `forward of Block (model.py:3)` if several modules share one.

    Dynamo names a function by its code. Modules that settings compile apart have code of their own class, whose name is in it;
    where a graph break leaves the loop over the blocks eager, they are compiled one by one without. The forward of a class with
    one module is `Model.forward (model.py:3)`.
    """
    owners: dict[CodeType, list[str]] = defaultdict(list)
    for module in modules:
        for code in {_code(module.forward), _code(inspect.unwrap(module.forward))}:
            if code is not None:
                owners[code].append(type(module).__qualname__)
    found = {}
    for code, names in owners.items():
        name, place = code.co_name, f"({module_path(code.co_filename)}:{code.co_firstlineno})"
        classes = Counter(names)
        if len(names) > 1:
            found[f"{name} {place}"] = f"{name} of {names[0] if len(classes) == 1 else f'{len(classes)} classes'} {place}"
        found |= {f"{name} of {owner} {place}": f"{owner}.{name} {place}" for owner, times in classes.items() if times == 1}
    return found


_Place = tuple[str, int, str]  # file, first line and name of a code object


def _place(code: CodeType) -> _Place:
    return code.co_filename, code.co_firstlineno, code.co_name


def _is_converted(function: Callable[..., Any], places: Set[_Place], *, wrapped: bool) -> bool:
    outer, inner = _code(function), _code(inspect.unwrap(function))
    if outer is None or inner is None:  # not written in Python: torch inlines it or reports a graph break
        return True
    owner = type(getattr(function, "__self__", None)).__qualname__
    # Settings give each class of modules a renamed copy of the code, or call torch's within code of their own: `with_own_code`.
    if _is_of_torch(outer) and any(name == f"forward@{owner}" for _, _, name in places):
        return True
    for code in (outer, inner):
        file, line, name = _place(code)
        if {(file, line, name), (file, line, f"{name}@{owner}")} & places:
            return True
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return wrapped and not is_disabled and _is_of_torch(outer)


def _is_of_torch(code: CodeType) -> bool:
    return module_path(code.co_filename).startswith("torch/")


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _owner(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__qualname__ if owner is not None else ""


def _sentence(owner: str, names: list[str]) -> str:
    subject = names[0] if len(names) == 1 else f"{len(names)} modules ({names[0]} to {names[-1]})"
    was = "was" if len(names) == 1 else "were"
    return f"{subject}{f' of class {owner}' if owner else ''} {was} meant to be compiled and never {was}"
