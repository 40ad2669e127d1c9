"""Checks what padding does to a workload's batches, and whether it silently changes the loss.

Padding preserves a loss only if the model masks the padding and the loss ignores it. Labels padded with 0, ids of an
`EmbeddingBag` padded with the first row, or a mean over all positions change it. They do so in eager training too, so comparing a
compiled run with an eager one cannot show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from inspect import signature
from itertools import chain, combinations, islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from compile_sweep.contract.base import Workload
from compile_sweep.contract.from_model import ModelWorkload
from compile_sweep.contract.model_and_loss import ModelAndLoss
from compile_sweep.contract.precision import full_precision
from compile_sweep.contract.seeding import seeded
from compile_sweep.contract.tensor_uses import IGNORE_INDEX, is_whole
from compile_sweep.contract.workload_facts import shown_name
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.outcome import is_out_of_memory

_MOST_TRIED = 16  # combinations of other padding values that are tried at a time; each takes a forward and a backward
_MOST_PAD_IDS = 3  # IDs that may stand for padding in texts, each tried in such combinations

_MOST_COUNTED = 1_000_000  # numbers of which the most frequent one is looked for

_LOSS_TOLERANCE = 1e-3
"""Relative to the loss: many times float32's rounding in sums of another order."""

_GRADIENT_TOLERANCE = 2e-4
"""How far gradients may be apart, relative to their norm.

Padding that nothing sees moved those of 40 small models by 1.3e-6 at most. A BERT and a RoBERTa of two layers that attend to it
moved by 1.1e-3 and 2.6e-3, while their losses and the norms of their gradients hardly changed.
"""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a step computes."""

    loss: float
    gradients: Mapping[str, Tensor]

    def off(self, other: _Found) -> float:
        """Returns how far the gradients are from another step's, as a share of the larger norm."""
        mine, theirs = self.gradients, other.gradients
        both = mine.keys() & theirs.keys()
        alone = (one[name] for one in (mine, theirs) for name in one.keys() - both)
        apart = _norm(chain((mine[name] - theirs[name] for name in both), alone))
        return apart / (max(_norm(mine.values()), _norm(theirs.values())) + 1e-6 / _GRADIENT_TOLERANCE)

    def is_close_in_loss(self, other: _Found) -> bool:
        return abs(self.loss - other.loss) <= _LOSS_TOLERANCE * max(abs(self.loss), abs(other.loss)) + 1e-6

    def is_close(self, other: _Found) -> bool:
        return self.is_close_in_loss(other) and self.off(other) <= _GRADIENT_TOLERANCE


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
        found = runs.step(padded)
    except Exception as error:
        if is_out_of_memory(error):
            return "whether padding changes the loss is not known: the longest batch does not fit the memory"
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        wrong = f"padding breaks this workload: {before} fails, which it does not as it is, with {said}"
    else:
        if expected.is_close(found):
            return None
        of_loss = "" if expected.is_close_in_loss(found) else f"loss {found.loss:.5g} instead of {expected.loss:.5g} and "
        wrong = (
            f"padding changes what this workload trains on: {before} has {of_loss}gradients that are "
            f"{100 * expected.off(found):.2g}% off"
        )
    values = {name: value for name, (_, value) in padding.items()}
    where = {name: " and ".join(map(str, dims)) for name, dims in untold.items()}
    what = ", ".join(f"{shown_name(name)} (dimension {dims}) with {values[name]:g}" for name, dims in where.items())
    lengths = ", ".join(f"{name!r}: {dims}" for name, dims in workload.batch_changes.length.items())
    raise WorkloadError(
        f"{wrong}; it pads {what}. {_advice(runs, raw, values, expected, found)}. "
        f"dynamic={{{lengths}}} says which dimensions are the length"
    )


