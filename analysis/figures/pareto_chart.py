"""Throughput versus its price, with the Pareto front: the sweep's main chart."""

import html
import math
import textwrap
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from analysis.choose.uncertainty import chance
from analysis.figures.callouts import Axes, Callout, callout_annotations
from analysis.figures.chart_style import (
    HEIGHT_PX,
    LINE_COLOR,
    SCOPE_COLORS,
    SCOPE_SYMBOLS,
    WIDTH_PX,
    base_layout,
    empty_note,
    legend_entry,
    or_trials,
)
from analysis.figures.pareto_points import TICKS_S, ParetoInfo, ParetoPoint, pareto_info
from analysis.formatting import figure, gib, interval, number, text, times
from analysis.page.verdict import remarks
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import Scope

_MOST_NAMED = 10  # with more points on the front, their labels are only IDs, since names would cover the chart
_MOST_HOLLOW_NAMED = 8
_CROWD = 120  # with more points than this, those that are not on the front are smaller
_LONG = 1e7  # from here on, whole numbers at the axis would be cut by the margin, so they are written as 20M and 2G
_LABEL_CHARS = 30
_LABEL_MOST_CHARS = 40
"""Limit on a label's line length if a single word, such as an option's name, is longer than a line."""
_HOVER_CHARS = 54
_TIE_WIDTH_PX = 26


@or_trials(pareto_info)
def pareto_figure(info: ParetoInfo, *, title: str | None = None) -> go.Figure:
    """Draws the price to the right, the gain upwards with its 95% interval, and the front as steps.

    Color and symbol are the scope's. Trials that are not ok are hollow, and the best of them have labels. Broad gray lines
    connect trials that cannot be told apart. Prices below `info.floor` are drawn there, and their hover text says so. The
    front's labels are laid out for 1200 by 700 pixels; their annotations are named `front-A3`, … for a page with less space.
    """
    chart = go.Figure(layout=base_layout(title))
    chart.update_layout(meta={"kind": "front", "x": info.price.short_title, "y": info.gain.short_title})
    if not info.points:
        chart.update_layout(xaxis_visible=False, yaxis_visible=False)
        chart.add_annotation(empty_note(f"No trial has both {info.gain.short_title} and {info.price.choice} yet."))
        return chart
    axes = _axes(info, chart)
    if info.price.is_logarithmic:
        chart.update_xaxes(type="log", **_ticks(info))
    chart.update_xaxes(range=list(axes.x_range), title_text=info.price.title)
    chart.update_yaxes(range=list(axes.y_range), title_text=info.gain.title)
    if axes.y_range[1] >= _LONG:
        chart.update_yaxes(tickformat="~s")
    if info.ties:
        chart.add_trace(_tie_lines(info))
    if info.front:
        chart.add_trace(_front_line(info, axes))
    for scope in Scope:
        if points := [point for point in info.points if point.scope is scope]:
            is_crowd = len(info.points) > _CROWD
            chart.add_traces(
                [
                    legend_entry(str(scope), SCOPE_COLORS[scope], SCOPE_SYMBOLS[scope], group=str(scope)),
                    _markers(points, is_crowd, info),
                ]
            )
    if any(point.status is not Status.OK for point in info.points):
        chart.add_trace(legend_entry("not usable", LINE_COLOR, "circle-open"))
    chart.update_layout(annotations=_annotations(info, axes))
    return chart


def _axes(info: ParetoInfo, chart: go.Figure) -> Axes:
    """Returns the axes' ends in their own numbers, with margins for markers and labels."""
    xs = [_at(point, info)[0] for point in info.points]
    room = max(0.3, 0.12 * (max(xs) - min(xs))) if info.price.is_logarithmic else max(0.05 * max(xs), 0.12 * (max(xs) - min(xs)))
    lows = [point.y - point.below for point in info.points]
    highs = [point.y + point.above for point in info.points]
    spread = max(max(highs) - min(lows), 0.05 * max(highs), 1e-9)
    return Axes(
        x_range=(min(xs) - room, max(xs) + room),
        y_range=(max(0.0, min(lows) - 0.14 * spread), max(highs) + 0.14 * spread),
        width_px=WIDTH_PX - chart.layout.margin.l - chart.layout.margin.r,
        height_px=HEIGHT_PX - chart.layout.margin.t - chart.layout.margin.b,
    )


