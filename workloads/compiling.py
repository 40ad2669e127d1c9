"""Applies `CompileSettings` to a model and its optimizer; the one place that touches `torch.compile` and its configuration.

The forwards it replaces are put back when the block ends; torch's own configuration is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._inductor import list_mode_options

from workloads.base import Batch, Workload
from workloads.settings import CompileSettings, Dynamic, OptimizerKind, Scope

_DYNAMIC_ARGUMENT = {
    Dynamic.STATIC: False,
    Dynamic.BUCKETS: False,
    Dynamic.AUTO: None,
    Dynamic.MARK: None,
    Dynamic.TRUE: True,
}
"""What `torch.compile(dynamic=...)` takes for each strategy."""


class TrainStep:
    """Forward, backward and optimizer step on one batch, under some compile settings."""

    def __init__(
        self,
        *,
        forward: Callable[..., Tensor],
        prepare: Callable[[Batch], None],
        optimizer: torch.optim.Optimizer,
        optimizer_step: Callable[[], object],
        autocast: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._prepare = prepare
        self._optimizer = optimizer
        self._optimizer_step = optimizer_step
        self._autocast = autocast
        self._device = device

    def __call__(self, batch: Batch, *, before_update: Callable[[], None] | None = None) -> Tensor:
        """Runs one step and returns its loss, detached, in memory no later step overwrites.

        Args:
            batch: what to train on.
            before_update: called between the backward pass and the optimizer's step, when gradients are there to look at.
        """
        self._prepare(batch)
        with torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None):
            loss = self._forward(**batch.inputs)
        loss.backward()
        if before_update is not None:
            before_update()
        self._optimizer_step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()


@contextmanager
def applied(
    settings: CompileSettings, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[TrainStep]:
    """A training step of `model` under `settings`; nothing compiles before its first call.

    Args:
        settings: what to apply; already valid for the workload's lengths.
        workload: names the model's regions, parts and dynamic dimensions.
        model: on `device`; inside `DistributedDataParallel` where there are several workers.
        optimizer: over the model's parameters.
        device: where the step runs.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    compile_ = _compiler(settings)
    marking = settings.dynamic is Dynamic.MARK
    forward: Callable[..., Tensor] = model
    with ExitStack() as undo:
        if settings.scope is Scope.FULL:
            forward = compile_(model)
        elif settings.scope is not Scope.EAGER:
            names = workload.regions(inner) if settings.scope is Scope.REGIONAL else workload.parts()
            for name in names:
                dims = workload.dynamic_dims(name) if marking else {}
                undo.enter_context(_compiled_forward(inner.get_submodule(name), compile_, dims))
        step: Callable[[], object] = optimizer.step
        if settings.optimizer is OptimizerKind.COMPILED:
            step = _optimizer_compiler(settings)(optimizer.step)
        yield TrainStep(
            forward=forward,
            prepare=_preparation(settings, workload.dynamic_dims("") if marking else {}),
            optimizer=optimizer,
            optimizer_step=step,
            autocast=workload.autocast_dtype(device),
            device=device,
        )


def _compiler(settings: CompileSettings) -> Callable[[Any], Any]:
    dynamic = _DYNAMIC_ARGUMENT[settings.dynamic] if settings.dynamic else None
    if settings.dynamic is Dynamic.MARK and _before_2_13():
        # Before 2.13, Inductor's padding of matrix products decides by comparing sizes with the marked length, which leaves
        # only the length equal to the head dimension and fails on it (docs/log.md). `mode` and `options` exclude each other.
        options = {**list_mode_options(settings.mode), "shape_padding": False}
        return lambda target: torch.compile(target, options=options, dynamic=dynamic)
    return lambda target: torch.compile(target, mode=settings.mode, dynamic=dynamic)


def _before_2_13() -> bool:
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def _optimizer_compiler(settings: CompileSettings) -> Callable[[Any], Any]:
    # Parameters never change size, so the optimizer's graph is static under every strategy.
    return lambda target: torch.compile(target, mode=settings.mode, dynamic=False)


@contextmanager
def _compiled_forward(module: nn.Module, compile_: Callable[[Any], Any], dims: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Replaces the module's forward by a compiled one that first marks the dimensions that vary.

    The forward is replaced rather than `module.compile()` called, because marks must be set outside what is compiled.
    """
    original = module.forward
    compiled = compile_(_with_own_code(original))
    if dims:
        signature = inspect.signature(original)

        def marked(*args: Any, **kwargs: Any) -> Any:
            _mark(signature.bind(*args, **kwargs).arguments, dims)
            return compiled(*args, **kwargs)

        module.forward = marked
    else:
        module.forward = compiled
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same bound method on a code object that only modules of one class share.

    torch keeps compiled graphs, their limit and what it learnt of changing sizes for each code object, and tells code objects
    apart by file, line and name. transformers wraps the forward of every kind of block in one function, so encoder blocks would
    use up the decoder blocks' limit and make their sizes look dynamic.
    """
    function, module = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
    if not isinstance(function, FunctionType) or not isinstance(module, nn.Module):
        return forward
    code = _own_code(function.__code__, type(module).__qualname__)
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, module)


@cache
def _own_code(code: CodeType, class_name: str) -> CodeType:
    return code.replace(co_name=f"{code.co_name}_of_{class_name}")


def _preparation(settings: CompileSettings, dims: Mapping[str, tuple[int, ...]]) -> Callable[[Batch], None]:
    def prepare(batch: Batch) -> None:
        _mark(batch.inputs, dims)
        if settings.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()

    return prepare


def _mark(arguments: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]]) -> None:
    for name, dimensions in dims.items():
        tensor = arguments.get(name)
        if isinstance(tensor, Tensor):
            for dimension in dimensions:
                mark_dynamic(tensor, dimension)
