"""Marks dimensions of a call's arguments as ones that change, for the length of the call.

The tensors are the script's own: it may hand them to another module, whose batches do not change, or which gets others with them.
There a mark is an error, because it insists that the dimension varies.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from types import MethodType
from typing import Any

from torch import Tensor, nn

from compile_sweep.harness.source_runtime import mark, value_at


def marked(module: nn.Module, compiled: Callable[..., Any], dims: dict[str, tuple[int, ...]]) -> Callable[..., Any]:
    """Returns a forward that marks its arguments before the compiled one sees them, and restores the script's marks after it.

    Args:
        module: The module whose forward is compiled; its signature names the arguments.
        compiled: The compiled forward.
        dims: Dimensions that change, by the name of the argument, as `Target.changing` returns them.
    """
    signature = inspect.signature(MethodType(type(module).forward, module))

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        tensors = [one for name in dims if isinstance(one := value_at(arguments, name), Tensor)]
        before = [_marks(one) for one in tensors]
        mark(arguments, dims)
        try:
            return compiled(*args, **kwargs)
        finally:
            for tensor, marks in zip(tensors, before, strict=True):
                _restore(tensor, marks)

    return forward


def _marks(tensor: Tensor) -> dict[str, Any]:
    """Returns copies of what torch notes about a tensor's dimensions."""
    return {name: copy(value) for name, value in vars(tensor).items() if _is_mark(name)}


def _restore(tensor: Tensor, marks: Mapping[str, Any]) -> None:
    for name in [name for name in vars(tensor) if _is_mark(name)]:
        delattr(tensor, name)
    vars(tensor).update(marks)


def _is_mark(name: str) -> bool:
    return name.startswith(("_dynamo_", "_has_dynamo_"))
