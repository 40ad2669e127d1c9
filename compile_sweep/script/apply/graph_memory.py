"""Keeps what outlasts a CUDA graph's next run out of its memory: gradients, results, and state that a forward replaces.

Background: what a graph returns is in memory that the next graph of the next step may overwrite. Scripts do not know that, and
hold gradients from step to step, collect results, or assign a buffer in the forward that the next forward reads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.discover import Target

Call = Callable[..., Any]


def wrap_call(module: nn.Module, around: Callable[[Call], Call]) -> None:
    """Replaces a module's call, compiled or not, by what `around` makes of it."""
    vars(module)["_compiled_call_impl"] = around(vars(module).get("_compiled_call_impl") or module._call_impl)


def before_graphs(
    settings: CompileSettings,
    targets: Sequence[Target],
    optimizers: Sequence[Optimizer],
    frozen: Sequence[nn.Module] = (),
    losses: Sequence[nn.Module] = (),
) -> None:
    """Copies gradients and state out of the memory of CUDA graphs before a target or a frozen network is called.

    A graph's gradients become those of the parameters without a copy, and the first graph that is called after the backward pass
    overwrites them, whichever it is. Scripts that accumulate gradients, or zero them late or in place, need them longer.

    Args:
        losses: Modules that are compiled, too, and may have state.
    """
    if not settings.compiles_graphs:
        return
    modules = [*(target.module for target in targets), *frozen]
    gradients = _GradientKeeper([parameter for target in targets for parameter in target.module.parameters()])
    state = _StateKeeper([*modules, *losses])
    for optimizer in optimizers:
        optimizer.register_step_post_hook(gradients.after_step)

    def guarded(call: Call) -> Call:
        def guarded_call(*args: Any, **kwargs: Any) -> Any:
            if gradients.before_call():
                state.put_back()
            return call(*args, **kwargs)

        return guarded_call

    for module in modules:
        wrap_call(module, guarded)


class _GradientKeeper:
    """Copies gradients before each call; where they outlast an optimizer's step, at the end of the next steps instead.

    After a step has been launched the GPU is busy for a while. Before a call it may wait, if the script waited for it in between.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.stepped = self.outlasts = False

    def after_step(self, *_: Any) -> None:
        if self.outlasts:
            copy_gradients(self.parameters)
        self.stepped = True

    def before_call(self) -> bool:
        """Copies gradients; returns whether this is the first call since a backward pass or a step."""
        copied = copy_gradients(self.parameters)
        is_first = copied or self.stepped
        self.outlasts |= copied and self.stepped
        self.stepped = False
        return is_first


_OUTSIDE_GRAPHS = "_is_outside_graphs"


def copy_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Copies the gradients that may be in the memory of a graph; returns whether there were any."""
    held = [(one, one.grad) for one in parameters if one.grad is not None and not hasattr(one.grad, _OUTSIDE_GRAPHS)]
    held = [(one, gradient) for one, gradient in held if gradient.layout is torch.strided]  # others are made outside of graphs
    copies = [torch.empty_like(gradient) for _, gradient in held]
    if held:
        torch._foreach_copy_(copies, [gradient for _, gradient in held])  # a few launches, not one for each parameter
    for (parameter, _), copied in zip(held, copies, strict=True):
        setattr(copied, _OUTSIDE_GRAPHS, True)
        parameter.grad = copied
    return bool(held)


_Place = tuple[nn.Module, str]  # a module and the name of one of its attributes


class _StateKeeper:
    """Moves tensors that a forward assigns to its module, such as `self.center = 0.9 * self.center + …`, out of graphs' memory.

    Each gets one tensor that stays, because CUDA graphs are recorded anew when a buffer moves. Which attributes are assigned is
    found in the first steps.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._first = dict(self._state())
        self._kept: dict[_Place, Tensor | None] = {}
        self._steps = 0

    def put_back(self) -> None:
        """Moves what was assigned since the last call."""
        self._steps += 1
        if self._steps <= WATCHED_STEPS:
            for place, value in self._state():
                if self._first.get(place) is not value:
                    self._kept.setdefault(place, None)
        else:
            self._first.clear()  # they would stay in memory
        for (part, name), kept in self._kept.items():
            held = part._buffers if name in part._buffers else vars(part)
            tensor = held.get(name)
            if tensor is None or tensor is kept or not _can_be_moved(tensor):
                continue
            if kept is None or (kept.shape, kept.dtype, kept.device) != (tensor.shape, tensor.dtype, tensor.device):
                kept = self._kept[part, name] = torch.empty_like(tensor)
            kept.copy_(tensor)
            held[name] = kept

    def _state(self) -> Iterator[tuple[_Place, Tensor]]:
        for part in self._parts:
            for name, value in (*part._buffers.items(), *vars(part).items()):
                if _can_be_moved(value):
                    yield (part, name), value


WATCHED_STEPS = 4


def _can_be_moved(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad and value.layout is torch.strided


def copied_out(forward: Call, *, applies: Callable[[], bool] = lambda: True) -> Call:
    """Returns the forward with its results outside of the memory of CUDA graphs, where that applies.

    Without gradients torch takes the next graph for the next step, which may overwrite what this one returned.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return pytree.tree_map_only(Tensor, torch.clone, outputs) if applies() else outputs

    return call
