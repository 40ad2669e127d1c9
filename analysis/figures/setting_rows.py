"""Charts with a row per setting: its name, and below it the drawing."""

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.choose.pareto import pareto_front, standing
from analysis.figures.chart_style import base_layout, empty_figure
from compile_sweep.schema.outcome import Status

ROW_PX = 46  # height of a row with its name and drawing
BAR = 0.42  # fraction of a row's height for the drawing
_LEGEND_PX, _AXIS_PX = 40, 64
_NO_BREAK = "\u00a0"


class RowName(NamedTuple):
    """Text above a row. Text is unescaped, as in the record."""

    setting_name: str
    figure: str
    on_front: bool


def notable(df: pd.DataFrame) -> pd.DataFrame:
    """Returns the usable trials that count, with a column `on_front`: the front's first, then the fastest."""
    front = pareto_front(df).index
    counted = standing(df)
    usable = counted[counted["status"] == Status.OK].sort_values("samples_per_s", ascending=False, kind="stable")
    marked = usable.assign(on_front=usable.index.isin(front))
    return marked.sort_values("on_front", ascending=False, kind="stable")


def rows_figure(rows: Sequence[RowName], *, x_title: str, nothing: str, has_legend: bool = True) -> go.Figure:
    """Returns an empty chart with these rows, the first on top; a row's index is its y, 0 on top.

    The names are in the plot, not next to it, so that they fit on a phone, too. Their annotations are in the
    rows' order. The height depends on the number of rows.
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
    """Joins lines in plotly's markup; text from records is escaped."""
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _name(place: int, row: RowName) -> dict[str, Any]:
    words = html.escape(f"{'★ ' if row.on_front else ''}{row.setting_name}", quote=False)
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
