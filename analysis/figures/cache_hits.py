"""What compile caches are worth: cold compiling versus restoring what was compiled, with hits and misses."""

from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.choose.break_even import warm_compiling_s
from analysis.choose.pareto import standing
from analysis.figures.chart_style import SCOPE_COLORS, or_trials
from analysis.figures.setting_rows import BAR, RowName, row_hover, rows_figure
from analysis.formatting import MISSING, figure, number, percent, times, whole
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import Scope

_MOST_ROWS = 16
_COLD_COLOR, _WARM_COLOR = SCOPE_COLORS[Scope.FULL], SCOPE_COLORS[Scope.REGIONAL]


class CacheRow(NamedTuple):
    """One setting; unknown values are None. Text is unescaped, as in the record."""

    setting_name: str
    cold_s: float | None
    """Cold compile time, or a warm trial's estimate of it."""
    is_estimate: bool
    warm_s: float
    """Seconds in which its latest warm start, or else a warm trial, restored artifacts and compiled the rest."""
    hits: float | None
    misses: float | None
    saved_s: float | None

    @property
    def hit_share(self) -> float | None:
        """Fraction of lookups that were hits; None if there were none."""
        looked = (self.hits or 0) + (self.misses or 0)
        return (self.hits or 0) / looked if looked else None


class CacheInfo(NamedTuple):
    """Contents of the chart."""

    rows: list[CacheRow]
    num_left_out: int


def cache_info(df: pd.DataFrame) -> CacheInfo:
    """Chooses what to show of the trials that `load` returned: settings with a warm start, or with a trial that began warm."""
    trials = standing(df)
    trials = trials[(trials["status"] == Status.OK) & (trials["scope"] != Scope.EAGER)]
    usable = df[df["status"] == Status.OK]
    warm_trials = {
        (trial["settings_key"], trial["num_workers"]): trial for _, trial in usable[usable["caches"] == Caches.WARM].iterrows()
    }
    rows = []
    for (_, trial), warm_s in zip(trials.iterrows(), map(number, warm_compiling_s(trials, usable)), strict=True):
        if warm_s is None:
            continue
        of_warm = warm_trials.get((trial["settings_key"], trial["num_workers"]))
        measured = number(trial["compile_s"])
        estimated = None if of_warm is None else number(of_warm["cold_equivalent_s"])
        counted = trial if of_warm is None else of_warm
        rows.append(
            CacheRow(
                setting_name=str(trial["setting_name"]),
                cold_s=estimated if measured is None else measured,
                is_estimate=measured is None,
                warm_s=warm_s,
                hits=number(counted["cache_hits"]),
                misses=number(counted["cache_misses"]),
                saved_s=None if of_warm is None else number(of_warm["cache_saved_s"]),
            )
        )
    rows.sort(key=lambda row: row.warm_s - (row.cold_s or row.warm_s))
    return CacheInfo(rows[:_MOST_ROWS], max(0, len(rows) - _MOST_ROWS))


@or_trials(cache_info)
def cache_figure(info: CacheInfo) -> go.Figure:
    """Draws seconds to the right, with a setting's cold compiling above what a warm start takes, the largest saving on top."""
    names = [RowName(row.setting_name, _saved(row), on_front=False) for row in info.rows]
    chart = rows_figure(names, x_title="seconds of restoring and compiling", nothing="No trial began with warm caches.")
    if names:
        cold = [(place, row) for place, row in enumerate(info.rows) if row.cold_s is not None]
        chart.update_layout(barmode="overlay")
        chart.add_trace(_bars("cold", _COLD_COLOR, [(place - BAR / 4, row.cold_s or 0.0, row) for place, row in cold]))
        warm = [(place + BAR / 4, row.warm_s, row) for place, row in enumerate(info.rows)]
        chart.add_trace(_bars("warm", _WARM_COLOR, warm))
    return chart


def _bars(name: str, color: str, bars: list[tuple[float, float, CacheRow]]) -> go.Bar:
    return go.Bar(
        orientation="h",
        name=name,
        x=[spent for _, spent, _ in bars],
        y=[place for place, _, _ in bars],
        width=BAR / 2,
        marker={"color": color},
        hovertext=[_hover(row) for _, _, row in bars],
        hoverinfo="text",
        hoverlabel={"bordercolor": color},
    )


def _saved(row: CacheRow) -> str:
    if not (row.cold_s and row.warm_s):
        return figure(row.warm_s, "s warm")
    ratio = row.cold_s / row.warm_s
    return f"{times(ratio)} quicker" if ratio >= 1 else f"{times(1 / ratio)} slower"


def _hover(row: CacheRow) -> str:
    share = "" if row.hit_share is None else f" ({percent(row.hit_share)} hit)"
    cold = figure(row.cold_s, "s") + (", estimated" if row.is_estimate and row.cold_s is not None else "")
    lines = [row.setting_name, f"cold {cold}, warm {figure(row.warm_s, 's')}"]
    if row.hits is not None or row.misses is not None:
        lines.append(f"{whole(row.hits)} hits, {whole(row.misses)} misses{share}")
    if row.saved_s is not None:
        lines.append(f"saved {figure(row.saved_s, 's')} of compiling")
    return row_hover([line.replace(MISSING, "not known") for line in lines])
