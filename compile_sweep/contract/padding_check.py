"""Checks what padding does to a workload's batches, and whether it silently changes the loss.

Padding preserves a loss only if the model masks the padding and the loss ignores it. Labels padded with 0, ids of an
`EmbeddingBag` padded with the first row, or a mean over all positions change it. They do so in eager training too, so comparing a
compiled run with an eager one cannot show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.seeding import seeded
from compile_sweep.contract.tensor_uses import IGNORE_INDEX
from compile_sweep.contract.workload_facts import shown_name
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.outcome import is_out_of_memory

Loss = tuple[float, float]  # a loss, and the norm of its gradients
_MOST_TRIED = 16  # combinations of other padding values that are tried; each takes a forward and a backward

_TOLERANCE = 1e-3
"""Relative to the loss and to the norm of the gradients: many times float32's rounding in sums of another order."""


def checked_padding(workload: Workload, *, has_gpu: bool) -> list[str]:
    """Returns what `check_padding` says is padded; raises WorkloadError if that changes the loss or its gradients."""
    if not isinstance(workload, ModelWorkload):
        return []
    unknown = check_padding(workload, torch.device("cuda" if has_gpu and torch.cuda.is_available() else "cpu"))
    return [*workload.padding_lines(), *([unknown] if unknown else [])]


def check_padding(workload: ModelWorkload, device: torch.device) -> str | None:
    """Compares loss and gradients of the shortest batch, and of others unlike it, with those of the same batch at full length.

    Nothing is compared if nothing is padded, if every padding value is in `pad_with` (the user has decided), and for inference.

    Returns:
        Why they could not be compared; None if they were, or need not be.

    Raises:
        WorkloadError: They differ, or the padded batch fails; the message names the tensors and what to write.
    """
    if not workload.padding().keys() - workload.pad_with.keys() or not workload.trains:
        return None
    runs = _Runs(workload, device)
    for number, raw in _different_batches(workload):
        if (unknown := _check_batch(runs, number, raw)) is not None:
            return unknown
    return None


