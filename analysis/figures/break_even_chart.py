"""How long a job takes under each setting, for every job length, as a multiple of eager's time."""

import html
import math
import textwrap
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.choose.break_even import (
    USUAL_STEPS,
    Job,
    Reign,
    Starts,
    baseline_place,
    costs,
    has_tried_others,
    is_plain,
    reigns,
    samples_per_step,
)
from analysis.decision_text import on_batches, words_of_baseline
from analysis.figures.chart_style import DASHES, LINE_COLOR, SCOPE_COLORS, base_layout, empty_figure, or_trials
from analysis.figures.setting_rows import notable, row_hover
from analysis.formatting import duration, figure, number
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import Scope

MIN_STEPS, MAX_STEPS = 100, 10_000_000  # range of job lengths that are drawn
_CURVE_POINTS = 81
_MOST_SETTINGS = 40
_HEIGHT_PX = 460
_MARGIN_PX = {"l": 84, "t": 30, "b": 64, "r": 290}
_HIGHEST = 2
_UNIT_PX = (_HEIGHT_PX - _MARGIN_PX["t"] - _MARGIN_PX["b"]) / _HIGHEST
_NAME_CHARS, _NAME_LINES = 38, 3
_NAME_OFF_PX = 18
_NAME_LINE_PX = 17


class JobSetting(NamedTuple):
    """A job's costs under one setting. Text is unescaped, as in the record."""

    label: str
    key: str
    scope: Scope
    cold_s: float
    warm_s: float | None
    """Seconds of a start from artifacts; None if it was not measured."""
    step_s: float
    cold_sd_s: float
    warm_sd_s: float | None
    step_sd_s: float
    """Standard deviations of the three figures."""
    peak_bytes: float | None
    num_workers: int
    is_plain: bool
    on_batches: str
    """How it changes the training batches, and how large they may be; empty if there is nothing to say."""


class BreakEvenInfo(NamedTuple):
    """Contents of the chart."""

    settings: list[JobSetting]
    """The setting with the fastest step comes first."""
    baseline: int | None
    """Index of what is run today, the baseline for the others; None if there is none."""
    baseline_words: str
    """The baseline's name in a sentence."""
    reigns: list[Reign]
    """The fastest setting by length, for a job that starts once, cold."""
    samples_per_step: int
    has_tried_others: bool


def break_even_info(df: pd.DataFrame, attempts: pd.DataFrame | None = None) -> BreakEvenInfo:
    """Chooses what to show of the trials that `load` returned: the front's settings, then the fastest, including the baseline."""
    try:
        trials = notable(df)
        plain = trials[trials["settings_key"].map(is_plain)].head(1)
        every = costs(df, Job(steps=USUAL_STEPS), attempts=attempts).table
        today = every.index[[place for place in [baseline_place(every)] if place is not None]]
        chosen = trials.head(_MOST_SETTINGS).index.union(today).union(plain.index)
        table = every[every.index.isin(chosen)]
        warm = costs(df, Job(steps=USUAL_STEPS, starts=Starts.WARM), attempts=attempts).table
        samples = samples_per_step(every)
    except ConfigError:  # a job's time is not known
        return BreakEvenInfo([], None, "", [], 0, False)
    table = table.sort_values("step_s", kind="stable")
    settings = [
        JobSetting(
            label=str(row["setting_name"]),
            key=str(row["settings_key"]),
            scope=Scope(row["scope"]),
            cold_s=float(row["first_s"]),
            warm_s=number(warm.at[index, "first_s"]) if bool(warm.at[index, "starts_known"]) else None,
            step_s=float(row["step_s"]),
            cold_sd_s=float(row["first_sd_s"]),
            warm_sd_s=number(warm.at[index, "first_sd_s"]) if bool(warm.at[index, "starts_known"]) else None,
            step_sd_s=float(row["step_sd_s"]),
            peak_bytes=number(row["peak_memory_bytes"]),
            num_workers=int(row["num_workers"]),
            is_plain=is_plain(str(row["settings_key"])),
            on_batches=on_batches(row, None if today.empty else every.loc[today[0]]),
        )
        for index, row in table.iterrows()
    ]
    baseline = next((place for place, index in enumerate(table.index) if index in today), None)
    words = "" if baseline is None else words_of_baseline(settings[baseline].key, settings[baseline].label)
    return BreakEvenInfo(settings, baseline, words, reigns(table), samples, has_tried_others(df))


