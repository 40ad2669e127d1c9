"""Checks whether the gradients of what a script compiles belong to what it computes, by finite differences on a recorded call.

Background: a script cannot be rewound, so its loss cannot be evaluated again, but its modules can. For one call of each module,
the arguments are kept and, from the script's own backward pass, the gradient of the loss with respect to each output. The sum of
outputs times those fixed gradients has the same gradients as the loss, and replaces it in the check of
`harness/numerics/gradient_check.py`. Inputs that require gradients, such as those that a GAN's generator gives its discriminator,
count as parameters. Copies stay on the CPU until the memory peaks are read.

Output: a `GradientCheck` of all modules together.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compile_sweep.harness import memory
from compile_sweep.harness.distributed import everywhere, num_workers
from compile_sweep.harness.numerics.changed_in_place import with_what_changed
from compile_sweep.harness.numerics.finite_differences import Differentiated, untrained_tensors
from compile_sweep.harness.numerics.gradient_check import (
    GradientCheck,
    Outcome,
    check_gradients,
    skipped,
)
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.step_check import run_eagerly, run_precisely
from compile_sweep.script.discover import Target

INPUT = "input "  # prefix, followed by a number, of the names of inputs that require gradients


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a module."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """Copies of the arguments."""
    training: Mapping[nn.Module, bool]
    autocast: torch.dtype | None
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Gradients of the loss with respect to the outputs, by output index."""


