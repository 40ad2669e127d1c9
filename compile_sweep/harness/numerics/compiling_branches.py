"""Finds code of a model that asks whether it is being compiled, and so may compute something else in compiled code.

Background: `torch.compiler.is_compiling()` is False in eager code and True while Dynamo traces. A branch on it that leaves out a
print changes nothing; one that takes another formula, such as a rounding without its own `autograd.Function`, trains another
model, although torch compiles it rightly. The code itself tells, so nothing is run.
"""

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from torch import nn

from compile_sweep.harness.numerics.python_state import own_files

_QUESTIONS = {"is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling"}
"""Names of functions of torch, and of transformers, that tell whether the code that calls them is being compiled."""


def compiling_branches(model: nn.Module) -> list[str]:
    """Returns functions of the user's files that ask whether they are compiled, such as `Rounded.forward (model.py:16)`."""
    found = [one.__code__ for held in own_files(model) for one in _functions(held)]
    return list(dict.fromkeys(_named(code) for code in found if any(_QUESTIONS & {*one.co_names} for one in _with_inner(code))))


def _functions(held: dict[str, object]) -> Iterator[FunctionType]:
    """Yields the functions and methods that a file defines, and not those that it imports."""
    own = held.get("__name__")
    for value in held.values():
        if getattr(value, "__module__", None) != own:
            continue
        for one in vars(value).values() if isinstance(value, type) else (value,):
            function = getattr(one, "__func__", one)  # of class methods and static methods
            if isinstance(function, FunctionType):
                yield function


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _named(code: CodeType) -> str:
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
