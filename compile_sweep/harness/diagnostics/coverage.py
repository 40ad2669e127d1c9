"""Finds what settings should compile and torch never compiled, which nothing else reports.

A region whose forward is never called, or called in another way than through `forward`, silently compiles to nothing; so does
everything where torch.compile is disabled. Dynamo reports each frame it converts; these are compared with the expected ones.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
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
    targets: Mapping[str, Callable[..., Any]]  # functions that are compiled separately, by their names for a person
    cudagraphs: bool

    @classmethod
    def of(cls, prepared: Prepared, model: nn.Module, optimizer: Optimizer | None) -> Expectation:
        """Returns what the prepared settings should compile in this model, before they are applied."""
        settings, inner = prepared.settings, unwrap_ddp(model)
        targets: dict[str, Callable[..., Any]] = {
            name: inner.get_submodule(name).forward for name in prepared.compiled_apart(model)
        }
        words = [f"scope={settings.scope}"] if settings.scope is not Scope.EAGER else []
        if settings.optimizer in COMPILED_OPTIMIZERS:
            words.append(f"optimizer={settings.optimizer}")
        if settings.optimizer is OptimizerKind.COMPILED and optimizer is not None:
            targets["the optimizer's step"] = type(optimizer).step
        return cls(what=", ".join(words), targets=targets, cudagraphs=settings.claims_cudagraphs)

    def missed(self, converted: Set[CodeType], graphs: int) -> list[str]:
        """Returns a sentence for each kind of thing that should have been compiled and never was."""
        if self.what and not graphs:
            return [f"nothing was compiled: torch made no graph, though the settings say {self.what}"]
        places = {_place(code) for code in converted}
        wrapped = any(module_path(code.co_filename).endswith(_INLINE_WRAPPER) for code in converted)
        missing: dict[str, list[str]] = defaultdict(list)
        for name, function in self.targets.items():
            if not _is_converted(function, places, wrapped=wrapped):
                missing[_owner(function)].append(name)
        return [_sentence(owner, names) for owner, names in missing.items()]


_Place = tuple[str, int, str]  # file, first line and name of a code object


def _place(code: CodeType) -> _Place:
    return code.co_filename, code.co_firstlineno, code.co_name


def _is_converted(function: Callable[..., Any], places: Set[_Place], *, wrapped: bool) -> bool:
    outer, inner = _code(function), _code(inspect.unwrap(function))
    if outer is None or inner is None:  # not written in Python: torch inlines it or reports a graph break
        return True
    owner = type(getattr(function, "__self__", None)).__qualname__
    for code in (outer, inner):
        file, line, name = _place(code)
        # Settings give each class of modules a renamed copy of the code: `with_own_code` in source_runtime.py.
        if {(file, line, name), (file, line, f"{name}_of_{owner}")} & places:
            return True
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return wrapped and not is_disabled and module_path(outer.co_filename).startswith("torch/")


def _code(function: Callable[..., Any]) -> CodeType | None:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _owner(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__qualname__ if owner is not None else ""


def _sentence(owner: str, names: list[str]) -> str:
    subject = names[0] if len(names) == 1 else f"{len(names)} modules ({names[0]} to {names[-1]})"
    was = "was" if len(names) == 1 else "were"
    return f"{subject}{f' of class {owner}' if owner else ''} {was} meant to be compiled and never {was}"
