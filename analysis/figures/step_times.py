"""The distribution of step times: every timed step of a setting, with its quartiles."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.figures.chart_style import LINE_COLOR, SCOPE_COLORS, or_trials
from analysis.figures.setting_rows import BAR, RowName, notable, row_hover, rows_figure
from analysis.formatting import figure, interval, number, upper_end
from compile_sweep.schema.settings import Scope

_MOST_ROWS = 12
_MOST_POINTS = 160
"""Maximum number of steps drawn per setting; more are represented by evenly spaced quantiles including the extremes."""


class StepTimes(NamedTuple):
    """The timed steps of one setting, in milliseconds. Text is unescaped, as in the record."""

    trial_id: str
    setting_name: str
    scope: Scope
    on_front: bool
    median_ms: float
    median_ms_low: float | None
    median_ms_high: float | None
    """`median_ms` and the ends of its interval are the record's own figures: the mean over the batches of each one's median."""
    quartiles_ms: tuple[float, float, float]
    """Quartiles of all timed steps, over batches of all lengths."""
    whiskers_ms: tuple[float, float]
    """The 5th and the 95th percentile."""
    drawn_ms: list[float]
    """Steps that are drawn as points, ascending."""
    num_steps: int


class StepTimesInfo(NamedTuple):
    """Contents of the chart."""

    rows: list[StepTimes]
    """Ascending in median step."""
    num_left_out: int


def step_times_info(df: pd.DataFrame) -> StepTimesInfo:
    """Chooses what to show of the trials from `load`: usable ones with timed steps, the front's first, then the fastest."""
    trials = notable(df)
    timed = trials[trials["step_ms"].map(len) > 0].dropna(subset="step_ms_median")
    rows = [_row(row) for _, row in timed.head(_MOST_ROWS).iterrows()]
    return StepTimesInfo(sorted(rows, key=lambda row: row.median_ms), max(0, len(timed) - _MOST_ROWS))


@or_trials(step_times_info)
def step_times_figure(info: StepTimesInfo) -> go.Figure:
    """Draws milliseconds to the right, the fastest step on top; a box for the quartiles, a point per step."""
    names = [
        RowName(row.setting_name, f"{figure(row.median_ms, 'ms')}, {row.num_steps} steps", row.on_front) for row in info.rows
    ]
    chart = rows_figure(
        names, x_title="time of a step (milliseconds)", nothing="No usable trial holds its timed steps.", has_legend=False
    )
    for place, row in enumerate(info.rows):
        chart.add_traces([_points(place, row), _box(place, row)])
    return chart


def _row(trial: pd.Series) -> StepTimes:
    steps = np.sort(np.asarray(trial["step_ms"], dtype=np.float64))
    low, first, middle, third, high = (float(value) for value in np.quantile(steps, [0.05, 0.25, 0.5, 0.75, 0.95]))
    thinned = np.linspace(0, 1, min(len(steps), _MOST_POINTS))
    drawn = np.quantile(steps, thinned, method="nearest")
    return StepTimes(
        trial_id=str(trial["trial_id"]),
        setting_name=str(trial["setting_name"]),
        scope=Scope(trial["scope"]),
        on_front=bool(trial["on_front"]),
        median_ms=float(trial["step_ms_median"]),
        median_ms_low=number(trial["step_ms_median_low"]),
        median_ms_high=upper_end(trial["step_ms_median_high"]),
        quartiles_ms=(first, middle, third),
        whiskers_ms=(low, high),
        drawn_ms=[float(value) for value in drawn],
        num_steps=len(steps),
    )


def _points(place: int, row: StepTimes) -> go.Scatter:
    """Returns the steps as points, shifted vertically in turn so that equal ones form a cloud."""
    turns = np.arange(len(row.drawn_ms)) * 0.618 % 1 - 0.5  # multiples of the golden ratio spread evenly at any count
    return go.Scatter(
        x=row.drawn_ms,
        y=[place + 0.8 * BAR * float(turn) for turn in turns],
        mode="markers",
        marker={"color": SCOPE_COLORS[row.scope], "size": 4, "opacity": 0.45},
        hoverinfo="skip",
        showlegend=False,
    )


def _box(place: int, row: StepTimes) -> go.Box:
    first, middle, third = row.quartiles_ms
    between = interval(row.median_ms_low, row.median_ms_high)
    return go.Box(
        orientation="h",
        y=[place],
        width=0.7 * BAR,
        q1=[first],
        median=[middle],
        q3=[third],
        lowerfence=[row.whiskers_ms[0]],
        upperfence=[row.whiskers_ms[1]],
        boxpoints=False,
        line={"color": SCOPE_COLORS[row.scope], "width": 1.6},
        fillcolor="rgba(0,0,0,0)",
        showlegend=False,
        hovertext=row_hover(
            [
                row.setting_name,
                f"step {figure(row.median_ms, 'ms')}" + (f" (95%: {between})" if between else ""),
                f"half of the steps between {figure(first, 'ms')} and {figure(third, 'ms')}",
                f"nine in ten between {figure(row.whiskers_ms[0], 'ms')} and {figure(row.whiskers_ms[1], 'ms')}",
                f"quickest {figure(row.drawn_ms[0], 'ms')}, longest {figure(row.drawn_ms[-1], 'ms')}",
            ]
        ),
        hoverinfo="text",
        hoveron="boxes",
        hoverlabel={"bordercolor": LINE_COLOR},
    )
