"""Throughput against compile time, with the Pareto front: the sweep's main chart."""

from __future__ import annotations

import html
import math
import textwrap
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.figures.callouts import Axes, Callout, callout_annotations
from analysis.figures.chart_style import (
    DYNAMIC_SYMBOLS,
    HEIGHT_PX,
    LINE_COLOR,
    SCOPE_COLORS,
    WIDTH_PX,
    base_layout,
    empty_note,
    legend_entry,
)
from analysis.formatting import figure, gib, interval, number, text, times
from analysis.pareto import knee, pareto_front
from analysis.remarks import remarks
from orchestrator.records import Status
from workloads.settings import Dynamic, Scope

_MOST_NAMED = 10
"""With more points on the front, their labels are their places in it: names would cover the chart."""
_LABEL_CHARS = 30
_HOVER_CHARS = 54
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class ParetoPoint(NamedTuple):
    """One trial in the chart. Text is as it stands in the record, not escaped."""

    trial_id: str
    settings_label: str
    settings_key: str
    scope: Scope
    dynamic: Dynamic | None
    samples_per_s: float
    samples_per_s_low: float | None
    samples_per_s_high: float | None
    compile_s: float
    """As measured."""
    shown_compile_s: float
    """Where it is drawn: at the axis's floor if it is less."""
    first_step_s: float | None
    step_ms_median: float | None
    speedup_eager: float | None
    speedup_eager_low: float | None
    speedup_eager_high: float | None
    peak_memory_bytes: float | None
    numerics_status: str | None
    status: Status
    label: str | None
    """Why it is not ok."""
    remarks: list[str]
    """What is unusual about how it was measured."""
    on_front: bool
    is_knee: bool

    @property
    def above(self) -> float:
        """How far the interval reaches above the throughput; 0 without an interval."""
        return 0.0 if self.samples_per_s_high is None else max(0.0, self.samples_per_s_high - self.samples_per_s)

    @property
    def below(self) -> float:
        """How far the interval reaches below the throughput; 0 without an interval."""
        return 0.0 if self.samples_per_s_low is None else max(0.0, self.samples_per_s - self.samples_per_s_low)


class ParetoInfo(NamedTuple):
    """What the chart shows."""

    points: list[ParetoPoint]
    """Every trial with a throughput and a cold compile time, also those that are not ok."""
    front: list[ParetoPoint]
    """Those on the front, ascending in compile time."""
    floor_s: float
    """Compile times under this are as good as none and drawn here: a logarithmic axis has no zero for eager to stand at."""
    num_without_figures: int
    """Trials that are not shown, because they got no such figures."""


def pareto(df: pd.DataFrame) -> go.Figure:
    """The chart of these trials; see `pareto_info` and `pareto_figure`."""
    return pareto_figure(pareto_info(df))


def pareto_info(df: pd.DataFrame) -> ParetoInfo:
    """What to show of the trials `load` returned."""
    front = pareto_front(df)
    knee_row = knee(front)
    floor_s = _floor_s(df)
    points = {}
    for index, row in df.iterrows():
        throughput, compile_s = number(row["samples_per_s"]), number(row["compile_s"])
        if throughput is None or compile_s is None:
            continue
        dynamic = text(row["dynamic"])
        points[index] = ParetoPoint(
            trial_id=str(row["trial_id"]),
            settings_label=str(row["settings_label"]),
            settings_key=str(row["settings_key"]),
            scope=Scope(row["scope"]),
            dynamic=None if dynamic is None else Dynamic(dynamic),
            samples_per_s=throughput,
            samples_per_s_low=number(row["samples_per_s_low"]),
            samples_per_s_high=number(row["samples_per_s_high"]),
            compile_s=compile_s,
            shown_compile_s=max(compile_s, floor_s),
            first_step_s=number(row["first_step_s"]),
            step_ms_median=number(row["step_ms_median"]),
            speedup_eager=number(row["speedup_eager"]),
            speedup_eager_low=number(row["speedup_eager_low"]),
            speedup_eager_high=number(row["speedup_eager_high"]),
            peak_memory_bytes=number(row["peak_memory_bytes"]),
            numerics_status=text(row["numerics_status"]),
            status=Status(row["status"]),
            label=text(row["label"]),
            remarks=[remark.text for remark in remarks(row)],
            on_front=index in front.index,
            is_knee=knee_row is not None and index == knee_row.name,
        )
    return ParetoInfo(
        points=list(points.values()),
        front=[points[index] for index in front.index],
        floor_s=floor_s,
        num_without_figures=len(df) - len(points),
    )


