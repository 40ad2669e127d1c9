"""When each trial ran: the machine compiling, timing, otherwise busy, or idle."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.figures.chart_style import LINE_COLOR, PAPER, base_layout, empty_figure, or_trials
from analysis.figures.setting_rows import row_hover
from analysis.formatting import duration, number, text
from compile_sweep.schema.outcome import Phase, Status
from compile_sweep.schema.record import WarmStart

_MOST_TRIALS = 400
_CLOCK_S = 1.5  # starts are recorded to the second: a trial may seem to start this much before its lane is free
_LANE_PX, _AXES_PX = 34, 130
_LONG_PAUSE = 0.1
"""Pauses longer than this fraction of the time with trials are cut out of the chart: a sweep was resumed, perhaps days later."""
_SHORTEST_PAUSE_S = 120.0  # shorter pauses are never cut out

PARTS = {
    "other": ("starting, building, checking", "#9aa0a6"),
    "starting": ("starting", "#9aa0a6"),
    "building": ("building", "#5f6368"),
    "warming-up": ("warm-up, compiling", "#D55E00"),
    "steady": ("timed steps", "#0072B2"),
    "checking": ("checking", "#E69F00"),
    "eager-runs": ("eager runs, once a sweep", "#F0E442"),
    "done": ("publishing, ending", "#c9ccd1"),
    "start": ("warm start", "#009E73"),
    "lost": ("ended without a figure", "#B8649A"),
}
"""Names of parts, which are phases or known without phases, with their legend text and color."""


class Span(NamedTuple):
    """A trial, or a warm start, on its lanes. Text is unescaped, as in the record."""

    trial_id: str
    setting_name: str
    lanes: tuple[int, ...]
    """Its lanes, from 0: its GPUs, or as many as it has workers."""
    start_s: float
    """Seconds since the first span began."""
    parts_s: dict[str, float]
    """Seconds of each part, by its name in `PARTS`; they follow one another in this order."""
    outcome: str
    """ok, or the label."""

    @property
    def end_s(self) -> float:
        """End in seconds since the first span began."""
        return self.start_s + sum(self.parts_s.values())


class Pause(NamedTuple):
    """A long time without a trial on any lane, which the chart leaves out."""

    start_s: float
    length_s: float


class _Begun(NamedTuple):
    """A trial or a warm start with a known start time."""

    at: pd.Timestamp
    parts_s: dict[str, float]
    num_workers: int
    trial_id: str
    label: str
    outcome: str
    gpus: tuple[str, ...]


class _Lanes:
    """Tracks which lanes are in use. GPUs' lanes come first; more are added if none is free."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self.names = list(gpus)
        self._taken: list[list[tuple[float, float]]] = [[] for _ in gpus]

    def place(self, begins: float, ends: float, num_workers: int, gpus: Sequence[str]) -> tuple[int, ...]:
        """Returns the lanes of a trial: its GPUs', or else free ones, the longest idle first."""
        lanes = [self.names.index(gpu) for gpu in gpus] or self._free(begins, ends)[:num_workers]
        while len(lanes) < num_workers and not gpus:
            lanes.append(len(self.names))
            self.names.append("")
            self._taken.append([])
        for lane in lanes:
            self._taken[lane].append((begins, ends))
        return tuple(sorted(lanes))

    def shown_names(self) -> list[str]:
        """Returns the name of each lane."""
        hosts = {name.rpartition(":")[0] for name in self.names if name}
        short = [name.rpartition(":")[2] if len(hosts) == 1 else name for name in self.names]
        return [name or ("other" if hosts else str(lane + 1)) for lane, name in enumerate(short)]

    def _free(self, begins: float, ends: float) -> list[int]:
        idle: list[tuple[float, int]] = []
        for lane, spans in enumerate(self._taken):
            if all(end <= begins + _CLOCK_S or begin >= ends - _CLOCK_S for begin, end in spans):
                idle.append((max((end for begin, end in spans if begin <= begins), default=0.0), lane))
        return [lane for _, lane in sorted(idle)]


def _by_host_and_index(gpu: str) -> tuple[str, int, str]:
    host, _, index = gpu.rpartition(":")
    return host, int(index) if index.isdigit() else 0, index


class TimelineInfo(NamedTuple):
    """Contents of the chart."""

    spans: list[Span]
    lane_names: list[str]
    """Name of each lane: its GPU as host:index, or as index if all are on one host; a number if none is recorded."""
    num_gpus: int
    """Number of lanes that are GPUs; 0 if no record names any."""
    pauses: list[Pause]
    """Long pauses of the sweep, in order. They count neither as idle nor as any other time."""
    busy: float
    """Fraction of the lanes' time with a trial on them."""
    compiling: float
    """Fraction of the lanes' time that was warm-up."""
    measuring: float
    """Fraction of the lanes' time that was warm-up or timed steps."""
    num_left_out: int
    """Number of earlier trials that are not shown, or have no start time."""


