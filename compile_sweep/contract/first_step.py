"""Takes one eager step of a workload made of functions before anything is planned, and names the function that fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.model_and_loss import ModelAndLoss, model_loss
from compile_sweep.contract.seeding import seeded
from compile_sweep.schema.errors import CompileSweepError, WorkloadError
from compile_sweep.schema.settings import OptimizerKind


def check_first_step(workload: Workload, *, has_gpu: bool) -> None:
    """Takes one step, forward, backward and update, on the first batch without padding.

    Args:
        workload: Any workload; one that is a class of its own is not checked.
        has_gpu: Whether to use a GPU, if this process sees one.

    Raises:
        WorkloadError: The step fails; the message names the function, the argument, the actual value, and what would be right.
    """
    if not isinstance(workload, ModelWorkload):
        return
    device = torch.device("cuda" if has_gpu and torch.cuda.is_available() else "cpu")
    raw = min(workload.raw_batches(), key=workload.length_of)
    try:
        _step(workload, raw, device)
    except torch.OutOfMemoryError:  # a trial has the device to itself, and reports if its memory does not suffice
        return
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _step(workload: ModelWorkload, raw: Mapping[str, Tensor], device: torch.device) -> None:
    model = workload.build_model()
    assert isinstance(model, ModelAndLoss)
    model.to(device)
    optimizer = workload.optimizer(model, OptimizerKind.FOREACH)
    batch = {name: tensor.to(device) for name, tensor in raw.items()}
    dtype = workload.autocast_dtype(device)
    autocast = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    with seeded(workload.seed), autocast, torch.set_grad_enabled(workload.trains):
        with _explained(workload, raw):
            loss = model(**batch)
        if not workload.trains:
            return
        _check_loss(loss, model)
    with _explained(workload, raw, what="the backward pass"):
        loss.backward()
    if not any(weights.grad is not None for weights in model.parameters()):
        raise WorkloadError("no parameter gets a gradient: the loss of loss_fn does not depend on the model that it is given")
    if optimizer is not None:
        with _explained(workload, raw, what="the step of the optimizer that optimizer_fn made"):
            optimizer.step()


def _check_loss(loss: Tensor, model: nn.Module) -> None:
    if loss.numel() != 1:
        raise WorkloadError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}, and a loss is one number; reduce it, say with .mean()"
        )
    if not loss.requires_grad:
        called = any(weights.grad is not None for weights in model.parameters())
        why = "it calls backward() itself" if called else "it is detached, an integer, or computed under no_grad"
        right = (
            "return the loss and leave backward() out, or give the function as step_fn" if called else "return the loss itself"
        )
        raise WorkloadError(f"loss_fn returned a loss without a gradient: {why}; {right}")


@contextmanager
def _explained(workload: ModelWorkload, raw: Mapping[str, Tensor], what: str = "") -> Iterator[None]:
    """Turns errors of a user's function into one sentence."""
    try:
        yield
    except (CompileSweepError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise WorkloadError(_explanation(workload, raw, error, what)) from error


def _explanation(workload: ModelWorkload, raw: Mapping[str, Tensor], error: Exception, what: str) -> str:
    came = ", ".join(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in raw.items())
    own = type(workload).loss_fn is not model_loss
    if isinstance(error, KeyError) and own and not what:
        asked = error.args[0] if error.args else "?"
        return f"loss_fn asks its batch for {asked!r}, which batch_fn does not put in; batches have {came}"
    where = _place(error)
    if not what:
        what = "loss_fn, or the model that it calls," if own else "the model, called with the batch,"
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"{what} failed{where} in eager mode, before anything was compiled: {reason}; the batch has {came}"


def _place(error: Exception) -> str:
    """Returns the innermost line outside installed libraries and this project."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in ("site-packages", "compile_sweep", "/lib/python", "<"))
    ]
    return f" at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
