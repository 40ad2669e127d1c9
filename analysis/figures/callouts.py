"""Text labels next to points, as plotly annotations that overlap neither each other nor the drawing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from analysis.figures.chart_style import LINE_COLOR
from analysis.figures.label_layout import Box, Label, place_labels

_FONT_PX, _CHAR_PX, _LINE_PX = 12, 6.9, 16.0
_MARKER_PX = 9.0
_EDGE_PX = 4.0


class Axes(NamedTuple):
    """Converts numbers to positions on the screen."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    """Ends of the axes in their own numbers; a logarithmic axis counts in decades."""
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
    obstacles = [_around(*axes.pixel(*marker)) for marker in markers]
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


def _around(x: float, y: float) -> Box:
    return Box(x - _MARKER_PX, y - _MARKER_PX, x + _MARKER_PX, y + _MARKER_PX)


def _step_boxes(corners: Sequence[tuple[float, float]], axes: Axes) -> list[Box]:
    """Returns the line's horizontal and vertical parts as thin rectangles; it comes from below and leaves to the right."""
    boxes = []
    y_before = axes.height_px
    for index, (x, y) in enumerate(corners):
        x_next = corners[index + 1][0] if index + 1 < len(corners) else axes.width_px
        boxes += [Box(x - 2, y, x + 2, y_before), Box(x, y - 2, x_next, y + 2)]
        y_before = y
    return boxes
