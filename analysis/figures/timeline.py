"""When which trial ran: the machine compiling, timing, busy otherwise, or idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.figures.chart_style import LINE_COLOR, PAPER, base_layout, empty_figure
from analysis.figures.setting_rows import row_hover
from analysis.formatting import duration, number, text
from orchestrator.records import Status, WarmStart

_MOST_TRIALS = 400
_CLOCK_S = 1.5
"""Starts are recorded to the second: one that seems to come this much before its lane is free comes after."""
_LANE_PX, _AXES_PX = 34, 130

PARTS = {
    "other": ("starting, building, checking", "#9aa0a6"),
    "warm-up": ("warm-up, compiling", "#D55E00"),
    "timing": ("timed steps", "#0072B2"),
    "start": ("warm start", "#009E73"),
    "lost": ("ended without a figure", "#B8649A"),
}
"""Name of a part → what the legend calls it, and its colour."""


class Span(NamedTuple):
    """A trial, or a warm start, on its lane. Text is as it stands in the record, not escaped."""

    trial_id: str
    settings_label: str
    lanes: tuple[int, ...]
    """The lanes it has, from 0: as many as it has workers."""
    start_s: float
    """Seconds since the first one began."""
    parts_s: dict[str, float]
    """Seconds of each part, by its name in `PARTS`; they follow one another in this order."""
    outcome: str
    """ok, or the label."""

    @property
    def end_s(self) -> float:
        """Seconds since the first one began."""
        return self.start_s + sum(self.parts_s.values())


class TimelineInfo(NamedTuple):
    """What the chart shows."""

    spans: list[Span]
    """In the order they began."""
    num_lanes: int
    """The most workers that were at work at a time."""
    busy: float
    """Share of the lanes' time in which there was a trial on them."""
    compiling: float
    """Share of it that was warm-up."""
    num_left_out: int
    """Earlier trials for which there is no room, or which do not say when they began."""


def timeline_info(df: pd.DataFrame, starts: Sequence[WarmStart] = ()) -> TimelineInfo:
    """What to show of all attempts, as `load(…, all_attempts=True)` returns them, and of warm starts.

    A record says when its trial began and how long it took, not on which GPU: lanes are handed out in the order of the
    starts. How long the parts of a trial took is measured; that the rest came first is taken for granted.
    """
    began = [(row["started_at"], _parts(row), row) for _, row in df.dropna(subset="started_at").iterrows()]
    begun: list[tuple[pd.Timestamp, float, dict[str, float], int, str, str, str]] = [
        (at, sum(parts.values()), parts, int(row["num_workers"]), str(row["trial_id"]), str(row["settings_label"]), _outcome(row))
        for at, parts, row in began
    ]
    for start in starts:
        at = pd.to_datetime(start.started_at, utc=True, errors="coerce", format="ISO8601")
        if not pd.isna(at):
            parts = {"start": max(start.wall_s, 0.0)}
            begun.append((at, start.wall_s, parts, start.num_workers, start.trial_id, start.settings_key, start.label or "ok"))
    begun.sort(key=lambda one: one[0])
    shown = begun[-_MOST_TRIALS:]
    spans: list[Span] = []
    free_at: list[float] = []
    for at, seconds, parts, num_workers, trial_id, label, outcome in shown:
        since = (at - shown[0][0]).total_seconds()
        lanes = _lanes(free_at, since, num_workers)
        for lane in lanes:
            free_at[lane] = since + seconds
        spans.append(Span(trial_id, label, lanes, since, parts, outcome))
    length = max((span.end_s for span in spans), default=0.0)
    whole = len(free_at) * length
    return TimelineInfo(
        spans=spans,
        num_lanes=len(free_at),
        busy=min(1.0, sum(sum(span.parts_s.values()) * len(span.lanes) for span in spans) / whole) if whole else 0.0,
        compiling=sum(span.parts_s.get("warm-up", 0.0) * len(span.lanes) for span in spans) / whole if whole else 0.0,
        num_left_out=len(df) + len(starts) - len(shown),
    )


def timeline_figure(info: TimelineInfo) -> go.Figure:
    """The chart: minutes to the right, a lane a worker's place, the first on top; what is empty is idle.

    Args:
        info: what `timeline_info` returned.
    """
    if not info.spans:
        return empty_figure("No trial says when it began.")
    chart = go.Figure(layout=base_layout())
    chart.update_layout(
        meta={"kind": "lanes"},
        barmode="overlay",
        height=_AXES_PX + _LANE_PX * info.num_lanes,
        margin={"l": 60, "t": 56, "b": 60},
        legend={"traceorder": "normal", "title": {"text": ""}, "y": 1.02},
    )
    chart.update_xaxes(title_text="minutes since the first trial shown began", rangemode="tozero")
    chart.update_yaxes(
        range=[info.num_lanes - 0.4, -0.6],
        tickvals=list(range(info.num_lanes)),
        ticktext=[str(lane + 1) for lane in range(info.num_lanes)],
        title_text="lane",
        tickformat=None,
    )
    for part in PARTS:
        if any(span.parts_s.get(part) for span in info.spans):
            chart.add_trace(_trace(part, info))
    return chart


def _parts(row: pd.Series) -> dict[str, float]:
    """How long the trial was at what, in the order in which that happened."""
    wall_s = number(row["wall_s"]) or 0.0
    warmup_s = number(row["warmup_s"]) or number(row["warm_warmup_s"])
    if warmup_s is None:
        return {"lost": wall_s}
    warmup_s = min(warmup_s, wall_s)
    timed_s = min((sum(row["step_ms"]) + sum(row["eager_step_ms"])) / 1e3, wall_s - warmup_s)
    return {"other": wall_s - warmup_s - timed_s, "warm-up": warmup_s, "timing": timed_s}


def _outcome(row: pd.Series) -> str:
    return str(Status.OK) if row["status"] == Status.OK else text(row["label"]) or str(row["status"])


def _lanes(free_at: list[float], since: float, num_workers: int) -> tuple[int, ...]:
    """The lanes a trial that begins now takes: free ones first, the longest idle first; more are added where none is."""
    free = sorted((end, lane) for lane, end in enumerate(free_at) if end <= since + _CLOCK_S)
    taken = [lane for _, lane in free[:num_workers]]
    while len(taken) < num_workers:
        free_at.append(0.0)
        taken.append(len(free_at) - 1)
    return tuple(sorted(taken))


def _trace(part: str, info: TimelineInfo) -> go.Bar:
    title, color = PARTS[part]
    bars = []
    for span in info.spans:
        before = 0.0
        for name, seconds in span.parts_s.items():
            if name == part and seconds > 0:
                bars += [(span, lane, (span.start_s + before) / 60, seconds / 60) for lane in span.lanes]
            before += seconds
    return go.Bar(
        orientation="h",
        name=title,
        base=[begin for _, _, begin, _ in bars],
        x=[length for _, _, _, length in bars],
        y=[lane for _, lane, _, _ in bars],
        width=0.72,
        marker={"color": color, "line": {"color": PAPER, "width": 1}},
        hovertext=[_hover(span, title, 60 * length) for span, _, _, length in bars],
        hoverinfo="text",
        hoverlabel={"bordercolor": LINE_COLOR},
    )


def _hover(span: Span, title: str, seconds: float) -> str:
    return row_hover(
        [
            f"{span.trial_id}: {span.outcome}",
            span.settings_label,
            f"{title}: {duration(seconds)} of {duration(sum(span.parts_s.values()))}",
            f"began after {duration(span.start_s)}",
        ]
    )