def timeline_info(df: pd.DataFrame, starts: Sequence[WarmStart] = ()) -> TimelineInfo:
    """Computes what to show of all attempts, as `load(…, all_attempts=True)` returns them, and of warm starts.

    A record says when its trial began, how long it took, and on which GPUs. A trial without GPUs, on CPUs or dead before it had
    any, gets a free lane, in the order of the starts. The duration of a trial's parts is measured; the rest of its time is
    assumed to come first.
    """
    begun = [
        _Begun(row["started_at"], _parts(row), int(row["num_workers"]), str(row["trial_id"]), str(row["setting_name"]),
               _outcome(row), tuple(row["gpus"]))
        for _, row in df.dropna(subset="started_at").iterrows()
    ]  # fmt: skip
    for start in starts:
        at = pd.to_datetime(start.started_at, utc=True, errors="coerce", format="ISO8601")
        if not pd.isna(at):
            parts = {"start": max(start.wall_s, 0.0)}
            outcome = start.label or str(Status.OK)
            begun.append(_Begun(at, parts, start.num_workers, start.trial_id, start.settings_key, outcome, tuple(start.gpus)))
    begun.sort(key=lambda one: one.at)
    shown = begun[-_MOST_TRIALS:]
    lanes = _Lanes(sorted({gpu for one in shown for gpu in one.gpus}, key=_by_host_and_index))
    placed: dict[int, tuple[int, ...]] = {}
    for named in (True, False):  # trials without a GPU fill the gaps between the others
        for number_, one in enumerate(shown):
            if bool(one.gpus) == named:
                since = (one.at - shown[0].at).total_seconds()
                placed[number_] = lanes.place(since, since + sum(one.parts_s.values()), one.num_workers, one.gpus)
    spans = [
        Span(one.trial_id, one.label, placed[place], (one.at - shown[0].at).total_seconds(), one.parts_s, one.outcome)
        for place, one in enumerate(shown)
    ]
    pauses = long_pauses(spans)
    length = max((span.end_s for span in spans), default=0.0) - sum(pause.length_s for pause in pauses)
    whole = len(lanes.names) * length
    return TimelineInfo(
        spans=spans,
        lane_names=lanes.shown_names(),
        num_gpus=sum(bool(name) for name in lanes.names),
        pauses=pauses,
        busy=min(1.0, sum(sum(span.parts_s.values()) * len(span.lanes) for span in spans) / whole) if whole else 0.0,
        compiling=_share(spans, whole, Phase.WARMING_UP),
        measuring=_share(spans, whole, Phase.WARMING_UP, Phase.STEADY),
        num_left_out=len(df) + len(starts) - len(shown),
    )


def long_pauses(spans: Sequence[Span]) -> list[Pause]:
    """Returns the pauses that are long compared with the time in which trials ran."""
    pauses: list[Pause] = []
    end_s = busy_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.start_s > end_s:
            pauses.append(Pause(end_s, span.start_s - end_s))
        busy_s += max(0.0, span.end_s - max(end_s, span.start_s))
        end_s = max(end_s, span.end_s)
    return [pause for pause in pauses if pause.length_s > max(_SHORTEST_PAUSE_S, _LONG_PAUSE * busy_s)]


def _shown_s(at_s: float, pauses: Sequence[Pause]) -> float:
    """Returns where the chart shows a moment, in seconds without the long pauses before it."""
    return at_s - sum(pause.length_s for pause in pauses if pause.start_s < at_s)


def _share(spans: Sequence[Span], whole: float, *parts: str) -> float:
    return sum(span.parts_s.get(part, 0.0) * len(span.lanes) for span in spans for part in parts) / whole if whole else 0.0


@or_trials(timeline_info)
def timeline_figure(info: TimelineInfo) -> go.Figure:
    """Draws minutes to the right, one lane per worker, the first on top; gaps are idle time, dashed lines are long pauses."""
    if not info.spans:
        return empty_figure("No trial says when it began.")
    chart = go.Figure(layout=base_layout())
    chart.update_layout(
        meta={"kind": "lanes"},
        barmode="overlay",
        height=_AXES_PX + _LANE_PX * len(info.lane_names),
        margin={"l": 60, "t": 56, "b": 60},
        legend={"traceorder": "normal", "title": {"text": ""}, "y": 1.02},
    )
    since = "minutes since the first trial" + (", without pauses" if info.pauses else "")
    chart.update_xaxes(title_text=since, rangemode="tozero")
    for pause in info.pauses:
        at = _shown_s(pause.start_s, info.pauses) / 60
        chart.add_vline(at, line={"color": LINE_COLOR, "width": 2, "dash": "dash"})
    chart.update_yaxes(
        range=[len(info.lane_names) - 0.4, -0.6],
        tickvals=list(range(len(info.lane_names))),
        ticktext=[html.escape(name, quote=False) for name in info.lane_names],
        title_text="GPU" if info.num_gpus else "lane",
        tickformat=None,
    )
    for part in PARTS:
        if any(span.parts_s.get(part) for span in info.spans):
            chart.add_trace(_trace(part, info))
    return chart


def _parts(row: pd.Series) -> dict[str, float]:
    wall_s = number(row["wall_s"]) or 0.0
    warmup_s = number(row["warmup_s"]) or number(row["warm_warmup_s"])
    if warmup_s is None:
        return {"lost": wall_s}
    if row["phases_s"]:
        return dict(row["phases_s"])
    warmup_s = min(warmup_s, wall_s)
    timed_s = min((sum(row["step_ms"]) + sum(row["eager_step_ms"])) / 1e3, wall_s - warmup_s)
    return {"other": wall_s - warmup_s - timed_s, Phase.WARMING_UP: warmup_s, Phase.STEADY: timed_s}


def _outcome(row: pd.Series) -> str:
    return str(Status.OK) if row["status"] == Status.OK else text(row["label"]) or str(row["status"])


def _trace(part: str, info: TimelineInfo) -> go.Bar:
    title, color = PARTS[part]
    bars = []
    for span in info.spans:
        before = 0.0
        for name, seconds in span.parts_s.items():
            if name == part and seconds > 0:
                begins = _shown_s(span.start_s, info.pauses) + before
                bars += [(span, lane, begins / 60, seconds / 60) for lane in span.lanes]
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
            span.setting_name,
            f"{title}: {duration(seconds)} of {duration(sum(span.parts_s.values()))}",
            f"began after {duration(span.start_s)}",
        ]
    )
