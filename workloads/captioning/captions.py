"""Synthetic captions: token ids whose lengths follow the source's distribution.

Source: "Maximizing AI/ML Model Performance with PyTorch Compilation": 90 % short (5-31 tokens), 9 % medium (33-63), 1 % long
(65-255), each followed by the end token; mean useful length 23.1.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PAD, START, END = 0, 1, 2
FIRST_WORD = 3
"""Ids below are the special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Weights and inclusive ranges of caption lengths, in tokens without the end token."""

    weights: tuple[float, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def mean(self) -> float:
        """Mean length in tokens, end token included."""
        return 1 + sum(w * (low + high) / 2 for w, (low, high) in zip(self.weights, self.ranges, strict=True))

    @property
    def max_length(self) -> int:
        """Longest caption in tokens, end token included."""
        return 1 + max(high for _, high in self.ranges)


SOURCE_LENGTHS = LengthDistribution(weights=(0.90, 0.09, 0.01), ranges=((5, 31), (33, 63), (65, 255)))
TINY_LENGTHS = LengthDistribution(weights=(0.90, 0.09, 0.01), ranges=((1, 7), (8, 15), (16, 63)))
"""The source's shape at a quarter of the length."""


def draw_captions(lengths: LengthDistribution, vocabulary: int, count: int, seed: str) -> list[list[int]]:
    """`count` captions of random words, each ended by `END`; equal seeds give equal captions."""
    source = random.Random(seed)
    captions = []
    for low, high in source.choices(lengths.ranges, weights=lengths.weights, k=count):
        words = [source.randrange(FIRST_WORD, vocabulary) for _ in range(source.randint(low, high))]
        captions.append([*words, END])
    return captions