def _different_batches(workload: ModelWorkload) -> list[tuple[int, Mapping[str, Tensor]]]:
    """Returns the shortest batch and up to two others: those whose masks are unlike its own, or else one of middle length.

    A model may compute something else where a mask leaves nothing out, and a library may drop such a mask.
    """
    longest_first = sorted(enumerate(workload.raw_batches()), key=lambda one: -workload.length_of(one[1]))
    by_length = {workload.length_of(raw): (number, raw) for number, raw in longest_first}
    by_outline = {_outline(raw): (number, raw) for number, raw in longest_first}
    shortest = by_length.pop(min(by_length))
    by_outline.pop(_outline(shortest[1]), None)
    middle = [by_length[length] for length in sorted(by_length)][:-1]
    return [shortest, *(list(by_outline.values())[-2:] or middle[len(middle) // 2 :][:1])]


def _outline(raw: Mapping[str, Tensor]) -> tuple[bool, ...]:
    """Tells of each mask whether it leaves something out, and of other integers whether they hold a mark such as -100."""
    whole = [tensor for tensor in raw.values() if not tensor.is_floating_point() and not tensor.is_complex()]
    return tuple(bool((tensor < (1 if tensor.numel() and int(tensor.max()) <= 1 else 0)).any()) for tensor in whole)


def _check_batch(runs: _Runs, number: int, raw: Mapping[str, Tensor]) -> str | None:
    """Checks one batch, and returns and raises what `check_padding` does."""
    workload = runs.workload
    padding = {name: how for name, how in workload.padding().items() if name in raw}
    untold = {name: dims for name, (dims, _) in padding.items() if name not in workload.pad_with}
    padded = workload.padded_to(raw, workload.max_length)
    if all(padded[name].shape == tensor.shape for name, tensor in raw.items()):
        return None
    try:
        expected = runs.first(raw)
    except Exception:  # the first step says what is wrong
        return None
    if expected is None:
        return "whether padding changes the loss is not known: the step draws random numbers even without dropout"
    before = f"batch {number}, padded from length {workload.length_of(raw)} to {workload.max_length},"
    found = None
    try:
        found = runs.loss_and_norm(padded)
    except Exception as error:
        if is_out_of_memory(error):
            return "whether padding changes the loss is not known: the longest batch does not fit the memory"
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        wrong = f"padding breaks this workload: {before} fails, which it does not as it is, with {said}"
    else:
        if _are_close(expected, found):
            return None
        wrong = (
            f"padding changes what this workload trains on: {before} has loss {found[0]:.5g} instead of {expected[0]:.5g} and "
            f"gradient norm {found[1]:.5g} instead of {expected[1]:.5g}"
        )
    values = {name: value for name, (_, value) in padding.items()}
    where = {name: " and ".join(map(str, dims)) for name, dims in untold.items()}
    what = ", ".join(f"{shown_name(name)} (dimension {dims}) with {values[name]:g}" for name, dims in where.items())
    lengths = ", ".join(f"{name!r}: {dims}" for name, dims in workload.batch_changes.length.items())
    raise WorkloadError(
        f"{wrong}; it pads {what}. {_advice(runs, raw, values, expected, found)}. "
        f"dynamic={{{lengths}}} says which dimensions are the length"
    )


def _advice(runs: _Runs, raw: Mapping[str, Tensor], values: Mapping[str, float], expected: Loss, found: Loss | None) -> str:
    """Says what to write in `WorkloadFromModel`: padding values that preserve the loss if there are some, else no padding."""
    real = "write lengths='real' to train on batches as they come"
    if lacks := [repr(name) for name in runs.workload.padding() if name not in raw]:
        real += (
            f", or put {' and '.join(lacks)}, which this batch lacks, into all of them, a mask of ones where nothing is masked"
        )
    told = _written(values)
    if better := _better_values(runs, raw, values, expected):
        return f"In WorkloadFromModel, write pad_with={_written(better)}, which leaves loss and gradients as they are, or {real}"
    if found is None:
        return f"No other value works: in WorkloadFromModel, {real}"
    meant = f"pad_with={told} if the change is meant, as where your own collator pads to a fixed length"
    mask = "mask what is padded in the model and the loss"
    return f"No other value leaves the loss as it is: in WorkloadFromModel, {real}, or {meant}, or {mask}"


def _written(values: Mapping[str, float]) -> str:
    texts = {name: f"{value:g}" if math.isfinite(value) else f"float('{value:g}')" for name, value in values.items()}
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"


def _better_values(runs: _Runs, raw: Mapping[str, Tensor], values: Mapping[str, float], expected: Loss) -> dict[str, float]:
    """Returns other padding values that preserve loss and gradients, as few as possible; empty if none of those tried does."""
    workload = runs.workload
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
            found = runs.loss_and_norm({**padded, **{name: filled[name] for name in names}})
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


class _Runs:
    """Runs of a workload's model without dropout, in float32."""

    def __init__(self, workload: ModelWorkload, device: torch.device) -> None:
        self.workload = workload
        self._device = device
        self._without_chance: Callable[[nn.Module], None] = _stop_dropout
        self._is_known = False

    def first(self, batch: Mapping[str, Tensor]) -> Loss | None:
        """Runs a batch in the first way in which it draws no random numbers, which later runs then use.

        A model in evaluation mode may be another one: without auxiliary outputs, or with other code.

        Returns:
            Loss and norm; None if the step draws random numbers in any way.

        Raises:
            Exception: The step fails in any way.
        """
        if self._is_known:
            return self.loss_and_norm(batch)
        errors = []
        ways = (_stop_dropout, _evaluate)
        for self._without_chance in ways:
            try:
                found, other = (self.loss_and_norm(batch, other_seed=other_seed) for other_seed in (0, 1))
            except Exception as error:
                errors.append(error)
                continue
            if _are_close(found, other):
                self._is_known = True
                return found
        if len(errors) == len(ways):
            raise errors[0]
        return None

    def loss_and_norm(self, batch: Mapping[str, Tensor], *, other_seed: int = 0) -> Loss:
        """Returns the loss and the norm of all gradients. Batch norms see the padding as in training."""
        model = self.workload.build_model().to(self._device).float()
        self._without_chance(model)
        with seeded(self.workload.seed + other_seed):
            loss = model(**{name: tensor.to(self._device) for name, tensor in batch.items()})
            loss.backward()
        gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        return float(loss.detach()), float(torch.nn.utils.get_total_norm(dense))


def _stop_dropout(model: nn.Module) -> None:
    """Sets the rates of dropout and stochastic depth to 0, as far as modules keep them as numbers."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, _DropoutNd)):
                setattr(module, name, 0.0)


def _evaluate(model: nn.Module) -> None:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    model.eval()
    for norm in norms:
        norm.train()


def _are_close(one: Loss, other: Loss) -> bool:
    return all(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) + 1e-6 for a, b in zip(one, other, strict=True))