def _floor_s(df: pd.DataFrame) -> float:
    """A tick a decade or more under the quickest compile, so that eager's next to nothing does not stretch the axis."""
    compiled = df[df["scope"] != Scope.EAGER]["compile_s"].dropna()
    room = 0.1 * float(compiled.min()) if len(compiled) else 0.0
    return max((tick for tick in _TICKS_S if tick <= room), default=_TICKS_S[0])


def pareto_figure(info: ParetoInfo, *, title: str | None = None) -> go.Figure:
    """The chart: compile time on a logarithmic axis, throughput with its 95 % interval, the front as steps.

    Colour is the scope, the symbol is how changing lengths are met. Trials that are not ok are hollow and carry their
    label. Compile times under `info.floor_s` are drawn there, and their hover says so. The front's labels are laid out
    for 1200 by 700 pixels; their annotations are named `front-1`, `front-2`, … for a page that has less room.

    Args:
        info: what `pareto_info` returned.
        title: plain text above the chart; None for none.
    """
    chart = go.Figure(layout=base_layout(title))
    if not info.points:
        chart.update_layout(xaxis_visible=False, yaxis_visible=False)
        chart.add_annotation(empty_note("No trial has both a throughput and a cold compile time yet."))
        return chart
    axes = _axes(info, chart)
    chart.update_xaxes(
        type="log", range=list(axes.x_range), title_text="cold compile time (seconds, logarithmic)", **_ticks(info)
    )
    chart.update_yaxes(range=list(axes.y_range), title_text="throughput (samples per second)")
    if info.front:
        chart.add_trace(_front_line(info.front, axes))
    for scope in Scope:
        if points := [point for point in info.points if point.scope is scope]:
            chart.add_traces([legend_entry(str(scope), SCOPE_COLORS[scope], "circle", group=str(scope)), _markers(points)])
    for dynamic in (None, *Dynamic):
        if any(point.dynamic is dynamic for point in info.points):
            name = "no compiler" if dynamic is None else str(dynamic)
            chart.add_trace(legend_entry(name, LINE_COLOR, DYNAMIC_SYMBOLS[dynamic], legend="legend2"))
    if any(point.status is not Status.OK for point in info.points):
        chart.add_trace(legend_entry("not usable", LINE_COLOR, "circle-open", legend="legend2"))
    for annotation in _annotations(info, axes):
        chart.add_annotation(annotation)
    return chart


def _axes(info: ParetoInfo, chart: go.Figure) -> Axes:
    """The axes' ends, decades of seconds and samples a second, with room for markers and labels."""
    decades = [math.log10(point.shown_compile_s) for point in info.points]
    room = max(0.3, 0.12 * (max(decades) - min(decades)))
    lows = [point.samples_per_s - point.below for point in info.points]
    highs = [point.samples_per_s + point.above for point in info.points]
    spread = max(max(highs) - min(lows), 0.05 * max(highs), 1e-9)
    return Axes(
        x_range=(min(decades) - room, max(decades) + room),
        y_range=(max(0.0, min(lows) - 0.14 * spread), max(highs) + 0.14 * spread),
        width_px=WIDTH_PX - chart.layout.margin.l - chart.layout.margin.r,
        height_px=HEIGHT_PX - chart.layout.margin.t - chart.layout.margin.b,
    )


def _ticks(info: ParetoInfo) -> dict[str, list[Any]]:
    """The compile-time axis's ticks; the floor's says so if a point was moved there."""
    clipped = any(point.compile_s < info.floor_s for point in info.points)
    texts = [f"≤ {tick:g}" if clipped and tick == info.floor_s else f"{tick:g}" for tick in _TICKS_S]
    return {"tickvals": list(_TICKS_S), "ticktext": texts}


def _front_line(front: list[ParetoPoint], axes: Axes) -> go.Scatter:
    """The best throughput within each compile time: level, then up, at every point of the front."""
    xs = [front[0].shown_compile_s, *(point.shown_compile_s for point in front), 10 ** axes.x_range[1]]
    ys = [axes.y_range[0], *(point.samples_per_s for point in front), front[-1].samples_per_s]
    return go.Scatter(
        x=xs,
        y=ys,
        mode="lines",
        line={"shape": "hv", "color": LINE_COLOR, "width": 2, "dash": "dot"},
        name="Pareto front",
        legendrank=2000,  # drawn first, under the markers, and named last
        hoverinfo="skip",
        legend="legend",
    )