def _advice(runs: _Runs, raw: Mapping[str, Tensor], values: Mapping[str, float], expected: _Found, found: _Found | None) -> str:
    """Says what to write in `WorkloadFromModel`: padding values that preserve the loss if there are some, else no padding."""
    real = "write lengths='real' to train on batches as they come"
    if lacks := [repr(name) for name in runs.workload.padding() if name not in raw]:
        real += (
            f", or put {' and '.join(lacks)}, which this batch lacks, into all of them, a mask of ones where nothing is masked"
        )
    elif "input_ids" in raw and "attention_mask" not in raw and _takes_mask(runs.workload.build_model()):
        real += ", or put 'attention_mask' into the batches, 1 where a row has a token"
    told = _written(values)
    if better := _better_values(runs, raw, values, expected):
        return f"In WorkloadFromModel, write pad_with={_written(better)}, which leaves loss and gradients as they are, or {real}"
    if found is None:
        return f"No other value that was tried works: in WorkloadFromModel, {real}"
    meant = f"pad_with={told} if the change is meant, as where your own collator pads to a fixed length"
    mask = "mask what is padded in the model and the loss"
    return f"No other value that was tried leaves them as they are: in WorkloadFromModel, {real}, or {meant}, or {mask}"


def _takes_mask(model: nn.Module) -> bool:
    assert isinstance(model, ModelAndLoss)
    return "attention_mask" in signature(model.model.forward).parameters


def _written(values: Mapping[str, float]) -> str:
    texts = {name: f"{value:g}" if math.isfinite(value) else f"float('{value:g}')" for name, value in values.items()}
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"


def _better_values(runs: _Runs, raw: Mapping[str, Tensor], values: Mapping[str, float], expected: _Found) -> dict[str, float]:
    """Returns other padding values that preserve loss and gradients, as few as possible; empty if none of those tried does."""
    workload = runs.workload
    every = {name: [batch[name] for batch in workload.raw_batches() if name in batch] for name in values}
    marks = {name: _marks(every[name]) for name in values if name not in workload.pad_with}
    ids = [name for name, some in marks.items() if is_whole(raw[name]) and 1 not in some]
    also = [other for _, other in _different_batches(workload) if other is not raw]
    for others in _in_turn(values, marks, ids, _pad_ids(runs, [every[name] for name in ids]) if ids else []):
        try:
            if expected.is_close(runs.step(_filled(workload, raw, others))) and all(
                runs.step(other).is_close(runs.step(_filled(workload, other, others))) for other in also
            ):
                return others
        except Exception:  # such values are no help
            continue
    return {}


def _filled(workload: ModelWorkload, raw: Mapping[str, Tensor], values: Mapping[str, float]) -> dict[str, Tensor]:
    """Returns the batch at full length, with these padding values in place of the workload's own."""
    padded = dict(workload.padded_to(raw, workload.max_length))
    for name in values.keys() & raw.keys():
        padded[name] = torch.full_like(padded[name], values[name])
        padded[name][tuple(slice(0, size) for size in raw[name].shape)] = raw[name]
    return padded


def _in_turn(
    values: Mapping[str, float], marks: Mapping[str, Sequence[float]], ids: Sequence[str], pad_ids: Sequence[float]
) -> Iterator[dict[str, float]]:
    """Yields values to try: marks of padding in few tensors, then in more, then the same with an ID of padding in texts."""
    for pad_id in (None, *pad_ids):
        choices = {name: [pad_id] if pad_id is not None and name in ids else list(marks[name]) for name in marks}
        open_values = {name: [value for value in (*some, 0) if value != values[name]] for name, some in choices.items()}
        names = [name for name, some in open_values.items() if some]
        together = (some for count in range(1, len(names) + 1) for some in combinations(names, count))
        tried = (
            dict(zip(some, mixed, strict=True)) for some in together for mixed in product(*(open_values[name] for name in some))
        )
        most = _MOST_TRIED if pad_id is None else _MOST_TRIED // 2
        yield from islice((others for others in tried if pad_id is None or pad_id in others.values()), most)


def _pad_ids(runs: _Runs, texts: Sequence[Sequence[Tensor]]) -> list[float]:
    """Returns IDs besides 0 that may stand for padding: those that the model or the loss names, and those that end rows."""
    model = runs.workload.build_model()
    found = [getattr(module, "padding_idx", None) for module in model.modules() if isinstance(module, nn.Embedding)]
    found += [getattr(getattr(module, "config", None), "pad_token_id", None) for module in model.modules()]
    found += runs.workload.uses.ignored.values()
    for tensor in (one for some in texts for one in some if one.dim() > 1 and one.size(-1) > 1):
        last, other = tensor[..., -1].flatten(), tensor[..., -2].flatten()
        found += last[last == other].tolist()
    return [float(one) for one in dict.fromkeys(found) if isinstance(one, int) and one > 0][:_MOST_PAD_IDS]


