"""Several sweeps of one space with one budget: their fronts in one picture, and how soon each reached its own."""

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analysis.choose.hypervolume import reference_point, volume
from analysis.choose.pareto import DEFAULT_OBJECTIVES, assured, assured_costs, pareto_front, signs_of, usable
from analysis.figures.chart_style import INK, PAPER, base_layout, empty_note
from benchmarks.search.regret_curves import SEARCHER_COLORS, SEARCHER_DASHES

_OTHER_COLORS = ("#56616b", "#CC79A7")
"""Colors of sweeps that are not named after a searcher."""


class SweepPoint(NamedTuple):
    """One usable trial. Text is unescaped, as in the record."""

    compile_s: float
    samples_per_s: float
    assured_per_s: float  # samples per second that the front uses: for a noisy trial the low end of its interval
    label: str
    on_front: bool  # whether it is on the front of its own sweep


class SweepLine(NamedTuple):
    """One sweep."""

    name: str
    points: list[SweepPoint]
    """Ascending in compile time."""
    reached: list[tuple[float, float]]
    """(seconds since the sweep began, percent of the hypervolume of all sweeps together) after each trial, ascending."""
    num_trials: int
    on_common_front: int
    """Number of its trials on the front of all sweeps together."""


class FrontsInfo(NamedTuple):
    """Contents of the chart."""

    title: str
    lines: list[SweepLine]
    ended_s: float = 0.0  # when the last trial ended, in seconds since its sweep began


def fronts_info(sweeps: Mapping[str, tuple[pd.DataFrame, str]], *, title: str = "") -> FrontsInfo:
    """Computes what to show of several sweeps.

    Hypervolume is that of throughput and compile time, relative to a point beyond the worst usable trial of all sweeps by a tenth
    of the range, as in `analysis.reference_point`. For noisy trials it uses the figures that fronts use. A setting that two
    sweeps measured counts as each of them measured it.

    Args:
        sweeps: By name, the trials as `load` returns them, and when the sweep began, in ISO 8601; if that is not known,
            `reached` is empty.
        title: Plain text.
    """
    frames = [df for df, _ in sweeps.values()]
    signs = signs_of(frames[0], DEFAULT_OBJECTIVES) if frames else {}
    candidates = [usable(df, *signs) for df in frames]
    if not sum(map(len, candidates)):
        lines = [SweepLine(name, [], [], len(df), 0) for name, (df, _) in sweeps.items()]
        return FrontsInfo(title, lines)
    reference = reference_point(*frames)
    corner = np.array([sign * reference[name] for name, sign in signs.items()])
    everything = pd.concat(candidates, keys=list(sweeps))
    whole = volume(assured_costs(everything, signs), corner)
    common = pareto_front(everything).index.get_level_values(0)
    lines, last_s = [], 0.0
    for (name, (df, began)), found in zip(sweeps.items(), candidates, strict=True):
        zero = pd.to_datetime(pd.Series(began, index=df.index), utc=True, errors="coerce", format="ISO8601")
        ended = (pd.to_datetime(df["started_at"]) - zero).dt.total_seconds() + df["wall_s"]
        last_s = max([last_s, *map(float, ended.dropna())])
        in_time = found.assign(ended_s=ended[found.index]).dropna(subset="ended_s").sort_values("ended_s", kind="stable")
        costs = assured_costs(in_time, signs)
        shares = [100 * volume(costs[: count + 1], corner) / whole if whole else 100.0 for count in range(len(in_time))]
        reached = [(float(second), share) for second, share in zip(in_time["ended_s"], shares, strict=True)]
        front = set(pareto_front(found).index)
        ascending = found.sort_values("compile_s", kind="stable")
        rates = assured(ascending, "samples_per_s", at_most=False)
        points = [
            SweepPoint(
                float(row["compile_s"]), float(row["samples_per_s"]), float(rate), str(row["setting_name"]), index in front
            )
            for (index, row), rate in zip(ascending.iterrows(), rates, strict=True)
        ]
        lines.append(SweepLine(name, points, reached, len(df), int((common == name).sum())))
    return FrontsInfo(title, lines, last_s)


def share_at(line: SweepLine, seconds: float) -> float:
    """Returns the percentage of the common hypervolume that a sweep had reached after so many seconds."""
    return max((share for ended, share in line.reached if ended <= seconds), default=0.0)


def fronts_figure(info: FrontsInfo) -> go.Figure:
    """Draws the fronts on the left and, on the right, each sweep's share of the common hypervolume over time.

    Trials are where they were measured; a front passes a noisy one at the low end of its interval.
    """
    chart = go.Figure(layout=base_layout(info.title or None))
    if not any(line.points for line in info.lines):
        chart.add_annotation(empty_note("No sweep has a usable trial."))
        return chart
    chart.update_layout(xaxis2=chart.layout.xaxis, yaxis2=chart.layout.yaxis)
    chart.update_layout(
        xaxis={"title": {"text": "cold compile time (s)"}, "domain": [0, 0.56], "rangemode": "tozero"},
        yaxis={"title": {"text": "throughput (samples/s)"}},
        xaxis2={"title": {"text": "time since the sweep began (s)"}, "domain": [0.66, 1], "rangemode": "tozero"},
        yaxis2={"title": {"text": "hypervolume (% of all sweeps')"}, "anchor": "x2", "range": [0, 103]},
        legend={"title": {"text": "searcher&nbsp;&nbsp;"}},
    )
    for number, line in enumerate(info.lines):
        for trace in _traces(line, SEARCHER_COLORS.get(line.name, _OTHER_COLORS[number % 2]), number, info.ended_s):
            chart.add_trace(trace)
    return chart


def _traces(line: SweepLine, color: str, number: int, ended_s: float) -> Sequence[go.Scatter]:
    dash, name = SEARCHER_DASHES.get(line.name, "solid"), html.escape(line.name)
    steps = {"shape": "hv", "color": color, "width": 2, "dash": dash}
    front = [point for point in line.points if point.on_front]
    ends = [(0.0, 0.0), *line.reached]
    ends.append((ended_s, ends[-1][1]))
    return (
        go.Scatter(
            x=[point.compile_s for point in front],
            y=[point.assured_per_s for point in front],
            mode="lines",
            line=steps,
            name=name,
            legendgroup=name,
            hoverinfo="skip",
        ),
        go.Scatter(
            x=[point.compile_s for point in line.points],
            y=[point.samples_per_s for point in line.points],
            mode="markers",
            marker={
                "color": [color if point.on_front else PAPER for point in line.points],
                "symbol": ("circle", "diamond", "square", "triangle-up")[number % 4],
                "size": [12 if point.on_front else 7 for point in line.points],
                "line": {"color": color, "width": 1.5},
            },
            name=name,
            legendgroup=name,
            showlegend=False,
            customdata=[[html.escape(point.label)] for point in line.points],
            hovertemplate="%{customdata[0]}<br>%{y:,.0f} samples/s, %{x:.1f} s<extra>" + name + "</extra>",
            hoverlabel={"font": {"color": INK}},
            cliponaxis=False,
        ),
        go.Scatter(
            x=[second for second, _ in ends],
            y=[share for _, share in ends],
            mode="lines",
            line=steps,
            name=name,
            legendgroup=name,
            showlegend=False,
            xaxis="x2",
            yaxis="y2",
            hovertemplate="%{y:.1f} % after %{x:,.0f} s<extra>" + name + "</extra>",
        ),
    )
