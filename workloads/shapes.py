"""Shape policies: to which sequence length the samples of a batch are padded. Pure values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class ShapePolicy(Protocol):
    """Maps a batch's longest sequence to the length its tensors get."""

    def padded(self, longest: int) -> int:
        """Tokens each row is padded to, when the batch's longest row has `longest` tokens."""
        ...

    def lengths(self) -> tuple[int, ...]:
        """Every length, in tokens and ascending, that the policy can produce."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToMax:
    """Every batch has one length."""

    max_length: int

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return self.max_length

    def lengths(self) -> tuple[int, ...]:
        return (self.max_length,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToLongest:
    """The batch's longest row, rounded up to a multiple; at most `max_length`."""

    max_length: int
    multiple: int = 1

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.max_length)
        return min(self.max_length, _round_up(longest, self.multiple))

    def lengths(self) -> tuple[int, ...]:
        below = range(self.multiple, self.max_length, self.multiple)
        return (*below, self.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToBuckets:
    """The smallest of a few fixed lengths that holds the batch's longest row."""

    buckets: tuple[int, ...]

    def padded(self, longest: int) -> int:
        _check_fits(longest, self.buckets[-1])
        return next(bucket for bucket in self.buckets if bucket >= longest)

    def lengths(self) -> tuple[int, ...]:
        return self.buckets


def uniform_buckets(max_length: int, bucket_size: int) -> tuple[int, ...]:
    """Multiples of `bucket_size` up to `max_length`, which is always the last, in tokens."""
    return (*range(bucket_size, max_length, bucket_size), max_length)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check_fits(longest: int, max_length: int) -> None:
    if longest > max_length:
        raise ValueError(f"a row of {longest} tokens does not fit the maximum of {max_length}")
