"""Checks the gradients of a step under measurement, and runs what it compiled eagerly, in full precision too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_sweep.contract.base import Batch, unwrap_ddp
from compile_sweep.harness import memory
from compile_sweep.harness.apply import TrainStep
from compile_sweep.harness.distributed import everywhere, num_workers
from compile_sweep.harness.numerics.changed_in_place import with_what_changed
from compile_sweep.harness.numerics.finite_differences import Differentiated
from compile_sweep.harness.numerics.gradient_check import GradientCheck, check_gradients, skipped
from compile_sweep.harness.numerics.python_state import PythonState
from compile_sweep.harness.numerics.references import precision_of
from compile_sweep.harness.prepare import Prepared
from compile_sweep.schema.outcome import may_run_out_of_memory
from compile_sweep.schema.settings import Scope


def check_step(prepared: Prepared, model: nn.Module, step: TrainStep, batch: Batch, *, draws: bool) -> GradientCheck | None:
    """Checks a measured step on a batch of a shape that it has run on; None if nothing of the model is compiled."""
    settings, device = prepared.settings, prepared.device
    if settings.scope is Scope.EAGER or not prepared.workload.trains:
        return None
    if settings.ddp is not None and settings.ddp.compression is not None:
        return skipped("gradients are compressed on their way between workers")
    inner = unwrap_ddp(model)
    state = PythonState(inner)

    def run() -> float:
        state.put_back()  # a counter in the forward would make each evaluation that of another function
        return step.forward_and_backward(batch)

    subject = Differentiated.of_model(inner, run, device)
    subject.discard = partial(nn.Module.zero_grad, inner, set_to_none=not settings.keeps_gradients)
    first = next(iter(subject.parameters.values()))
    rounding, _ = precision_of(settings, prepared.workload.autocast_dtype(device), first.dtype.to_real())
    several = num_workers() > 1
    if several and not everywhere(memory.has_room(memory.read_peaks(device).in_use_bytes, device), device):
        return skipped("there is no memory for a second copy of the weights")
    with may_run_out_of_memory(unless=several):  # others wait for this worker
        found = check_gradients(
            subject,
            rounding=rounding,
            draws=draws,
            draws_eagers=settings.draws_eagers,
            eagerly=run_eagerly,
            precisely=run_precisely,
        )
        return with_what_changed(found, inner, subject, run_eagerly)
    return skipped("there is no memory for a second copy of the weights")


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Makes everything that was passed to torch.compile run as it is written in the block.

    Warnings that advise compiling it (`flex_attention` warns when called eagerly) are not meant for the user here, so they are
    dropped.
    """
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


@contextmanager
def run_precisely() -> Iterator[None]:
    """The same without autocast."""
    with run_eagerly(), without_autocast():
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Makes every autocast that is entered in the block do nothing."""
    enter = torch.autocast.__enter__

    def entered(self: torch.autocast) -> Any:
        found = enter(self)  # type: ignore[no-untyped-call]
        torch.set_autocast_enabled(self.device, False)
        return found

    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
