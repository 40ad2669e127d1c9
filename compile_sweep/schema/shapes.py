"""Shape policies: which samples share a batch, and to which sequence length a batch is padded. Pure values, no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class ShapePolicy(Protocol):
    """Puts samples into batches and maps a batch's longest sequence to the length its tensors get."""

    def batches(self, row_lengths: Sequence[int], batch_size: int) -> list[list[int]]:
        """For each batch the indices of its rows, given every row's length in tokens; rows that fill no batch are left out."""
        ...

    def padded(self, longest: int) -> int:
        """Tokens each row is padded to, when the batch's longest row has `longest` tokens."""
        ...

    def lengths(self) -> tuple[int, ...]:
        """Every length, in tokens and ascending, that batches can be padded to."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """What every policy can do beside padding."""

    window: int = 1
    """Batches; rows of like length within so many batches are batched together. 1 takes rows as they come."""

    def batches(self, row_lengths: Sequence[int], batch_size: int) -> list[list[int]]:
        return group_by_length(row_lengths, batch_size, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToMax(_Grouping):
    """Every batch has one length."""

    max_length: int

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return self.max_length

    def lengths(self) -> tuple[int, ...]:
        return (self.max_length,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToLongest(_Grouping):
    """The batch's longest row, at least `shortest` tokens and rounded up to a multiple; at most `max_length`."""

    max_length: int
    multiple: int = 1
    shortest: int = 1
    min_length: int = 1
    """Tokens; no batch's longest row has fewer."""

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return min(self.max_length, _round_up(max(longest, self.shortest), self.multiple))

    def lengths(self) -> tuple[int, ...]:
        below = range(_round_up(max(self.shortest, self.min_length), self.multiple), self.max_length, self.multiple)
        return (*below, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToBuckets(_Grouping):
    """The smallest of a few fixed lengths that holds the batch's longest row."""

    buckets: tuple[int, ...]
    min_length: int = 1
    """Tokens; no batch's longest row has fewer."""

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.buckets[-1])
        return next(bucket for bucket in self.buckets if bucket >= longest)

    def lengths(self) -> tuple[int, ...]:
        return tuple(bucket for bucket in self.buckets if bucket >= self.min_length)


def make_policy(
    max_length: int,
    *,
    multiple: int | None,
    buckets: tuple[int, ...] | int | None,
    shortest: int = 1,
    min_length: int = 1,
    window: int | None = None,
) -> ShapePolicy:
    """The policy for sequences of at most `max_length` tokens.

    Args:
        max_length: tokens; what batches are padded to if neither `multiple` nor `buckets` is given.
        multiple: pad to the longest row, rounded up to this many tokens.
        buckets: pad to these lengths, or to the multiples of this one.
        shortest: tokens below which no batch is padded, with `multiple`.
        min_length: tokens of the shortest batch there is; lengths that hold only shorter ones do not occur.
        window: batches within which rows of like length are batched together.
    """
    if buckets is not None:
        chosen = uniform_buckets(max_length, buckets) if isinstance(buckets, int) else buckets
        return PadToBuckets(buckets=chosen, min_length=min_length, window=window or 1)
    if multiple is not None:
        floors = {"shortest": shortest, "min_length": min_length}
        return PadToLongest(max_length=max_length, multiple=multiple, **floors, window=window or 1)
    return PadToMax(max_length=max_length, window=window or 1)


def group_by_length(row_lengths: Sequence[int], batch_size: int, window: int) -> list[list[int]]:
    """Indices of the rows of each batch; rows of like length share one, within windows of so many batches.

    The batches of a window come in random order, the same in every call, so that training does not go from short to long.

    Args:
        row_lengths: tokens of each row.
        batch_size: rows in a batch; rows that fill none at the end are left out.
        window: batches in a window; 1 keeps the rows' order.
    """
    order = list(range(len(row_lengths)))
    step = batch_size * window
    grouped = []
    for start in range(0, len(order), step):
        rows = order[start : start + step]
        if window > 1:
            rows.sort(key=lambda row: row_lengths[row])
        batches = [rows[at : at + batch_size] for at in range(0, len(rows) - batch_size + 1, batch_size)]
        if window > 1:
            random.Random(start).shuffle(batches)
        grouped += batches
    return grouped


def uniform_buckets(max_length: int, bucket_size: int) -> tuple[int, ...]:
    """Multiples of `bucket_size` up to `max_length`, which is always the last, in tokens."""
    return (*range(bucket_size, max_length, bucket_size), max_length)


def optimal_buckets(batches: Mapping[int, int], count: int, max_length: int, multiple: int = 8) -> tuple[int, ...]:
    """The lengths, at most `count`, for which batches have the fewest tokens after padding; `max_length` is always the last.

    Dynamic programming over the sorted lengths: the best `k` buckets that hold every batch up to some length are the best
    `k - 1` up to a shorter one and one bucket more. Quadratic in the number of different lengths, linear in `count`.

    Args:
        batches: how many batches have a longest row of so many tokens.
        count: buckets at most.
        max_length: longest sequence there can be, in tokens.
        multiple: buckets are multiples of this, but for `max_length`.
    """
    rounded: dict[int, int] = {max_length: 0}
    for longest, number in batches.items():
        length = min(max_length, _round_up(longest, multiple))
        rounded[length] = rounded.get(length, 0) + number
    lengths = sorted(rounded)
    before = [0]
    for length in lengths:
        before.append(before[-1] + rounded[length])
    # best[j]: fewest padded tokens of the batches up to lengths[j - 1], whose last bucket is that length; and the buckets
    best: list[tuple[int, tuple[int, ...]]] = [
        (before[j] * length, (length,)) if j else (0, ()) for j, length in enumerate([0, *lengths])
    ]
    for _ in range(count - 1):
        best = [
            min(
                [
                    best[j],
                    *(
                        (best[i][0] + (before[j] - before[i]) * lengths[j - 1], (*best[i][1], lengths[j - 1]))
                        for i in range(1, j)
                    ),
                ],
                key=lambda one: one[0],
            )
            for j in range(len(best))
        ]
    return best[-1][1]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_fits(longest: int, max_length: int) -> None:
    if longest > max_length:
        raise ValueError(f"a row of {longest} tokens does not fit the maximum of {max_length}")
