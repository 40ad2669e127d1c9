"""Checks what a user passed to `WorkloadFromModel`, and names the function of theirs that fails."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from numbers import Integral
from typing import Any

import torch
from torch import nn

from compile_sweep.schema.errors import CompileSweepError, WorkloadError
from compile_sweep.schema.outcome import is_out_of_memory

REAL = "real"
PADDED = "padded"


def check_arguments(workload: Any) -> None:
    """Checks the arguments of `WorkloadFromModel`, which are attributes of the class that it made.

    This is not done in `WorkloadFromModel` itself, because one bad workload would then hide others in its module.
    """
    if workload.both_losses:
        raise WorkloadError("WorkloadFromModel has both loss_fn and step_fn; leave one of them out")
    if workload.has_own_step and not workload.trains:
        raise WorkloadError(
            "step_fn and accumulate are for training, and trains=False makes a workload of inference; leave one out"
        )
    _check_functions(workload)
    clip = workload.clip_grad_norm
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise WorkloadError(f"clip_grad_norm={clip!r} of WorkloadFromModel is not a number above 0")
    numbers = {
        "accumulate": workload.declared_accumulate,
        "num_batches": workload.pool_batches,
        "max_length": workload.declared_max_length,
        "min_length": workload.declared_min_length,
    }
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1):
            raise WorkloadError(f"{name}={number!r} of WorkloadFromModel is not a whole number of 1 or more")
    if workload.declared_lengths not in (None, REAL, PADDED):
        raise WorkloadError(f"lengths={workload.declared_lengths!r} of WorkloadFromModel is neither 'real' nor 'padded'")
    dynamic = workload.declared_dynamic
    if dynamic is not None and not (isinstance(dynamic, Mapping) and all(map(_are_dimensions, dynamic.values()))):
        raise WorkloadError(
            f"dynamic={dynamic!r} of WorkloadFromModel does not give tensors their dimensions; write dynamic={{'ids': (1,)}}"
        )


def _check_functions(workload: Any) -> None:
    """Refuses an object in place of a function that makes it, and functions that cannot be called as they will be."""
    if isinstance(workload.model_fn, nn.Module):
        name = type(workload.model_fn).__name__
        raise WorkloadError(f"model_fn of WorkloadFromModel is a model, not a function that makes one; give lambda: {name}(…)")
    if isinstance(workload.optimizer_fn, torch.optim.Optimizer):
        name = type(workload.optimizer_fn).__name__
        raise WorkloadError(
            f"optimizer_fn of WorkloadFromModel is an optimizer, not a function that makes one of a model's parameters; give "
            f"partial(torch.optim.{name}, lr=…)"
        )
    if isinstance(workload.loss_fn, type) and issubclass(workload.loss_fn, nn.Module):
        name = workload.loss_fn.__name__
        raise WorkloadError(f"{workload.loss_name} of WorkloadFromModel is the class {name}; give an object of it, {name}()")
    if isinstance(workload.loss_fn, nn.modules.loss._Loss):
        name = type(workload.loss_fn).__name__
        raise WorkloadError(
            f"loss_fn of WorkloadFromModel is called with the model and a batch, and {name} takes outputs and targets; give "
            f"lambda model, batch: {name}()(model(batch['x']), batch['y'])"
        )
    _check_call("model_fn", workload.model_fn, (), "lambda: Net(…), with its arguments in it")
    _check_call("batch_fn", workload.batch_fn, ("number",), "a function of the batch's number")
    _check_call(
        workload.loss_name, workload.loss_fn, ("model", "batch"), "a function of the model and a batch, as batch_fn made it"
    )
    _check_call("scheduler_fn", workload.scheduler_fn, ("optimizer",), "partial(torch.optim.lr_scheduler.StepLR, step_size=…)")


def _check_call(what: str, function: Any, given: Sequence[str], right: str) -> None:
    """Refuses a function that does not take these arguments by position."""
    called = function.forward if isinstance(function, nn.Module) else function
    taken = _signature(called, follow_wrapped=False)  # what a decorator's own function takes
    if taken is None:
        return
    try:
        taken.bind(*given)
    except TypeError:
        needed = ", ".join(
            name
            for name, one in taken.parameters.items()
            if one.default is Parameter.empty and one.kind is not Parameter.VAR_KEYWORD
        )
        raise WorkloadError(
            f"{what} of WorkloadFromModel is called as {what}({', '.join(given)}), and "
            f"{getattr(function, '__name__', 'it')} takes ({needed}); give {right}"
        ) from None


def _signature(function: Any, *, follow_wrapped: bool = True) -> Signature | None:
    try:
        return signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):  # not a function, or one written in C; calling it will show
        return None


def parameters_of(function: Any) -> Mapping[str, Parameter]:
    """Returns the parameters of a function by name; none of what has no signature, such as one written in C."""
    taken = _signature(function)
    return {} if taken is None else taken.parameters


def _are_dimensions(dims: Any) -> bool:
    return isinstance(dims, Sequence) and all(isinstance(dim, Integral) for dim in dims)


class NoMoreBatches(Exception):
    """The user's iterator is exhausted."""


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turns any error of a user's function into a `WorkloadError` with the original as its cause."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CompileSweepError | NoMoreBatches) or is_out_of_memory(error):
            raise
        raise WorkloadError(f"{what}: {type(error).__name__}: {error}") from error
