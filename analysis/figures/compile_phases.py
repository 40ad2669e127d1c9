"""Where the compile time goes: a bar per setting, stacked by phase."""

from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.columns import COMPILE_PHASES
from analysis.figures.chart_style import INK, PAPER, PHASE_COLORS, or_trials
from analysis.figures.setting_rows import BAR, RowName, notable, row_hover, rows_figure
from analysis.formatting import figure, number
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import Scope

_MOST_BARS = 14


class CompileBar(NamedTuple):
    """One setting. Text is unescaped, as in the record."""

    trial_id: str
    setting_name: str
    compile_s: float
    phases_s: dict[str, float]
    """Seconds of each phase, by its name in `COMPILE_PHASES`; phases without a figure are left out."""
    on_front: bool


class CompilePhasesInfo(NamedTuple):
    """Contents of the chart."""

    bars: list[CompileBar]
    """Ascending in compile time."""
    phases: list[str]
    """Phases that took any time, in the order of `COMPILE_PHASES`."""
    num_left_out: int


def compile_phases_info(df: pd.DataFrame) -> CompilePhasesInfo:
    """Chooses what to show of the trials from `load`: usable cold ones that compile, the front's first, then the fastest."""
    trials = notable(df)
    bars = []
    for _, row in trials[(trials["caches"] == Caches.COLD) & (trials["scope"] != Scope.EAGER)].iterrows():
        by_phase = {name: number(row[phase.column]) for name, phase in COMPILE_PHASES.items()}
        phases_s = {name: value for name, value in by_phase.items() if value is not None}
        compile_s = number(row["compile_s"])
        if phases_s and compile_s is not None:
            bars.append(CompileBar(str(row["trial_id"]), str(row["setting_name"]), compile_s, phases_s, bool(row["on_front"])))
    shown = bars[:_MOST_BARS]
    return CompilePhasesInfo(
        bars=sorted(shown, key=lambda bar: bar.compile_s),
        phases=[name for name in COMPILE_PHASES if any(bar.phases_s.get(name) for bar in shown)],
        num_left_out=len(bars) - len(shown),
    )


@or_trials(compile_phases_info)
def compile_phases_figure(info: CompilePhasesInfo) -> go.Figure:
    """Draws seconds to the right, the fastest compile on top; see `rows_figure`."""
    names = [RowName(bar.setting_name, figure(bar.compile_s, "s"), bar.on_front) for bar in info.bars]
    chart = rows_figure(names, x_title="cold compile time (seconds)", nothing="No usable trial says where its compile time went.")
    if names:
        chart.update_layout(barmode="relative", uniformtext={"mode": "hide", "minsize": 10})
        chart.add_traces([_trace(name, info) for name in info.phases])
    return chart


def _trace(name: str, info: CompilePhasesInfo) -> go.Bar:
    """Returns the bars of one phase; parts of zero length are left out, so that they have no outline."""
    shown = [(place, bar, bar.phases_s[name]) for place, bar in enumerate(info.bars) if bar.phases_s.get(name)]
    return go.Bar(
        orientation="h",
        name=COMPILE_PHASES[name].title,
        x=[spent for _, _, spent in shown],
        y=[place for place, _, _ in shown],
        width=BAR,
        marker={"color": PHASE_COLORS[name], "line": {"color": PAPER, "width": 1}},
        text=[figure(spent, "s", digits=2) for _, _, spent in shown],
        textposition="inside",
        insidetextfont={"color": PAPER if name in ("dynamo", "other") else INK},
        insidetextanchor="middle",
        textangle=0,
        hovertext=[_hover(name, bar) for _, bar, _ in shown],
        hoverinfo="text",
        hoverlabel={"bordercolor": PHASE_COLORS[name]},
    )


def _hover(name: str, bar: CompileBar) -> str:
    spent, phase = bar.phases_s[name], COMPILE_PHASES[name]
    share = f", {100 * spent / bar.compile_s:.0f}% of {figure(bar.compile_s, 's')}" if bar.compile_s > 0 else ""
    return row_hover([f"{phase.title}: {figure(spent, 's')}{share}", phase.meaning, bar.setting_name])
