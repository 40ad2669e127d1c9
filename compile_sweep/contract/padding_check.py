"""Checks what padding does to a workload's batches, and whether it silently changes the loss.

Padding preserves a loss only if the model masks the padding and the loss ignores it. Labels padded with 0, ids of an
`EmbeddingBag` padded with the first row, or a mean over all positions change it. They do so in eager training too, so comparing a
compiled run with an eager one cannot show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import IGNORE_INDEX, ModelWorkload
from compile_sweep.contract.seeding import seeded
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.outcome import is_out_of_memory

Loss = tuple[float, float]
"""A loss, and the norm of its gradients."""

_MOST_TRIED = 16
"""Combinations of other padding values that are tried; each takes a forward and a backward."""

_TOLERANCE = 1e-3
"""Relative to the loss and to the norm of the gradients: many times float32's rounding in sums of another order."""


def checked_padding(workload: Workload, *, has_gpu: bool) -> list[str]:
    """Runs `check_padding` and returns what is padded; empty for a workload that pads by itself.

    Raises:
        WorkloadError: Padding changes the loss or its gradients.
    """
    if not isinstance(workload, ModelWorkload):
        return []
    check_padding(workload, torch.device("cuda" if has_gpu and torch.cuda.is_available() else "cpu"))
    return workload.padding_lines()


def check_padding(workload: ModelWorkload, device: torch.device) -> None:
    """Compares loss and gradients of the shortest batch with those of the same batch padded to the longest length.

    Nothing is compared if nothing is padded, if every padding value is in `pad_with` (the user has decided), for inference,
    and if the model does not run without dropout.

    Raises:
        WorkloadError: They differ, or the padded batch fails; the message names the tensors and what to write.
    """
    padding = workload.padding()
    untold = {name: dims for name, (dims, _) in padding.items() if name not in workload.pad_with}
    if not untold or not workload.trains:
        return
    number, raw = min(enumerate(workload.raw_batches()), key=lambda one: workload.length_of(one[1]))
    padded = workload.padded_to(raw, workload.max_length)
    if all(padded[name].shape == tensor.shape for name, tensor in raw.items()):
        return
    try:
        expected = _loss_and_norm(workload, raw, device)
    except Exception:  # a trial reports what is wrong with the model or the batch
        return
    before = f"batch {number}, padded from length {workload.length_of(raw)} to {workload.max_length},"
    found = None
    try:
        found = _loss_and_norm(workload, padded, device)
    except Exception as error:
        if is_out_of_memory(error):
            return
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        wrong = f"padding breaks this workload: {before} fails, which it does not as it is, with {said}"
    else:
        if _are_close(expected, found):
            return
        wrong = (
            f"padding changes what this workload trains on: {before} has loss {found[0]:.5g} instead of {expected[0]:.5g} and "
            f"gradient norm {found[1]:.5g} instead of {expected[1]:.5g}"
        )
    values = {name: value for name, (_, value) in padding.items()}
    where = {name: " and ".join(map(str, dims)) for name, dims in untold.items()}
    what = ", ".join(f"{name} (dimension {dims}) with {values[name]:g}" for name, dims in where.items())
    lengths = ", ".join(f"{name!r}: {dims}" for name, dims in workload.batch_changes.length.items())
    raise WorkloadError(
        f"{wrong}; it pads {what}. {_advice(workload, raw, values, expected, device, found)}. "
        f"dynamic={{{lengths}}} says which dimensions are the length"
    )


def _advice(
    workload: ModelWorkload,
    raw: Mapping[str, Tensor],
    values: Mapping[str, float],
    expected: Loss,
    device: torch.device,
    found: Loss | None,
) -> str:
    """Says what to write in `WorkloadFromModel`: padding values that preserve the loss if there are some, else no padding."""
    real = "write lengths='real' to train on batches as they come"
    told = _written(values)
    if better := _better_values(workload, raw, values, expected, device):
        return f"In WorkloadFromModel, write pad_with={_written(better)}, which leaves loss and gradients as they are, or {real}"
    if found is None:
        return f"No other value works: in WorkloadFromModel, {real}"
    meant = f"pad_with={told} if the change is meant, as where your own collator pads to a fixed length"
    mask = "mask what is padded in the model and the loss"
    return f"No other value leaves the loss as it is: in WorkloadFromModel, {real}, or {meant}, or {mask}"


def _written(values: Mapping[str, float]) -> str:
    texts = {name: f"{value:g}" if math.isfinite(value) else f"float('{value:g}')" for name, value in values.items()}
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"


def _better_values(
    workload: ModelWorkload, raw: Mapping[str, Tensor], values: Mapping[str, float], expected: Loss, device: torch.device
) -> dict[str, float]:
    """Returns other padding values that preserve loss and gradients, as few as possible; empty if none of those tried does."""
    open_names = [name for name in values if name not in workload.pad_with]
    others = {name: other for name in open_names if (other := _other_value(raw[name])) not in (None, values[name])}
    together = [names for count in range(1, len(others) + 1) for names in combinations(others, count)]
    padded = workload.padded_to(raw, workload.max_length)
    filled = {}
    for name, value in others.items():
        filled[name] = torch.full_like(padded[name], value)
        filled[name][tuple(slice(0, size) for size in raw[name].shape)] = raw[name]
    for names in together[:_MOST_TRIED]:
        try:
            found = _loss_and_norm(workload, {**padded, **{name: filled[name] for name in names}}, device)
        except Exception:  # such a value is no help
            continue
        if _are_close(expected, found):
            return {name: others[name] for name in names}
    return {}


def _other_value(tensor: Tensor) -> float | None:
    """Returns the value besides 0 that often marks padding in a tensor like this one; None for numbers that may be anything."""
    if tensor.dtype is torch.bool:
        return 1  # True where a position is left out
    if not tensor.numel() or tensor.is_complex():
        return None
    if not tensor.is_floating_point():
        is_mask = tensor.dtype not in (torch.int32, torch.int64) or bool(((tensor == 0) | (tensor == 1)).all())
        return 1 if is_mask and int(tensor.max()) <= 1 else IGNORE_INDEX
    if bool(tensor.isnan().any()):
        return math.nan
    lowest = float(tensor.min())
    if float(tensor.max()) <= 0 and lowest < -1000:
        return lowest  # a mask that is added to scores
    return 1 if bool(((tensor == 0) | (tensor == 1)).all()) else None


def _loss_and_norm(workload: ModelWorkload, batch: Mapping[str, Tensor], device: torch.device) -> Loss:
    """Returns the loss and the norm of all gradients in float32, without dropout. Batch norms see the padding as in training."""
    model = workload.build_model().to(device).float()
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    model.eval()
    for norm in norms:
        norm.train()
    with seeded(workload.seed):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})
        loss.backward()
    gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return float(loss.detach()), float(torch.nn.utils.get_total_norm(dense))


def _are_close(one: Loss, other: Loss) -> bool:
    return all(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) + 1e-6 for a, b in zip(one, other, strict=True))
