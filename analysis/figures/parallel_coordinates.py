"""Every setting as a line through its choices and its results."""

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.choose.pareto import expected_compile_s
from analysis.figures.chart_style import SCOPE_COLORS, base_layout, empty_figure, or_trials
from analysis.figures.setting_rows import notable, row_hover
from analysis.formatting import figure, gib, or_estimate, text
from compile_sweep.schema.setting_text import format_value
from compile_sweep.schema.settings import CompileSettings, Scope

_MOST_LINES = 80
_MOST_CHOICES = 12  # maximum number of values of a field for its axis to be readable
_CHOICES = tuple(
    name
    for name in CompileSettings.__dataclass_fields__
    if name not in ("parts", "options", "buckets", "dynamic_min", "dynamic_max", "workload")
)
_OUTCOMES = {"compile_s": "compile s", "peak_memory_bytes": "peak GiB", "samples_per_s": "samples/s"}
"""Columns of results and their axis titles; the compile time's axis is logarithmic."""
_NONE, _USUAL = "none", "usual"
"""Labels of a field and of a workload's option that are not set, which no filter can name."""
_HEIGHT_PX = 460
_LONGEST_TITLE = 10
"""Maximum length of a title on one line; a longer one has a line per word, so that neighbors do not overlap."""
_AXIS_PX = 84  # width that an axis with its labels needs; on a narrower page the chart scrolls


class Axis(NamedTuple):
    """A vertical axis. Text is unescaped, as in the record."""

    column: str
    title: str
    ticks: list[tuple[float, str]]  # position on the axis, from 0 at the bottom to 1 at the top, and its label
    is_choice: bool


class Line(NamedTuple):
    """One setting. Text is unescaped, as in the record."""

    setting_name: str
    settings_key: str
    scope: Scope
    places: list[float]  # position on each axis, from 0 at the bottom to 1 at the top
    figures: str
    on_front: bool


class ParallelInfo(NamedTuple):
    """Contents of the chart."""

    axes: list[Axis]
    lines: list[Line]
    """Lines, the least important first, so that the others are drawn over them."""
    num_left_out: int


def parallel_info(df: pd.DataFrame) -> ParallelInfo:
    """Chooses what to show of the trials that `load` returned: usable ones, the front's first, then the fastest.

    There is an axis for each field in which the settings differ, and one for each figure that all of them have; a warm
    trial's compile time is its estimate of the cold one.
    """
    trials = notable(df).dropna(subset="samples_per_s")
    shown = trials.head(_MOST_LINES)
    outcomes = shown.assign(compile_s=expected_compile_s(shown))
    axes, places = [], []
    choices = {name: [_spelled(value) for value in shown[name]] for name in _CHOICES} | _options(shown)
    for name, values in choices.items():
        kinds = _ordered(set(values))
        if 1 < len(kinds) <= _MOST_CHOICES:
            at = {kind: place / (len(kinds) - 1) for place, kind in enumerate(kinds)}
            title = name.removeprefix("workload.").replace("_", " ")
            axes.append(Axis(name, title, [(at[kind], kind) for kind in kinds], is_choice=True))
            places.append([at[value] for value in values])
    for name, title in _OUTCOMES.items():
        if len(shown) > 1 and outcomes[name].notna().all():
            ticks, found = _scaled(name, [float(value) for value in outcomes[name]])
            axes.append(Axis(name, title, ticks, is_choice=False))
            places.append(found)
    lines = [
        Line(
            setting_name=str(row["setting_name"]),
            settings_key=str(row["settings_key"]),
            scope=Scope(row["scope"]),
            places=[column[position] for column in places],
            figures=", ".join(
                [
                    figure(row["samples_per_s"], "samples/s"),
                    f"{or_estimate(row['compile_s'], row['cold_equivalent_s'], lambda seconds: figure(seconds, 's'))} compile",
                    gib(row["peak_memory_bytes"]),
                ]
            ),
            on_front=bool(row["on_front"]),
        )
        for position, (_, row) in enumerate(shown.iterrows())
    ]
    return ParallelInfo(axes, lines[::-1], len(trials) - len(shown))


