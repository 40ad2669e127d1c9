"""Where the compile time goes: a bar a setting, stacked by phase."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import COMPILE_PHASES
from analysis.figures.chart_style import INK, PAPER, PHASE_COLORS, base_layout, empty_note
from analysis.formatting import figure, number
from analysis.pareto import pareto_front
from orchestrator.records import Caches, Status
from workloads.settings import Scope

ROW_PX = 46
"""Height of a setting: its name, and under it its bar."""
_LEGEND_PX, _AXIS_PX = 40, 64
_BAR = 0.42
_MOST_BARS = 24
_NO_BREAK = "\u00a0"


class CompileBar(NamedTuple):
    """One setting. Text is as it stands in the record, not escaped."""

    trial_id: str
    settings_label: str
    compile_s: float
    phases_s: dict[str, float]
    """Seconds of each phase, by its name in `COMPILE_PHASES`; those without a figure are left out."""
    on_front: bool


class CompilePhasesInfo(NamedTuple):
    """What the chart shows."""

    bars: list[CompileBar]
    """Ascending in compile time."""
    phases: list[str]
    """Phases that took any time, in the order of `COMPILE_PHASES`."""
    num_left_out: int
    """Settings with phases for which there is no room."""


def compile_phases_info(df: pd.DataFrame) -> CompilePhasesInfo:
    """What to show of the trials `load` returned: usable cold ones that compile, the front's first, then the fastest."""
    front = pareto_front(df).index
    compiled = df[(df["status"] == Status.OK) & (df["caches"] == Caches.COLD) & (df["scope"] != Scope.EAGER)]
    bars = []
    for index, row in compiled.sort_values("samples_per_s", ascending=False, kind="stable").iterrows():
        seconds = {name: number(row[phase.column]) for name, phase in COMPILE_PHASES.items()}
        phases_s = {name: value for name, value in seconds.items() if value is not None}
        compile_s = number(row["compile_s"])
        if phases_s and compile_s is not None:
            bars.append(CompileBar(str(row["trial_id"]), str(row["settings_label"]), compile_s, phases_s, index in front))
    shown = sorted(bars, key=lambda bar: not bar.on_front)[:_MOST_BARS]
    return CompilePhasesInfo(
        bars=sorted(shown, key=lambda bar: bar.compile_s),
        phases=[name for name in COMPILE_PHASES if any(bar.phases_s.get(name) for bar in shown)],
        num_left_out=len(bars) - len(shown),
    )


def compile_phases_figure(info: CompilePhasesInfo) -> go.Figure:
    """The chart: seconds to the right, the quickest compile on top, each setting's name above its bar.

    The names stand in the plot, not beside it, so that they have room on a telephone too. A bar's place is its y, 0 on top;
    the annotations are in the same order. The height follows from the number of bars.

    Args:
        info: what `compile_phases_info` returned.
    """
    chart = go.Figure(layout=base_layout())
    if not info.bars:
        chart.update_layout(xaxis_visible=False, yaxis_visible=False)
        chart.add_annotation(empty_note("No usable trial says where its compile time went."))
        return chart
    chart.update_layout(
        barmode="relative",
        height=_LEGEND_PX + ROW_PX * len(info.bars) + _AXIS_PX,
        margin={"l": 14, "t": _LEGEND_PX, "b": _AXIS_PX},
        legend={"traceorder": "normal", "title": {"text": ""}, "y": 1.0},
        uniformtext={"mode": "hide", "minsize": 10},
    )
    chart.update_xaxes(title_text="cold compile time (seconds)", rangemode="tozero")
    chart.update_yaxes(range=[len(info.bars) - 1 + 0.6 * _BAR, -1 + 0.5 * _BAR], visible=False)
    chart.add_traces([_trace(name, info) for name in info.phases])
    for place, bar in enumerate(info.bars):
        chart.add_annotation(_name(place, bar))
    return chart


def _trace(name: str, info: CompilePhasesInfo) -> go.Bar:
    """One phase of every setting; parts of no length are left out, so that none of them has an outline."""
    shown = [(place, bar, bar.phases_s[name]) for place, bar in enumerate(info.bars) if bar.phases_s.get(name)]
    return go.Bar(
        orientation="h",
        name=COMPILE_PHASES[name].title,
        x=[seconds for _, _, seconds in shown],
        y=[place for place, _, _ in shown],
        width=_BAR,
        marker={"color": PHASE_COLORS[name], "line": {"color": PAPER, "width": 1}},
        text=[figure(seconds, "s", digits=2) for _, _, seconds in shown],
        textposition="inside",
        insidetextfont={"color": PAPER if name in ("dynamo", "other") else INK},
        insidetextanchor="middle",
        textangle=0,
        hovertext=[_hover(name, bar) for _, bar, _ in shown],
        hoverinfo="text",
        hoverlabel={"bordercolor": PHASE_COLORS[name]},
    )


def _hover(name: str, bar: CompileBar) -> str:
    seconds, phase = bar.phases_s[name], COMPILE_PHASES[name]
    share = f", {100 * seconds / bar.compile_s:.0f} % of {figure(bar.compile_s, 's')}" if bar.compile_s > 0 else ""
    lines = [f"{phase.title}: {figure(seconds, 's')}{share}", phase.meaning, bar.settings_label]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _name(place: int, bar: CompileBar) -> dict[str, Any]:
    star = "★ " if bar.on_front else ""
    words = html.escape(f"{star}{bar.settings_label}", quote=False)
    total = figure(bar.compile_s, "s").replace(" ", _NO_BREAK)
    return {
        "text": f"{words}{_NO_BREAK}·{_NO_BREAK}<b>{total}</b>",
        "x": 0,
        "y": place - _BAR / 2,
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "borderpad": 2,
        "font": {"size": 13},
    }
