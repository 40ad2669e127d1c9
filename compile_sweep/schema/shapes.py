"""Shape policies: which samples share a batch, and what length a batch is padded to. Pure values, no torch."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapePolicy(ABC):
    """Groups samples into batches, and maps a batch's longest row to the length of its tensors."""

    window: int = 1
    """Batches. Rows of similar length within a window of this many batches are batched together. 1 keeps the rows' order."""

    def batches(self, row_lengths: Sequence[int], batch_size: int) -> list[list[int]]:
        """Returns the row indices of each batch, given every row's length in tokens; leftover rows are dropped."""
        return group_by_length(row_lengths, batch_size, self.window)

    @abstractmethod
    def padded(self, longest: int) -> int:
        """Returns the tokens each row is padded to in a batch whose longest row has `longest` tokens."""

    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Returns every length, in tokens and ascending, that a batch can be padded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToMax(ShapePolicy):
    """Pads every batch to one length."""

    max_length: int

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return self.max_length

    def lengths(self) -> tuple[int, ...]:
        return (self.max_length,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToLongest(ShapePolicy):
    """Pads to the batch's longest row, at least `shortest` tokens, rounded up to a multiple, and at most `max_length`."""

    max_length: int
    multiple: int = 1
    shortest: int = 1
    min_length: int = 1
    """Tokens. The longest row of every batch has at least this many."""

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return min(self.max_length, _round_up(max(longest, self.shortest), self.multiple))

    def lengths(self) -> tuple[int, ...]:
        below = range(_round_up(max(self.shortest, self.min_length), self.multiple), self.max_length, self.multiple)
        return (*below, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToBuckets(ShapePolicy):
    """Pads to the smallest of a few fixed lengths that holds the batch's longest row."""

    buckets: tuple[int, ...]
    min_length: int = 1
    """Tokens. The longest row of every batch has at least this many."""

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.buckets[-1])
        return next(bucket for bucket in self.buckets if bucket >= longest)

    def lengths(self) -> tuple[int, ...]:
        return tuple(bucket for bucket in self.buckets if bucket >= self.min_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsTheyCome(ShapePolicy):
    """Pads nothing."""

    known: tuple[int, ...]  # lengths of real batches, in tokens and ascending: no other is warmed up

    def padded(self, longest: int) -> int:
        return longest

    def lengths(self) -> tuple[int, ...]:
        return self.known


def make_policy(
    max_length: int,
    *,
    multiple: int | None,
    buckets: tuple[int, ...] | int | None,
    shortest: int = 1,
    min_length: int = 1,
    window: int | None = None,
) -> ShapePolicy:
    """Builds the policy for sequences of at most `max_length` tokens.

    Args:
        max_length: Tokens; the padded length if neither `multiple` nor `buckets` is given.
        multiple: Pad to the longest row, rounded up to a multiple of this many tokens.
        buckets: Pad to these lengths, or to the multiples of this length.
        shortest: Tokens; with `multiple`, the smallest padded length.
        min_length: Tokens in the shortest batch; padded lengths that only shorter batches would use are left out.
        window: Batches within which rows of similar length are batched together.
    """
    if buckets is not None:
        chosen = uniform_buckets(max_length, buckets) if isinstance(buckets, int) else buckets
        return PadToBuckets(buckets=chosen, min_length=min_length, window=window or 1)
    if multiple is not None:
        floors = {"shortest": shortest, "min_length": min_length}
        return PadToLongest(max_length=max_length, multiple=multiple, **floors, window=window or 1)
    return PadToMax(max_length=max_length, window=window or 1)


def group_by_length(row_lengths: Sequence[int], batch_size: int, window: int) -> list[list[int]]:
    """Groups rows of similar length into batches, within windows of `window` batches.

    The batches of a window come in random order, the same in every call, so that training does not go from short to long.

    Args:
        row_lengths: Tokens of each row.
        batch_size: Rows in a batch; leftover rows at the end are dropped.
        window: Batches in a window; 1 keeps the rows' order.

    Returns:
        The row indices of each batch.
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
    """Returns the multiples of `bucket_size` below `max_length`, and `max_length` itself, in tokens."""
    return (*range(bucket_size, max_length, bucket_size), max_length)


def optimal_buckets(batches: Mapping[int, int], count: int, max_length: int, multiple: int = 8) -> tuple[int, ...]:
    """Finds at most `count` lengths that leave batches with the fewest tokens after padding; the last is always `max_length`.

    Dynamic programming over the sorted lengths: the best `k` buckets that hold every batch up to some length are the best
    `k - 1` up to a shorter one and one bucket more. Quadratic in the number of different lengths, linear in `count`.

    Args:
        batches: Number of batches by the length of their longest row, in tokens.
        count: Most buckets to use.
        max_length: Longest possible sequence, in tokens.
        multiple: Buckets are multiples of this, except for `max_length`.
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