@or_trials(parallel_info)
def parallel_figure(info: ParallelInfo) -> go.Figure:
    """Draws a vertical axis per field and figure and a line per setting, colored by scope; the front's lines are thicker.

    Each line's `meta` is its `settings_key`. A choice's annotation is named `FIELD=VALUE`, for a page that filters by it.
    """
    if len(info.axes) < 2 or len(info.lines) < 2:
        return empty_figure("There are no two settings to compare.")
    chart = go.Figure(layout=base_layout())
    chart.update_layout(
        meta={"kind": "parallel", "min_width": _AXIS_PX * len(info.axes)},
        height=_HEIGHT_PX,
        margin={"l": 70, "r": 70, "t": 70, "b": 24},
        showlegend=False,
        annotations=[note for place, axis in enumerate(info.axes) for note in _labels(place, axis)],
        shapes=[
            {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "line": {"color": "rgba(128,128,128,0.6)", "width": 1}}
            for place in range(len(info.axes))
        ],
    )
    chart.update_xaxes(visible=False, range=[-0.15, len(info.axes) - 0.85])
    chart.update_yaxes(visible=False, range=[-0.06, 1.04])
    chart.add_traces([_trace(line) for line in info.lines])
    return chart


def _trace(line: Line) -> go.Scatter:
    return go.Scatter(
        x=list(range(len(line.places))),
        y=line.places,
        mode="lines+markers",
        line={"color": SCOPE_COLORS[line.scope], "width": 3 if line.on_front else 1.4},
        marker={"color": SCOPE_COLORS[line.scope], "size": 7 if line.on_front else 4},
        opacity=1.0 if line.on_front else 0.55,
        meta=line.settings_key,
        hovertext=row_hover([f"{'★ ' if line.on_front else ''}{line.setting_name}", line.figures]),
        hoverinfo="text",
        hoverlabel={"bordercolor": SCOPE_COLORS[line.scope]},
    )


def _labels(place: int, axis: Axis) -> list[dict[str, Any]]:
    plain = {"x": place, "showarrow": False, "font": {"size": 12}}
    words = [axis.title] if len(axis.title) <= _LONGEST_TITLE else axis.title.split()
    written = "<br>".join(html.escape(word, quote=False) for word in words)
    title = plain | {"y": 1.0, "yshift": 24, "yanchor": "bottom", "text": f"<b>{written}</b>"}
    ticks = [
        plain
        | {
            "y": at,
            "yshift": 11,
            "text": html.escape(words, quote=False),
            "name": f"{axis.column}={words}" if axis.is_choice and words not in (_NONE, _USUAL) else "",
            "captureevents": axis.is_choice and words not in (_NONE, _USUAL),
        }
        for at, words in axis.ticks
    ]
    return [title, *ticks]


def _options(trials: pd.DataFrame) -> dict[str, list[str]]:
    """Returns the values of the workload's options that any setting has, by full name."""
    each = [dict(CompileSettings.parse(str(key)).workload or ()) for key in trials["settings_key"]]
    names = dict.fromkeys(name for options in each for name in options)
    return {f"workload.{name}": [format_value(one[name]) if name in one else _USUAL for one in each] for name in names}


def _spelled(value: object) -> str:
    """Returns the value as a setting's key spells it; an unset value has a word of its own."""
    if isinstance(value, bool | np.bool_):
        return "on" if value else "off"
    return text(value) or _NONE


def _ordered(kinds: set[str]) -> list[str]:
    """Sorts numbers by size, then words; unset comes first."""
    return sorted(
        kinds,
        key=lambda kind: (kind not in (_NONE, _USUAL), not _is_number(kind), float(kind) if _is_number(kind) else 0.0, kind),
    )


def _is_number(words: str) -> bool:
    try:
        return math.isfinite(float(words))
    except ValueError:
        return False


def _scaled(name: str, values: Sequence[float]) -> tuple[list[tuple[float, str]], list[float]]:
    """Returns the ticks of a figure's axis, and each value's position on it."""
    units = [value / 2**30 for value in values] if name == "peak_memory_bytes" else list(values)
    is_logarithmic = name == "compile_s"
    drawn = [math.log10(max(value, 0.1)) for value in units] if is_logarithmic else units
    low, high = min(drawn), max(drawn)
    if high <= low:
        return [(0.5, figure(units[0]))], [0.5] * len(units)
    at = [low + (high - low) * step / 4 for step in range(5)]
    ticks = [((value - low) / (high - low), figure(10**value if is_logarithmic else value, digits=2)) for value in at]
    return ticks, [(value - low) / (high - low) for value in drawn]
