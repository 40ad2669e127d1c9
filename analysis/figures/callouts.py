"""Text labels next to points, as plotly annotations that overlap neither each other nor the drawing."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from analysis.figures.chart_style import LINE_COLOR

Boxes = npt.NDArray[np.float64]  # rectangles, one per row, with the columns left, top, right and bottom


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float


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
    """Returns where each label's center goes, as an offset (dx, dy) from its point.

    Each label in turn takes the candidate position with the least overlap and, among those, the nearest to its point;
    a few rounds let earlier labels make way for later ones. Deterministic.

    Args:
        labels: The labels, the most important first.

    Returns:
        An offset in pixels for each label, in order.
    """
    if not labels:
        return []
    fixed = _boxes(obstacles)
    bounds = _boxes([area])
    offsets = [_candidates(label) for label in labels]
    tried = [_around(label, candidates) for label, candidates in zip(labels, offsets, strict=True)]
    alone = [  # the part of a candidate's cost that does not depend on the other labels
        4 * _covered(boxes, fixed) + _strays(boxes, bounds) + _distance(candidates, label)
        for label, boxes, candidates in zip(labels, tried, offsets, strict=True)
    ]
    chosen: dict[int, int] = {}
    for _ in range(_ROUNDS):
        for index, boxes in enumerate(tried):
            others = [tried[other][place] for other, place in chosen.items() if other != index]
            cost = alone[index] + (20 * _covered(boxes, np.array(others)) if others else 0.0)
            chosen[index] = int(np.argmin(cost))
    return [(float(dx), float(dy)) for dx, dy in (offsets[index][chosen[index]] for index in range(len(labels)))]


def _boxes(boxes: Sequence[Box]) -> Boxes:
    return np.array(boxes, dtype=np.float64).reshape(-1, 4)


def _candidates(label: Label) -> npt.NDArray[np.float64]:
    """Returns offsets around the point, one per row; the distance is that of the label's edge, not its center."""
    angles = [2 * math.pi * step / _NUM_DIRECTIONS for step in range(_NUM_DIRECTIONS)]
    return np.array(
        [
            (
                math.cos(angle) * (_MARKER_RADIUS_PX + distance + label.width / 2),
                -math.sin(angle) * (_MARKER_RADIUS_PX + distance + label.height / 2),
            )
            for distance in _DISTANCES_PX
            for angle in angles
        ]
    )


def _around(label: Label, offsets: npt.NDArray[np.float64]) -> Boxes:
    half = np.array([label.width / 2, label.height / 2])
    centres = offsets + np.array([label.x, label.y])
    return np.hstack([centres - half, centres + half])


def _covered(boxes: Boxes, others: Boxes) -> npt.NDArray[np.float64]:
    """Returns the area of each box that `others` cover, in square pixels, counting overlaps twice."""
    wide = np.minimum(boxes[:, None, 2], others[None, :, 2]) - np.maximum(boxes[:, None, 0], others[None, :, 0])
    high = np.minimum(boxes[:, None, 3], others[None, :, 3]) - np.maximum(boxes[:, None, 1], others[None, :, 1])
    return np.asarray((np.clip(wide, 0, None) * np.clip(high, 0, None)).sum(axis=1))


def _strays(boxes: Boxes, bounds: Boxes) -> npt.NDArray[np.float64]:
    """Returns the cost of each box's part outside the bounds."""
    return 40 * ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) - _covered(boxes, bounds))


def _distance(offsets: npt.NDArray[np.float64], label: Label) -> npt.NDArray[np.float64]:
    """Returns the cost of each offset's gap to the point; slightly lower above the point, which reads better."""
    gap_x = np.clip(np.abs(offsets[:, 0]) - label.width / 2, 0, None)
    gap_y = np.clip(np.abs(offsets[:, 1]) - label.height / 2, 0, None)
    return np.asarray(np.hypot(gap_x, gap_y) + np.where(offsets[:, 1] > 0, 2.0, 0.0))


_FONT_PX, _CHAR_PX, _LINE_PX = 12, 6.9, 16.0
_MARKER_PX = 9.0
_EDGE_PX = 4.0


class Axes(NamedTuple):
    """Converts numbers to positions on the screen."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]  # ends of the axes in their own numbers; a logarithmic axis counts in decades
    width_px: float
    height_px: float

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        """Returns pixels from the plot's top left corner."""
        right = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        up = (y - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return right * self.width_px, (1 - up) * self.height_px


class Callout(NamedTuple):
    """Lines of plotly markup that belong to the point (x, y), in the axes' numbers."""

    name: str
    x: float
    y: float
    lines: list[str]


def callout_annotations(
    callouts: Sequence[Callout],
    markers: Sequence[tuple[float, float]],
    steps: Sequence[tuple[float, float]],
    axes: Axes,
    bars: Sequence[tuple[float, float, float]] = (),
) -> list[dict[str, Any]]:
    """Returns an annotation for each callout, the most important first, with a thin line to its point."""
    labels = [
        Label(*axes.pixel(c.x, c.y), max(map(len, c.lines), default=0) * _CHAR_PX + 6, len(c.lines) * _LINE_PX + 4)
        for c in callouts
    ]
    pixels = [axes.pixel(*marker) for marker in markers]
    obstacles = [Box(x - _MARKER_PX, y - _MARKER_PX, x + _MARKER_PX, y + _MARKER_PX) for x, y in pixels]
    obstacles += _step_boxes([axes.pixel(*corner) for corner in steps], axes)
    ends = [(axes.pixel(x, low), axes.pixel(x, high)) for x, low, high in bars]
    obstacles += [Box(at - 3, high, at + 3, low) for (at, low), (_, high) in ends]
    area = Box(_EDGE_PX, _EDGE_PX, axes.width_px - _EDGE_PX, axes.height_px - _EDGE_PX)
    offsets = place_labels(labels, obstacles, area)
    return [_annotation(callout, *offset) for callout, offset in zip(callouts, offsets, strict=True)]


def _annotation(callout: Callout, dx: float, dy: float) -> dict[str, Any]:
    return {
        "name": callout.name,
        "text": "<br>".join(callout.lines),
        "x": callout.x,
        "y": callout.y,
        "ax": round(dx, 1),
        "ay": round(dy, 1),
        "xanchor": "center",
        "yanchor": "middle",
        "showarrow": True,
        "arrowhead": 0,
        "arrowwidth": 1,
        "arrowcolor": LINE_COLOR,
        "standoff": _MARKER_PX,
        "font": {"size": _FONT_PX},
    }


def _step_boxes(corners: Sequence[tuple[float, float]], axes: Axes) -> list[Box]:
    """Returns the line's horizontal and vertical parts as thin rectangles; it comes from below and leaves to the right."""
    boxes = []
    y_before = axes.height_px
    for index, (x, y) in enumerate(corners):
        x_next = corners[index + 1][0] if index + 1 < len(corners) else axes.width_px
        boxes += [Box(x - 2, y, x + 2, y_before), Box(x, y - 2, x_next, y + 2)]
        y_before = y
    return boxes