class CallRecorder:
    """Keeps one call of each module, with the gradients of its outputs if a backward pass reaches them."""

    def __init__(self) -> None:
        self.calls: dict[Target, RecordedCall] = {}

    def call(self, target: Target, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call, and keeps it unless one with known gradients is already kept."""
        before = self.calls.get(target)
        if before is not None and before.gradients:
            return run(*args, **kwargs)
        kind = target.device.type
        kept = self.calls[target] = RecordedCall(
            arguments=_on_the_cpu((args, dict(kwargs))),
            training={module: module.training for module in target.module.modules()},
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )
        outputs = run(*args, **kwargs)
        for index, output in enumerate(tensors_of(outputs)):
            if output.requires_grad:
                output.register_hook(_noting(kept, index))
        return outputs


def check_calls(
    calls: Mapping[Target, RecordedCall],
    run: Mapping[Target, Callable[..., Any]],
    rounding: Callable[[Target], float],
    *,
    draws_eagers: bool = False,
) -> GradientCheck:
    """Checks the gradients of modules as the script calls them now; all workers of a group must call this together.

    Args:
        draws_eagers: Whether compiled code draws the random numbers that eager code draws from the same seed.
    """
    found: dict[str, GradientCheck] = {}
    for target, recorded in calls.items():
        try:
            found[target.name] = _check(target, recorded, run[target], rounding(target), draws_eagers=draws_eagers)
        except RuntimeError as error:  # for example, the call cannot be repeated, or memory does not suffice
            if num_workers() > 1:  # others wait for this worker
                raise
            found[target.name] = skipped(f"{target.name} could not be called again: {str(error).strip().splitlines()[0]}")
    return together(found)


def together(found: Mapping[str, GradientCheck]) -> GradientCheck:
    """Combines the results of several modules: wrong if one is, right if all are."""
    if not found:
        return skipped("no call of a compiled module was recorded")
    if len(found) == 1:
        return next(iter(found.values()))
    ranks = (Outcome.WRONG, Outcome.SKIPPED, Outcome.OK)
    name, worst = min(found.items(), key=lambda item: (ranks.index(item[1].outcome), -(item[1].error or 0.0)))
    return replace(
        worst,
        reason=worst.reason and f"{name}: {worst.reason}",
        layers={f"{name}.{layer}": error for layer, error in worst.layers.items()},
        read_then_changed=[f"{name}.{tensor}" for tensor in worst.read_then_changed],
        changed_then_read=[f"{name}.{tensor}" for tensor in worst.changed_then_read],
        evaluations=sum(one.evaluations for one in found.values()),
    )


def _check(
    target: Target, recorded: RecordedCall, run: Callable[..., Any], rounding: float, *, draws_eagers: bool
) -> GradientCheck:
    module, device = target.module, target.device
    if any(hasattr(weights, "to_local") for weights in module.parameters()) or _is_sharded(target.called):
        return skipped("parameters are sharded over workers")
    several = num_workers() > 1
    if several and not isinstance(target.called, nn.parallel.DistributedDataParallel):
        return skipped("workers train together without DistributedDataParallel, so whose gradients these are is not known")
    if not everywhere(bool(recorded.gradients), device):
        return skipped(f"no gradient came back to {target.name} in the step that was looked at")
    if several and not everywhere(memory.has_room(memory.read_peaks(device).in_use_bytes, device), device):
        return skipped("there is no memory for a second copy of the weights")
    for part, training in recorded.training.items():
        part.training = training
    call = _Call(target, recorded, run, averages=several)
    subject = Differentiated(
        parameters=call.parameters,
        untrained=partial(untrained_tensors, module),
        run=call.run,
        discard=call.discard,
        gradients=lambda: call.gradients,
        device=device,
    )
    precisely = None if recorded.autocast is None else run_precisely
    found = check_gradients(
        subject,
        rounding=rounding,
        draws=target.draws,
        draws_eagers=draws_eagers,
        eagerly=run_eagerly,
        precisely=precisely,
    )
    return with_what_changed(found, module, subject, run_eagerly)


class _Call:
    """A recorded call as a function of the module's parameters."""

    def __init__(self, target: Target, recorded: RecordedCall, run: Callable[..., Any], *, averages: bool) -> None:
        self._target, self._run, self._averages = target, run, averages
        # The arguments on their original devices, and those that require gradients.
        tensors: dict[int, Tensor] = {}
        self._halves: dict[int, torch.dtype] = {}  # of inputs with gradients, which move in float32 like weights

        def moved(kept: _Kept) -> Tensor:
            if id(kept) not in tensors:
                values = kept.values.to(kept.device)
                if kept.requires_grad and _is_half(values.dtype):
                    values = values.float()
                    self._halves[id(values)] = kept.values.dtype
                tensors[id(kept)] = values.requires_grad_(kept.requires_grad)
            return tensors[id(kept)]

        there = pytree.tree_map_only(_Kept, moved, recorded.arguments)
        self._arguments, inputs = there, [tensor for tensor in tensors.values() if tensor.requires_grad]
        self._outer = {index: gradient.to(target.device) for index, gradient in recorded.gradients.items()}
        self._autocast = recorded.autocast
        self._state = PythonState(target.module)
        self._offset: float | None = None
        self.parameters: dict[str, Any] = {
            **{name: weights for name, weights in target.module.named_parameters() if weights.requires_grad},
            **({} if averages else {f"{INPUT}{index}": tensor for index, tensor in enumerate(inputs)}),
        }
        self.gradients: Sequence[Tensor | None] = [None] * len(self.parameters)

    def discard(self) -> None:
        """Drops the gradients."""
        self.gradients = [None] * len(self.parameters)
        if self._averages:
            for weights in self.parameters.values():
                weights.grad = None

    def run(self) -> float:
        """Runs forward and backward; returns the sum that replaces the loss."""
        self._state.put_back()
        kind = self._target.device.type
        if kind == "cuda":  # where a script's steps are marked, CUDA graphs would be recorded anew at each call within one
            torch.compiler.cudagraph_mark_step_begin()
        with torch.enable_grad(), torch.autocast(kind, dtype=self._autocast, enabled=self._autocast is not None):
            full = self._autocast is not None and not torch.is_autocast_enabled(kind)  # compared in full precision
            args, kwargs = pytree.tree_map_only(Tensor, partial(self._passed, in_full=full), self._arguments)
            outputs = list(tensors_of(self._run(*args, **kwargs)))
        reached = [(outputs[index], outer) for index, outer in self._outer.items()]
        # The others die before the backward pass, as they do in the script: CUDA graphs were recorded so, and refuse to differ.
        del outputs
        products = [_real(output.detach()).double() * _real(outer).double() for output, outer in reached]
        total = float(sum(product.sum() for product in products))
        if self._offset is None:
            # The sum may be close to zero by chance. Its terms are not, and are about as large as the loss that it replaces.
            least = float(sum(product.abs().sum() for product in products))
            self._offset = math.copysign(max(0.0, least - abs(total)), total)
        del products
        tensors, outers = [output for output, _ in reached], [outer.to(output.dtype) for output, outer in reached]
        if self._averages:  # through DistributedDataParallel
            torch.autograd.backward(tensors, outers)
            self.gradients = [weights.grad for weights in self.parameters.values()]
        else:
            leaves = list(self.parameters.values())
            # Copied as they arrive: with CUDA graphs for each block, later parts of the backward pass overwrite them.
            with ExitStack() as hooks:
                for leaf in leaves:
                    hooks.enter_context(leaf.register_hook(_copied))
                self.gradients = torch.autograd.grad(tensors, leaves, outers, allow_unused=True)
        return total + self._offset

    def _passed(self, tensor: Tensor, *, in_full: bool) -> Tensor:
        """Returns an argument as it is passed on: a copy of one that requires gradients, and in full precision if asked."""
        dtype = self._halves.get(id(tensor), tensor.dtype)
        passed = tensor.to(torch.float32 if in_full and _is_half(dtype) else dtype)
        return passed.clone() if tensor.requires_grad and passed is tensor else passed


def inner_call(target: Target, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns how to reach a module's compiled code: like the script, but past a wrapper that only averages gradients."""
    called = target.called
    if num_workers() > 1 or not isinstance(called, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return run
    return called.module if isinstance(called, nn.parallel.DistributedDataParallel) else run


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _noting(kept: RecordedCall, index: int) -> Callable[[Tensor | None], None]:
    def note(gradient: Tensor | None) -> None:
        if gradient is not None and index not in kept.gradients:  # None for an output that the loss does not depend on
            kept.gradients[index] = gradient.detach().to("cpu", copy=True)

    return note


def tensors_of(outputs: Any) -> Iterator[Tensor]:
    """Yields the tensors that a module returned, in order."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_of([getattr(leaf, one.name) for one in fields(leaf)])


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A tensor argument, on the CPU."""

    values: Tensor
    device: torch.device
    requires_grad: bool


def _on_the_cpu(arguments: Any) -> Any:
    """Returns the arguments with copies instead of plain tensors; a tensor that occurs twice is copied once."""
    copies: dict[int, _Kept] = {}

    def kept(tensor: Tensor) -> Any:
        if type(tensor) is not Tensor:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = _Kept(tensor.detach().to("cpu", copy=True), tensor.device, tensor.requires_grad)
        return copies[id(tensor)]

    return pytree.tree_map_only(Tensor, kept, arguments)


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()  # before torch 2.12, hooks also get gradients that do not exist


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
