"""How fast searchers reach the front: the missing hypervolume against the cost, one line per searcher."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from analysis.figures.chart_style import INK, LINE_COLOR, base_layout, empty_note

SEARCHER_COLORS = {
    "grid": "#767676",
    "random": "#8a6d3b",
    "tpe": "#0072B2",
    "nsga2": "#C48600",
    "gp": "#009E73",
    "gain": "#D55E00",
}
"""Colors by the searcher's name. Okabe and Ito's palette, with its light colors darkened for 3:1 contrast on white."""

SEARCHER_DASHES = {"grid": "dot", "random": "dash", "tpe": "longdash", "nsga2": "dashdot", "gp": "longdashdot", "gain": "solid"}
"""Distinguish lines without colors."""

_POINTS = 121
_LEAST_PERCENT = 0.1  # lower end of the logarithmic axis, where zero regret is drawn

_TICKS_PERCENT = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

Curve = Sequence[tuple[float, float]]
"""One search: (fraction of the grid's cost, fraction of its hypervolume) after each trial, ascending."""


class RegretLine(NamedTuple):
    """One searcher; regrets in percent of the whole table's hypervolume, at each of the info's costs."""

    searcher: str
    median: list[float]
    lower: list[float]
    upper: list[float]  # quartiles over seeds


class RegretInfo(NamedTuple):
    """Contents of the chart."""

    title: str
    cost: list[float]  # cost in percent of trying the whole table
    lines: list[RegretLine]
    goal_percent: float  # the regret to stay below


def regret_info(curves: Mapping[str, Sequence[Curve]], *, title: str = "", goal: float = 0.98, until: float = 1.0) -> RegretInfo:
    """Computes what to show of several searchers' searches on one table.

    Args:
        curves: By searcher, one non-empty curve per seed.
        title: Plain text.
        goal: Fraction of the hypervolume to reach.
        until: Fraction of the grid's cost at which the chart ends.
    """
    shares = np.linspace(0.0, until, _POINTS)
    lines = []
    for searcher, searches in curves.items():
        regrets = 100 * (1 - np.array([_volumes(curve, shares) for curve in searches]))
        lower, median, upper = np.quantile(regrets, [0.25, 0.5, 0.75], axis=0)
        lines.append(RegretLine(searcher, median.tolist(), lower.tolist(), upper.tolist()))
    return RegretInfo(title, (100 * shares).tolist(), lines, 100 * (1 - goal))


def regret_figure(info: RegretInfo) -> go.Figure:
    """Draws cost to the right, regret upwards on a logarithmic axis, and a band between quartiles for the best and for random."""
    chart = go.Figure(layout=base_layout(info.title or None))
    chart.update_xaxes(title_text="GPU-seconds spent (% of trying everything)", range=[0, info.cost[-1] if info.cost else 100])
    chart.update_yaxes(
        title_text="hypervolume still missing (%, median)",
        type="log",
        range=[np.log10(_LEAST_PERCENT), 2],
        tickvals=_TICKS_PERCENT,
    )
    if not info.lines:
        chart.add_annotation(empty_note("No search was replayed."))
        return chart
    for line in info.lines:
        color, dash = SEARCHER_COLORS.get(line.searcher, INK), SEARCHER_DASHES.get(line.searcher, "solid")
        if line.searcher in ("gain", "random"):
            band = [*_floored(line.upper), *reversed(_floored(line.lower))]
            chart.add_trace(
                go.Scatter(
                    x=[*info.cost, *reversed(info.cost)],
                    y=band,
                    fill="toself",
                    fillcolor=color,
                    opacity=0.15,
                    line={"width": 0},
                    mode="lines",
                    hoverinfo="skip",
                    showlegend=False,
                    legendgroup=line.searcher,
                )
            )
        chart.add_trace(
            go.Scatter(
                x=info.cost,
                y=_floored(line.median),
                mode="lines",
                name=line.searcher,
                legendgroup=line.searcher,
                line={"color": color, "width": 3 if line.searcher == "gain" else 2, "dash": dash},
                hovertemplate="%{y:.1f} % missing after %{x:.0f} % of the cost<extra>" + line.searcher + "</extra>",
            )
        )
    goal = f"{100 - info.goal_percent:.0f} % of the hypervolume"
    chart.add_hline(y=info.goal_percent, line={"color": LINE_COLOR, "width": 1, "dash": "dot"}, annotation_text=goal)
    chart.update_layout(legend={"title": {"text": "searcher&nbsp;&nbsp;"}})
    return chart


def _volumes(curve: Curve, shares: np.ndarray) -> list[float]:
    """Returns the hypervolume reached at each fraction of the cost; a search that ended keeps its last value."""
    spent = np.array([cost for cost, _ in curve])
    reached = np.maximum.accumulate(np.array([0.0, *(volume for _, volume in curve)]))
    return [float(reached[int(np.searchsorted(spent, share, side="right"))]) for share in shares]


def _floored(regrets: Sequence[float]) -> list[float]:
    return [max(regret, _LEAST_PERCENT) for regret in regrets]