def _ticks(info: ParetoInfo) -> dict[str, list[Any]]:
    """Returns the ticks of an axis of seconds; the floor's tick says so if a point was moved there."""
    clipped = any(point.x < info.floor for point in info.points)
    texts = [f"≤ {tick:g}" if clipped and tick == info.floor else f"{tick:g}" for tick in TICKS_S]
    return {"tickvals": list(TICKS_S), "ticktext": texts}


def _front_line(info: ParetoInfo, axes: Axes) -> go.Scatter:
    """Returns the best gain within each price: horizontal, then vertical at every point of the front, a noisy one's low end."""
    end = 10 ** axes.x_range[1] if info.price.is_logarithmic else axes.x_range[1]
    front = info.front
    return go.Scatter(
        x=[front[0].shown_x, *(point.shown_x for point in front), end],
        y=[axes.y_range[0], *(point.assured_y for point in front), front[-1].assured_y],
        mode="lines",
        line={"shape": "hv", "color": LINE_COLOR, "width": 2, "dash": "dot"},
        name="Pareto front",
        legendrank=2000,  # drawn first, under the markers, and listed last
        hoverinfo="skip",
    )


def _tie_lines(info: ParetoInfo) -> go.Scatter:
    """Returns broad lines with round ends from each leader to what cannot be told apart from it."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for leader, *others in info.ties:
        for other in others:
            xs += [leader.shown_x, other.shown_x, None]
            ys += [leader.y, other.y, None]
    return go.Scatter(
        x=xs,
        y=ys,
        mode="lines+markers",
        line={"color": LINE_COLOR, "width": _TIE_WIDTH_PX},
        marker={"color": LINE_COLOR, "symbol": "circle", "size": _TIE_WIDTH_PX},
        opacity=0.35,
        name="cannot be told apart",
        legendrank=2001,
        hoverinfo="skip",
    )


def _markers(points: list[ParetoPoint], is_crowd: bool, info: ParetoInfo) -> go.Scatter:
    scope = points[0].scope
    return go.Scatter(
        x=[point.shown_x for point in points],
        y=[point.y for point in points],
        mode="markers",
        name=str(scope),
        legendgroup=str(scope),
        showlegend=False,
        marker={
            "color": SCOPE_COLORS[scope],
            "symbol": [SCOPE_SYMBOLS[scope] + ("" if p.status is Status.OK else "-open") for p in points],
            "size": [15 if p.on_front else 12 if p.front_probability is not None else 7 if is_crowd else 11 for p in points],
            "line": {
                "width": [0 if p.status is Status.OK else 1 if is_crowd else 2 for p in points],
                "color": SCOPE_COLORS[scope],
            },
            "opacity": [1.0 if p.front_probability is not None or p.on_front or not is_crowd else 0.6 for p in points],
        },
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [point.above for point in points],
            "arrayminus": [point.below for point in points],
            "width": 0 if is_crowd else 3,
            "thickness": 0.7 if is_crowd else 1.2,
        },
        hovertext=[_hover(point, info) for point in points],
        hoverinfo="text",
        hoverlabel={"bordercolor": SCOPE_COLORS[scope]},
        cliponaxis=False,
    )


def _hover(point: ParetoPoint, info: ParetoInfo) -> str:
    """Returns the whole setting and the main figures in plotly's own markup; text from records is escaped."""
    trial = point.trial
    compile_time = figure(trial["compile_s"], "s")
    if info.price.column == "compile_s" and point.x < point.shown_x:
        compile_time += f" (drawn at {point.shown_x:g} s)"
    verdict = "on the front" + (", its knee" if point.is_knee else "") if point.on_front else ""
    if point.front_probability is not None:
        verdict = f"{verdict or 'may be on the front'}: {chance(point.front_probability)} probable"
    if point.equal_to is not None:
        verdict += f"; cannot be told apart from “{point.equal_to}”"
    if point.status is not Status.OK:
        verdict = f"{point.status}: {text(trial['label']) or 'no label'}; not on the front"
    lines = [
        f"throughput {figure(trial['samples_per_s'])} samples/s{_between(trial, 'samples_per_s')}",
        f"compile {compile_time}",
        f"first step {figure(trial['first_step_s'], 's')}",
        f"step {figure(trial['step_ms_median'], 'ms')}",
        f"peak memory {gib(trial['peak_memory_bytes'])}",
        f"numerics {text(trial['numerics_status']) or 'not checked'}",
        ", ".join(remark.text for remark in remarks(trial)),
        verdict,
    ]
    if number(trial["warm_start_s"]) is not None:
        lines.insert(2, f"warm start {figure(trial['warm_start_s'], 's')}")
    if info.gain.column == "tokens_per_s":
        lines.insert(1, f"{figure(trial['tokens_per_s'])} useful tokens/s")
    if number(trial["speedup_eager"]) is not None:
        lines.insert(1, f"{times(trial['speedup_eager'])} eager interleaved{_between(trial, 'speedup_eager')}")
    heading = [f"<b>{_escaped(line)}</b>" for line in _wrapped(f"{trial['setting_id']} {trial['settings_label']}")]
    setting = _wrapped(str(trial["settings_key"]).replace(",", ", "))
    return "<br>".join([*heading, *map(_escaped, setting), "", *(_escaped(part) for line in lines for part in _wrapped(line))])


