"""Takes one eager step of a workload made of functions before anything is planned, and names the function that fails."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.contract.base import Workload
from compile_sweep.contract.batches import unchanged
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.model_and_loss import MODEL, AccumulatedLoss, ModelAndLoss, model_loss, model_outputs
from compile_sweep.contract.seeding import seeded
from compile_sweep.schema.causes.places import place_of
from compile_sweep.schema.errors import CompileSweepError, WorkloadError
from compile_sweep.schema.outcome import is_out_of_memory, may_run_out_of_memory
from compile_sweep.schema.settings import OptimizerKind


def check_first_step(workload: Workload, *, has_gpu: bool) -> None:
    """Takes one step on a batch of each kind, unpadded; a WorkloadError names function, argument and value that fail it."""
    if not isinstance(workload, ModelWorkload):
        return
    device = torch.device("cuda" if has_gpu and torch.cuda.is_available() else "cpu")
    try:
        with may_run_out_of_memory():  # a trial has the device to itself, and reports if its memory does not suffice
            for raw in workload.kinds():
                _step(workload, raw, device)
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
        with _explained(workload, raw), _without_updates(model, workload.loss_name), unchanged(batch):
            loss = model(**batch)
        if not workload.trains:
            return
        _check_loss(loss, model)
    with _explained(workload, raw, what="the backward pass"):
        loss.backward()
    if not any(weights.grad is not None for weights in model.parameters()):
        if workload.loss_name == "step_fn":
            raise WorkloadError("no parameter has a gradient after step_fn: it calls backward(), and leaves out zero_grad()")
        raise WorkloadError("no parameter gets a gradient: the loss of loss_fn does not depend on the model that it is given")
    if optimizer is not None:
        schedule = workload.schedule(optimizer)
        with _explained(workload, raw, what="the step of the optimizer that optimizer_fn made"):
            optimizer.step()
        if schedule is not None:
            with _explained(workload, raw, what="the step of the scheduler that scheduler_fn made, schedule.step(),"):
                schedule.step()


@contextmanager
def _without_updates(model: nn.Module, function: str) -> Iterator[None]:
    """Refuses a step that updates the model itself, which the sweep's optimizer would then do once more."""
    own = {id(weights) for weights in model.parameters()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(weights) in own for group in optimizer.param_groups for weights in group["params"]):
            name = type(optimizer).__name__
            raise WorkloadError(
                f"{function} calls the step of its own optimizer, {name}, and the sweep updates the model after it; leave step() "
                f"and zero_grad() out, and give the optimizer as optimizer_fn=partial(torch.optim.{name}, lr=…)"
            )

    hook = register_optimizer_step_post_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _check_loss(loss: Tensor, model: ModelAndLoss) -> None:
    if loss.numel() != 1:
        raise WorkloadError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}, and a loss is one number; reduce it, say with .mean()"
        )
    if not any(weights.requires_grad for weights in model.parameters()):
        raise WorkloadError(
            "no parameter of the model has requires_grad, so there is nothing to train; unfreeze some, or measure inference with "
            "trains=False"
        )
    called = any(weights.grad is not None for weights in model.parameters())
    if called and loss.requires_grad and not model.has_own_step:
        raise WorkloadError(
            "loss_fn calls backward() itself, and the sweep calls it on the loss that it returns; leave backward() out, or give "
            "the function as step_fn"
        )
    if not loss.requires_grad:
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
    except Exception as error:
        if isinstance(error, CompileSweepError) or is_out_of_memory(error):
            raise
        raise WorkloadError(_explanation(workload, raw, error, what)) from error


def _explanation(workload: ModelWorkload, raw: Mapping[str, Tensor], error: Exception, what: str) -> str:
    came = ", ".join(f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in raw.items())
    own, function = _has_own_loss(workload), workload.loss_name
    if isinstance(error, KeyError) and own and not what and not (error.args[:1] == (None,) and _texts(workload)):
        asked = error.args[0] if error.args else "?"
        return f"{function} asks its batch for {asked!r}, which batch_fn does not put in; batches have {came}"
    if not own and "argument after ** must be a mapping" in str(error):  # the rest of its text is the whole model
        return (
            "without loss_fn, the model is called as model(**batch), and the batch is no dictionary; return one with the names "
            f"of forward's arguments, or give loss_fn=lambda model, batch: model(*batch); the batch has {came}"
        )
    where = f" at {place}" if (place := place_of(error)) else ""
    if not what:
        what = f"{function}, or the model that it calls," if own else "the model, called with the batch,"
    whole = str(workload.build_model().get_submodule(MODEL))  # Python names what it could not call by its text
    reason = f"{type(error).__name__}: {' '.join(str(error).replace(whole, 'the model').split())}"
    hint = _hint(workload, str(error), function)
    return f"{what} failed{where} in eager mode, before anything was compiled: {reason}; the batch has {came}{hint}"


def _has_own_loss(workload: ModelWorkload) -> bool:
    loss = type(workload).loss_fn
    return (loss.loss_fn if isinstance(loss, AccumulatedLoss) else loss) not in (model_loss, model_outputs)


def _hint(workload: ModelWorkload, reason: str, function: str) -> str:
    """Returns what is usually wrong, for errors that do not say it."""
    if not _has_own_loss(workload) and "unexpected keyword argument" in reason:
        return "; without loss_fn, the model is called as model(**batch): name its tensors as forward does, or give loss_fn"
    model = type(workload.build_model().get_submodule(MODEL)).__name__
    if f"must be Tensor, not {model}" in reason or f"{model!r} object has no attribute" in reason:
        return f"; {function} is called as {function}(model, batch), not with the model's outputs"
    if "'metrics'" in reason:
        return "; a schedule steps after each step here, without metrics: leave out one that waits for the validation's"
    if ("NoneType" in reason or reason == "None") and (texts := _texts(workload)):
        return f"; {texts[0]}; if it chooses what is computed, make a workload of each kind of batch"
    return ""


def _texts(workload: ModelWorkload) -> list[str]:
    return [remark for remark in workload.remarks() if "gets None" in remark]