def _marks(batches: Sequence[Tensor]) -> list[float]:
    """Returns values besides 0 that often mark padding in a tensor like that of these batches; none for numbers of any kind."""
    every = torch.cat([tensor.flatten() for tensor in batches])
    if every.dtype is torch.bool:
        return [1]  # True where a position is left out
    if not every.numel() or every.is_complex():
        return []
    is_binary = bool(((every == 0) | (every == 1)).all())
    lowest = every[~every.isnan()].min() if not every.isnan().all() else every.new_zeros(())
    if not every.is_floating_point():
        found: list[float] = [1] if is_binary else [int(lowest)] if lowest < 0 else []
        return [*found, IGNORE_INDEX] if every.dtype in (torch.int32, torch.int64) else found
    marks = [math.nan] if bool(every.isnan().any()) else []
    values, counts = every[every != 0][:: -(-every.numel() // _MOST_COUNTED)].unique(return_counts=True)
    if counts.numel() and int(counts.max()) > 1:
        marks.append(float(values[counts.argmax()]))  # a mark such as -1
    if float(every.max()) <= 0 and lowest < -1000:
        marks.append(float(lowest))  # a mask that is added to scores
    return list(dict.fromkeys(marks)) if every.any() else [1, -math.inf]


class _Runs:
    """Runs of a workload's model without dropout, in float32."""

    def __init__(self, workload: ModelWorkload, device: torch.device) -> None:
        self.workload = workload
        self._device = device
        self._without_chance: Callable[[nn.Module], None] = _stop_dropout
        self._is_known = False

    def first(self, batch: Mapping[str, Tensor]) -> _Found | None:
        """Runs a batch in the first way in which it draws no random numbers, which later runs then use.

        A model in evaluation mode may be another one: without auxiliary outputs, or with other code.

        Returns:
            What it computes; None if the step draws random numbers in any way.

        Raises:
            Exception: The step fails in any way.
        """
        if self._is_known:
            return self.step(batch)
        errors = []
        ways = (_stop_dropout, _evaluate)
        for self._without_chance in ways:
            try:
                found, other = (self.step(batch, other_seed=other_seed) for other_seed in (0, 1))
            except Exception as error:
                errors.append(error)
                continue
            if found.is_close(other):
                self._is_known = True
                return found
        if len(errors) == len(ways):
            raise errors[0]
        return None

    def step(self, batch: Mapping[str, Tensor], *, other_seed: int = 0) -> _Found:
        """Returns the loss and all gradients. Batch norms see the padding as in training."""
        model = self.workload.build_model().to(self._device).float()
        self._without_chance(model)
        with full_precision(), seeded(self.workload.seed + other_seed):
            loss = model(**{name: tensor.to(self._device) for name, tensor in batch.items()})
            loss.backward()
        gradients = {name: weights.grad for name, weights in model.named_parameters() if weights.grad is not None}
        return _Found(float(loss.detach()), gradients)


def _stop_dropout(model: nn.Module) -> None:
    """Sets the rates of dropout and stochastic depth to 0, as far as modules or their configurations keep them as numbers."""
    for module in model.modules():
        holders: list[Any] = [module]
        if hasattr(config := vars(module).get("config"), "__dict__") and not isinstance(config, type):
            vars(module)["config"] = copy(config)  # other models may share it
            holders.append(vars(module)["config"])
        for holder in holders:
            rates = vars(holder)
            for name, value in list(rates.items()):
                if isinstance(value, float) and ("drop" in name or isinstance(holder, _DropoutNd)):
                    rates[name] = 0.0


def _evaluate(model: nn.Module) -> None:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    model.eval()
    for norm in norms:
        norm.train()


def _norm(gradients: Iterable[Tensor]) -> float:
    dense = (gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients)
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in dense))