def _between(trial: pd.Series, name: str) -> str:
    return f" (95%: {ends})" if (ends := interval(trial[f"{name}_low"], trial[f"{name}_high"])) else ""


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _HOVER_CHARS, max_lines=4, placeholder=" …")


def _annotations(info: ParetoInfo, axes: Axes) -> list[dict[str, Any]]:
    """Returns the labels of the front's points and of the best hollow ones."""
    hollow = [point for point in info.points if point.status is not Status.OK]
    hollow = sorted(hollow, key=lambda point: -point.y)[:_MOST_HOLLOW_NAMED]
    by_name = len(info.front) <= _MOST_NAMED
    label = "setting_name" if by_name else "setting_id"
    named = [(f"front-{point.trial['setting_id']}", point, str(point.trial[label])) for point in info.front]
    named += [("hollow", point, text(point.trial["label"]) or str(point.status)) for point in hollow]
    callouts = [Callout(name, *_at(point, info), [_escaped(line) for line in _balanced(words)]) for name, point, words in named]
    steps = [_at(point, info) for point in info.front]
    bars = [(_at(point, info)[0], point.y - point.below, point.y + point.above) for point in info.points]
    return callout_annotations(callouts, [_at(point, info) for point in info.points], steps, axes, bars)


def _balanced(words: str) -> list[str]:
    """Breaks words into at most four lines of similar length, keeping words whole where possible."""
    num_lines = max(1, math.ceil(len(words) / _LABEL_CHARS))
    longest = max(map(len, words.split()), default=0)
    width = max(math.ceil(len(words) / num_lines) + 5, min(longest, _LABEL_MOST_CHARS))
    return textwrap.wrap(words, width, max_lines=4, placeholder=" …")


def _at(point: ParetoPoint, info: ParetoInfo) -> tuple[float, float]:
    """Returns the point's position in the axes' own numbers: a logarithmic axis counts in decades."""
    return (math.log10(point.shown_x) if info.price.is_logarithmic else point.shown_x), point.y


def _escaped(words: str) -> str:
    return html.escape(words, quote=False)
