"""Charts with a row a setting: its name, and under it what is drawn of it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.choose.pareto import pareto_front, standing
from analysis.figures.chart_style import base_layout, empty_figure
from analysis.formatting import figure
from compile_sweep.schema.outcome import Status

ROW_PX = 46
"""Height of a row: its name, and under it what is drawn."""
BAR = 0.42
"""Share of a row that is drawn in."""
_LEGEND_PX, _AXIS_PX = 40, 64
_NO_BREAK = "\u00a0"


class RowName(NamedTuple):
    """What stands above a row. Text is as it stands in the record, not escaped."""

    settings_label: str
    figure: str
    """The row's main figure with its unit."""
    on_front: bool


def notable(df: pd.DataFrame) -> pd.DataFrame:
    """The usable trials that count with `on_front` beside their columns: the front's first, then the fastest.

    Args:
        df: trials as `load` returns them; of a setting's cold and warm one the cold one counts, as in `standing`.
    """
    front = pareto_front(df).index
    counted = standing(df)
    usable = counted[counted["status"] == Status.OK].sort_values("samples_per_s", ascending=False, kind="stable")
    marked = usable.assign(on_front=usable.index.isin(front))
    return marked.sort_values("on_front", ascending=False, kind="stable")


def rows_figure(rows: Sequence[RowName], *, x_title: str, nothing: str, has_legend: bool = True) -> go.Figure:
    """An empty chart with these rows, the first on top; a row's place is its y, 0 on top.

    The names stand in the plot, not beside it, so that they have room on a telephone too. Their annotations are in the
    rows' order. The height follows from the number of rows.

    Args:
        rows: their names.
        x_title: what the axis to the right says.
        nothing: what a chart without rows says.
        has_legend: whether room is left for one above the rows.
    """
    if not rows:
        return empty_figure(nothing)
    chart = go.Figure(layout=base_layout())
    above_px = _LEGEND_PX if has_legend else 6
    chart.update_layout(
        meta={"kind": "rows"},
        showlegend=has_legend,
        height=above_px + ROW_PX * len(rows) + _AXIS_PX,
        margin={"l": 14, "t": above_px, "b": _AXIS_PX},
        legend={"traceorder": "normal", "title": {"text": ""}, "y": 1.0},
        annotations=[_name(place, row) for place, row in enumerate(rows)],
    )
    chart.update_xaxes(title_text=x_title, rangemode="tozero")
    chart.update_yaxes(range=[len(rows) - 1 + 0.6 * BAR, -1 + 0.5 * BAR], visible=False)
    return chart


def row_hover(lines: Sequence[str]) -> str:
    """The lines as plotly's mark-up; what they hold of a record is escaped."""
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def seconds(value: float) -> str:
    """Seconds with two digits, as they stand in a bar."""
    return figure(value, "s", digits=2)


def _name(place: int, row: RowName) -> dict[str, Any]:
    words = html.escape(f"{'★ ' if row.on_front else ''}{row.settings_label}", quote=False)
    return {
        "text": f"{words}{_NO_BREAK}·{_NO_BREAK}<b>{row.figure.replace(' ', _NO_BREAK)}</b>",
        "x": 0,
        "xref": "x domain",
        "y": place - BAR / 2,
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "borderpad": 2,
        "font": {"size": 13},
    }