def _markers(points: list[ParetoPoint]) -> go.Scatter:
    scope = points[0].scope
    return go.Scatter(
        x=[point.shown_compile_s for point in points],
        y=[point.samples_per_s for point in points],
        mode="markers",
        name=str(scope),
        legendgroup=str(scope),
        showlegend=False,
        marker={
            "color": SCOPE_COLORS[scope],
            "symbol": [DYNAMIC_SYMBOLS[p.dynamic] + ("" if p.status is Status.OK else "-open") for p in points],
            "size": [15 if p.on_front else 11 for p in points],
            "line": {"width": [0 if p.status is Status.OK else 2 for p in points], "color": SCOPE_COLORS[scope]},
            "opacity": 1.0,
        },
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [point.above for point in points],
            "arrayminus": [point.below for point in points],
            "width": 3,
            "thickness": 1.2,
        },
        hovertext=[_hover(point) for point in points],
        hoverinfo="text",
        hoverlabel={"bordercolor": SCOPE_COLORS[scope]},
        cliponaxis=False,
    )


def _hover(point: ParetoPoint) -> str:
    """The whole setting and the main figures, in plotly's own mark-up; what comes from a record is escaped."""
    compile_time = figure(point.compile_s, "s")
    if point.compile_s < point.shown_compile_s:
        compile_time += f" (drawn at {point.shown_compile_s:g} s)"
    verdict = "on the front" + (", its knee" if point.is_knee else "") if point.on_front else ""
    if point.status is not Status.OK:
        verdict = f"{point.status}: {point.label or 'no label'}; not on the front"
    between = _between(point.samples_per_s_low, point.samples_per_s_high)
    lines = [
        f"throughput {figure(point.samples_per_s)} samples/s{between}",
        f"compile {compile_time}",
        f"first step {figure(point.first_step_s, 's')}",
        f"step {figure(point.step_ms_median, 'ms')}",
        f"peak memory {gib(point.peak_memory_bytes)}",
        f"numerics {point.numerics_status or 'not checked'}",
        ", ".join(point.remarks),
        verdict,
    ]
    if point.speedup_eager is not None:
        between = _between(point.speedup_eager_low, point.speedup_eager_high)
        lines.insert(1, f"{times(point.speedup_eager)} eager interleaved{between}")
    heading = [f"<b>{_escaped(line)}</b>" for line in _wrapped(point.settings_label)]
    setting = _wrapped(point.settings_key.replace(",", ", "))
    return "<br>".join([*heading, *map(_escaped, setting), "", *(_escaped(part) for line in lines for part in _wrapped(line))])


def _between(low: float | None, high: float | None) -> str:
    return f" (95 %: {ends})" if (ends := interval(low, high)) else ""


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _HOVER_CHARS, max_lines=4, placeholder=" …")


def _annotations(info: ParetoInfo, axes: Axes) -> list[dict[str, Any]]:
    """The labels of the front's points and of the hollow ones."""
    hollow = [point for point in info.points if point.status is not Status.OK]
    by_name = len(info.front) <= _MOST_NAMED
    named = [
        (f"front-{place}", point, point.settings_label if by_name else str(place))
        for place, point in enumerate(info.front, start=1)
    ]
    named += [("hollow", point, point.label or str(point.status)) for point in hollow]
    callouts = [Callout(name, *_at(point), [_escaped(line) for line in _balanced(words)]) for name, point, words in named]
    return callout_annotations(callouts, [_at(point) for point in info.points], [_at(point) for point in info.front], axes)


def _balanced(words: str) -> list[str]:
    """The words on at most three lines of about the same length."""
    num_lines = max(1, math.ceil(len(words) / _LABEL_CHARS))
    return textwrap.wrap(words, math.ceil(len(words) / num_lines) + 5, max_lines=3, placeholder=" …")


def _at(point: ParetoPoint) -> tuple[float, float]:
    """Where the point stands, in the axes' own numbers: a logarithmic axis counts in decades."""
    return math.log10(point.shown_compile_s), point.samples_per_s


def _escaped(words: str) -> str:
    return html.escape(words, quote=False)
