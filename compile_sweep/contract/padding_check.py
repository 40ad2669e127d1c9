"""Checks what padding does to a workload's batches, and whether it silently changes the loss.

Padding preserves a loss only if the model masks the padding and the loss ignores it. Labels padded with 0, ids of an
`EmbeddingBag` padded with the first row, or a mean over all positions change it. They do so in eager training too, so comparing a
compiled run with an eager one cannot show it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import IGNORE_INDEX, ModelWorkload
from compile_sweep.contract.seeding import seeded
from compile_sweep.schema.errors import WorkloadError

_TOLERANCE = 1e-3
"""Relative to the loss and to the norm of the gradients: many times float32's rounding in sums of another order."""


def checked_padding(workload: Workload, *, has_gpu: bool) -> list[str]:
    """Runs `check_padding` and returns what is padded; empty for a workload that pads by itself.

    Args:
        workload: Any workload.
        has_gpu: Whether to compare on a GPU, if this process sees one.

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
    and if the model does not run in eval mode, in which dropout is off.

    Raises:
        WorkloadError: They differ; the message names the tensors and what to write.
    """
    padding = workload.padding()
    untold = {name: dims for name, (dims, _) in padding.items() if name not in workload.pad_with}
    if not untold or not workload.trains:
        return
    number, raw = min(enumerate(workload.raw_batches()), key=lambda one: workload.length_of(one[1]))
    padded = workload.padded_to(raw, workload.max_length)
    if all(padded[name].shape == tensor.shape for name, tensor in raw.items()):
        return
    expected = _loss_and_norm(workload, raw, device)
    found = _loss_and_norm(workload, padded, device)
    if expected is None or found is None or _are_close(expected, found):
        return
    values = {name: value for name, (_, value) in padding.items()}
    advice = _better_padding(workload, raw, [*untold], expected, device)
    told = ", ".join(f"{name!r}: {value:g}" for name, value in values.items())
    lengths = ", ".join(f"{name!r}: {dims}" for name, dims in workload.batch_changes.length.items())
    where = {name: " and ".join(map(str, dims)) for name, dims in untold.items()}
    what = ", ".join(f"{name} (dimension {dims}) with {values[name]:g}" for name, dims in where.items())
    raise WorkloadError(
        f"padding changes what this workload trains on: batch {number}, padded from length {workload.length_of(raw)} to "
        f"{workload.max_length}, has loss {found[0]:.5g} instead of {expected[0]:.5g} and gradient norm {found[1]:.5g} instead "
        f"of {expected[1]:.5g}; it pads {what}. {advice}mask what is padded in the model and the loss, or train on batches "
        f"as they come with lengths='real'; dynamic={{{lengths}}} says which dimensions are the length; if the change is meant, "
        f"say so with pad_with={{{told}}}"
    )


def _better_padding(
    workload: ModelWorkload, raw: Mapping[str, Tensor], names: list[str], expected: tuple[float, float], device: torch.device
) -> str:
    """Returns advice on a tensor of labels that preserves the loss if it is padded with the index that losses ignore."""
    for name in names:
        if raw[name].dtype not in (torch.int32, torch.int64) or workload.padding_value(name, raw[name]) == IGNORE_INDEX:
            continue
        padded = workload.padded_to(raw, workload.max_length)
        kept = tuple(slice(0, size) for size in raw[name].shape)
        ignored = torch.full_like(padded[name], IGNORE_INDEX)
        ignored[kept] = raw[name][kept]
        found = _loss_and_norm(workload, {**padded, name: ignored}, device)
        if found is not None and _are_close(expected, found):
            return f"{name} holds labels: pad_with={{{name!r}: {IGNORE_INDEX}}} leaves the loss as it is. Or "
    return "Either "


def _loss_and_norm(workload: ModelWorkload, batch: Mapping[str, Tensor], device: torch.device) -> tuple[float, float] | None:
    """Returns the loss and the norm of all gradients in float32, without dropout; None if the model does not run that way."""
    model = workload.build_model().to(device).float().eval()
    try:
        with seeded(workload.seed):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()})
            loss.backward()
        gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        return float(loss.detach()), float(torch.nn.utils.get_total_norm(dense))
    except Exception:  # a trial reports what is wrong with the model or the batch
        return None


def _are_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) + 1e-6 for a, b in zip(one, other, strict=True))
