"""Synthetic captions: token ids whose lengths follow the source's distribution.

Source: "Maximizing AI/ML Model Performance with PyTorch Compilation": 90% short (5-31 tokens), 9% medium (33-63), 1% long
(65-255), each followed by the end token; mean useful length 23.1.
"""

import random
from dataclasses import dataclass

PAD, START, END = 0, 1, 2
FIRST_WORD = 3  # smaller ids are the special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Weights and inclusive ranges of caption lengths, in tokens without the end token."""

    weights: tuple[float, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def mean(self) -> float:
        """Mean length in tokens, including the end token."""
        return 1 + sum(w * (low + high) / 2 for w, (low, high) in zip(self.weights, self.ranges, strict=True))

    @property
    def max_length(self) -> int:
        """Maximum length in tokens, including the end token."""
        return 1 + max(high for _, high in self.ranges)


SOURCE_LENGTHS = LengthDistribution(weights=(0.90, 0.09, 0.01), ranges=((5, 31), (33, 63), (65, 255)))
TINY_LENGTHS = LengthDistribution(weights=(0.90, 0.09, 0.01), ranges=((1, 7), (8, 15), (16, 63)))
"""The shape of the source's distribution at a quarter of the length."""


def draw_captions(lengths: LengthDistribution, vocabulary: int, count: int, seed: str) -> list[list[int]]:
    """Returns `count` captions of random words in random order, each ended by `END`; equal seeds give equal captions."""
    source = random.Random(seed)
    return [
        [*(source.randrange(FIRST_WORD, vocabulary) for _ in range(length - 1)), END]
        for length in draw_lengths(lengths, count, seed)
    ]


def draw_lengths(lengths: LengthDistribution, count: int, seed: str) -> list[int]:
    """Returns lengths of `count` captions in tokens, including the end token, in random order.

    Each range gets its exact share (up to rounding), with evenly spread lengths, so that a few thousand captions represent
    the distribution. With independent draws, the number of long ones, and so every figure, would depend on the seed.
    """
    shares = [round(sum(lengths.weights[: i + 1]) * count) for i in range(len(lengths.weights))]
    drawn = []
    for (low, high), begin, end in zip(lengths.ranges, [0, *shares], shares, strict=False):
        drawn += [1 + low + int((i + 0.5) / (end - begin) * (high - low + 1)) for i in range(end - begin)]
    random.Random(f"lengths of {seed}").shuffle(drawn)
    return drawn
