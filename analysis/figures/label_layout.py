"""Places text labels beside points so that they cover neither each other nor the points. Pixels; y grows downwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area both cover, in square pixels."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return width * height if width > 0 and height > 0 else 0.0

    def outside(self, area: Box) -> float:
        """How much of this rectangle `area` does not cover, in square pixels."""
        return (self.right - self.left) * (self.bottom - self.top) - self.overlap(area)


class Label(NamedTuple):
    """A text of this size that belongs to the point (x, y)."""

    x: float
    y: float
    width: float
    height: float


_DISTANCES_PX = (4.0, 16.0, 30.0, 48.0, 70.0, 95.0, 125.0)
_NUM_DIRECTIONS = 16
_MARKER_RADIUS_PX = 9.0
_ROUNDS = 3


def place_labels(labels: Sequence[Label], obstacles: Sequence[Box], area: Box) -> list[tuple[float, float]]:
    """Where each label's centre goes, as an offset (dx, dy) from its point.

    Each label in turn takes the candidate that covers least of what is there, and among those the nearest to its point;
    a few rounds let earlier labels make way for later ones. Deterministic.

    Args:
        labels: what to place, the most important first.
        obstacles: what labels should not cover: markers, lines.
        area: what labels should stay inside.

    Returns:
        An offset in pixels for each label, in order.
    """
    placed: dict[int, tuple[float, float]] = {}
    for _ in range(_ROUNDS):
        for index, label in enumerate(labels):
            others = [_box(labels[other], offset) for other, offset in placed.items() if other != index]
            placed[index] = min(_candidates(label), key=lambda o: _cost(o, label, others, obstacles, area))
    return [placed[index] for index in range(len(labels))]


def _candidates(label: Label) -> list[tuple[float, float]]:
    """Offsets around the point; the label's edge, not its centre, keeps the distance."""
    offsets = []
    for distance in _DISTANCES_PX:
        for step in range(_NUM_DIRECTIONS):
            angle = 2 * math.pi * step / _NUM_DIRECTIONS
            reach = _MARKER_RADIUS_PX + distance
            offsets.append(
                (
                    math.cos(angle) * (reach + label.width / 2),
                    -math.sin(angle) * (reach + label.height / 2),
                )
            )
    return offsets


def _cost(offset: tuple[float, float], label: Label, others: Sequence[Box], obstacles: Sequence[Box], area: Box) -> float:
    box = _box(label, offset)
    covered = 20 * sum(box.overlap(other) for other in others) + 4 * sum(box.overlap(o) for o in obstacles)
    gap_x = max(0.0, abs(offset[0]) - label.width / 2)
    gap_y = max(0.0, abs(offset[1]) - label.height / 2)
    below = 2.0 if offset[1] > 0 else 0.0  # above reads better, all else equal
    return covered + 40 * box.outside(area) + math.hypot(gap_x, gap_y) + below


def _box(label: Label, offset: tuple[float, float]) -> Box:
    x, y = label.x + offset[0], label.y + offset[1]
    return Box(x - label.width / 2, y - label.height / 2, x + label.width / 2, y + label.height / 2)