@or_trials(break_even_info)
def break_even_figure(info: BreakEvenInfo) -> go.Figure:
    """Draws job length to the right, logarithmic, and total time upwards, as a multiple of what is run today.

    The chart shows the settings that are the fastest at some length, the baseline, and plain `torch.compile(model)`. Without a
    baseline, multiples are of the setting with the fastest step. The other settings' lines are present but invisible: each
    line's `meta` is the setting's index in `info.settings`, for a page that draws another job, in which others may be the
    fastest.
    """
    if not info.settings:
        return empty_figure("No usable trial tells how long a job would take.")
    chart = go.Figure(layout=base_layout())
    steps = np.geomspace(MIN_STEPS, MAX_STEPS, _CURVE_POINTS)
    base = info.settings[info.baseline or 0]
    chart.update_layout(
        meta={"kind": "break-even"},
        height=_HEIGHT_PX,
        margin=_MARGIN_PX,
        showlegend=False,
        hovermode="closest",
    )
    ticks = [10**power for power in range(2, 8)]
    chart.update_xaxes(
        type="log", range=[math.log10(MIN_STEPS), math.log10(MAX_STEPS)], title_text="length of the job (steps, logarithmic)",
        tickvals=ticks, ticktext=["100", "1 k", "10 k", "100 k", "1 M", "10 M"],
    )  # fmt: skip
    versus = "what is run today" if info.baseline is not None else "the quickest setting's"
    chart.update_yaxes(range=[0, _HIGHEST], title_text=f"total time (multiple of {versus})", tickformat=".2~f")
    # The fastest step first
    winners = {str(reign.trial["settings_key"]) for reign in info.reigns}
    shown = [
        place
        for place, one in enumerate(info.settings)
        if one.key in winners or one.is_plain or place == info.baseline or place == 0
    ]
    for place, one in enumerate(info.settings):
        like = [other for other in shown if info.settings[other].scope is one.scope]
        dash = DASHES[(like.index(place) if place in like else len(like)) % len(DASHES)]
        chart.add_trace(_curve(place, one, base, steps, dash).update(visible=place in shown))
    ends = [float(chart.data[place].y[-1]) for place in shown]
    heights = [
        min(_NAME_LINES, math.ceil(len(info.settings[place].label) / _NAME_CHARS)) * _NAME_LINE_PX / _UNIT_PX for place in shown
    ]
    places = zip(shown, ends, _apart(ends, heights), strict=True)
    chart.update_layout(annotations=[_line_name(place, info.settings[place], end, at) for place, end, at in places])
    return chart


def break_even_data(info: BreakEvenInfo) -> dict[str, Any]:
    """Returns, as JSON, what a page needs to compute any job."""
    return {
        "settings": [one._asdict() | {"scope": str(one.scope)} for one in info.settings],
        "baseline": info.baseline,
        "baseline_words": info.baseline_words,
        "min_steps": MIN_STEPS,
        "max_steps": MAX_STEPS,
        "samples_per_step": info.samples_per_step,
        "has_tried_others": info.has_tried_others,
        "colors": {str(scope): color for scope, color in SCOPE_COLORS.items()},
        "has_warm": any(one.warm_s is not None and one.scope is not Scope.EAGER for one in info.settings),
    }


def _curve(place: int, one: JobSetting, base: JobSetting, steps: Any, dash: str) -> go.Scatter:
    totals = one.cold_s + steps * one.step_s
    return go.Scatter(
        x=[float(count) for count in steps],
        y=[float(ratio) for ratio in totals / (base.cold_s + steps * base.step_s)],
        mode="lines",
        meta=place,
        name=one.label,
        line={"color": SCOPE_COLORS[one.scope], "width": 3, "dash": dash},
        hovertext=[
            row_hover([one.label, f"{figure(count, 'steps')}: {duration(total)}"])
            for count, total in zip(steps, totals, strict=True)
        ],
        hoverinfo="text",
        hoverlabel={"bordercolor": LINE_COLOR},
    )


def _line_name(place: int, one: JobSetting, end: float, at: float) -> dict[str, Any]:
    """Returns the setting's name next to the end of its line, in the right margin; a page finds it by the annotation's name."""
    lines = textwrap.wrap(one.label, _NAME_CHARS, max_lines=_NAME_LINES, placeholder=" …")
    return {
        "name": f"line-{place}",
        "text": "<br>".join(html.escape(line, quote=False) for line in lines),
        "x": math.log10(MAX_STEPS),
        "y": end,
        "ax": _NAME_OFF_PX,
        "ay": round((end - at) * _UNIT_PX, 1),
        "xanchor": "left",
        "yanchor": "middle",
        "align": "left",
        "showarrow": True,
        "arrowhead": 0,
        "arrowwidth": 1,
        "arrowcolor": SCOPE_COLORS[one.scope],
        "font": {"size": 12},
    }


def _apart(ends: list[float], heights: list[float]) -> list[float]:
    """Returns the centers of the names of lines that end there, in order: each as low as the names below allow."""
    found = dict.fromkeys(range(len(ends)), 0.0)
    lowest = 0.0
    for place in sorted(range(len(ends)), key=lambda one: ends[one]):
        found[place] = max(ends[place], lowest + heights[place] / 2)
        lowest = found[place] + heights[place] / 2
    return list(found.values())
