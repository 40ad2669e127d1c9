"""How much of the device's memory each setting needs, and when; and by batch size."""

from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.figures.chart_style import DASHES, LINE_COLOR, SCOPE_COLORS, base_layout, empty_figure, or_trials
from analysis.figures.setting_rows import BAR, RowName, notable, row_hover, rows_figure
from analysis.formatting import gib, number
from compile_sweep.schema.record import by_size
from compile_sweep.schema.settings import Scope

_MOST_BARS = 12
_MOST_CURVES = 6
_BATCHES_PX = 480
_GIB = 2**30
_MARKS = {
    "reserved by the allocator": ("peak_reserved_bytes", "line-ns-open", "#C48600"),
    "peak of the warm-up": ("compile_peak_memory_bytes", "diamond", "#B8649A"),
    "CUDA-graph pool": ("cudagraph_pool_bytes", "circle", "#4499D0"),
}
"""What is marked besides the bar, with its column, symbol and color."""


class MemoryBar(NamedTuple):
    """One setting, in bytes. Text is unescaped, as in the record."""

    trial_id: str
    setting_name: str
    peak_bytes: float
    """Maximum allocated."""
    marks: dict[str, float]
    """What is known of what `_MARKS` names."""
    on_front: bool


class MemoryInfo(NamedTuple):
    """Contents of the chart."""

    bars: list[MemoryBar]
    """Ascending in peak."""
    device_bytes: float | None
    num_left_out: int


def memory_info(df: pd.DataFrame, device_bytes: float | None = None) -> MemoryInfo:
    """Chooses what to show of the trials that `load` returned: usable ones with a peak, the front's first, then the fastest."""
    trials = notable(df).dropna(subset="peak_memory_bytes")
    bars = [
        MemoryBar(
            trial_id=str(row["trial_id"]),
            setting_name=str(row["setting_name"]),
            peak_bytes=float(row["peak_memory_bytes"]),
            marks={name: value for name, (column, *_) in _MARKS.items() if (value := number(row[column])) is not None},
            on_front=bool(row["on_front"]),
        )
        for _, row in trials.head(_MOST_BARS).iterrows()
    ]
    return MemoryInfo(sorted(bars, key=lambda bar: bar.peak_bytes), device_bytes, max(0, len(trials) - _MOST_BARS))


@or_trials(memory_info)
def memory_figure(info: MemoryInfo) -> go.Figure:
    """Draws GiB to the right, the least on top; a bar for allocated memory, marks for what is reserved in addition.

    The device's memory is a dashed line if it is known.
    """
    names = [RowName(bar.setting_name, gib(bar.peak_bytes), bar.on_front) for bar in info.bars]
    chart = rows_figure(names, x_title="memory, worst of workers (GiB)", nothing="No usable trial says what memory it needed.")
    if not names:
        return chart
    chart.add_trace(_allocated(info))
    chart.add_traces([_marks(name, info) for name in _MARKS if any(bar.marks.get(name) for bar in info.bars)])
    if info.device_bytes:
        limit = info.device_bytes / _GIB
        chart.add_vline(x=limit, line={"color": LINE_COLOR, "dash": "dash", "width": 1.5})
        chart.update_xaxes(range=[0, 1.04 * limit])
    return chart


def _allocated(info: MemoryInfo) -> go.Bar:
    return go.Bar(
        orientation="h",
        name="allocated",
        x=[bar.peak_bytes / _GIB for bar in info.bars],
        y=list(range(len(info.bars))),
        width=BAR,
        marker={"color": SCOPE_COLORS[Scope.FULL]},
        hovertext=[_hover(bar, info.device_bytes) for bar in info.bars],
        hoverinfo="text",
    )


def _marks(name: str, info: MemoryInfo) -> go.Scatter:
    _, symbol, color = _MARKS[name]
    shown = [(place, value) for place, bar in enumerate(info.bars) if (value := bar.marks.get(name))]
    return go.Scatter(
        name=name,
        x=[value / _GIB for _, value in shown],
        y=[place for place, _ in shown],
        mode="markers",
        marker={
            "color": color,
            "symbol": symbol,
            "size": 15 if symbol.startswith("line") else 9,
            "line": {"width": 3, "color": color},
        },
        hovertext=[row_hover([f"{name}: {gib(value)}", info.bars[place].setting_name]) for place, value in shown],
        hoverinfo="text",
    )


def _hover(bar: MemoryBar, device_bytes: float | None) -> str:
    share = f", {100 * bar.peak_bytes / device_bytes:.0f}% of the device" if device_bytes else ""
    lines = [f"{words} {gib(value)}" for words, value in bar.marks.items()]
    return row_hover([bar.setting_name, f"allocated {gib(bar.peak_bytes)}{share}", *lines])


class BatchCurve(NamedTuple):
    """Peak memory of one setting by batch size. Text is unescaped, as in the record."""

    setting_id: str
    setting_name: str
    scope: Scope
    fitting: list[tuple[int, float]]
    """Sizes that fit, ascending, with their bytes."""
    too_large: list[int]


class BatchMemoryInfo(NamedTuple):
    """Contents of the chart."""

    curves: list[BatchCurve]
    """The front's settings first, then the fastest."""
    device_bytes: float | None
    num_left_out: int


def batch_memory_info(df: pd.DataFrame, device_bytes: float | None = None) -> BatchMemoryInfo:
    """Chooses what to show of the trials that `load` returned: usable ones for which the largest batch was looked for."""
    trials = notable(df)
    curves = [
        BatchCurve(
            setting_id=str(row["setting_id"]),
            setting_name=str(row["setting_name"]),
            scope=Scope(row["scope"]),
            fitting=[(size, peak) for size, peak in tried if peak is not None],
            too_large=[size for size, peak in tried if peak is None],
        )
        for _, row in trials.iterrows()
        if (tried := by_size(row["batch_peak_bytes"]))
    ]
    return BatchMemoryInfo(curves[:_MOST_CURVES], device_bytes, max(0, len(curves) - _MOST_CURVES))


@or_trials(batch_memory_info)
def batch_memory_figure(info: BatchMemoryInfo) -> go.Figure:
    """Draws batch sizes to the right and GiB upwards; sizes that do not fit are crosses at the device's memory."""
    if not info.curves:
        return empty_figure("The largest batch was not looked for (--largest-batch).")
    chart = go.Figure(layout=base_layout())
    sizes = [size for curve in info.curves for size in (*(size for size, _ in curve.fitting), *curve.too_large)]
    highest = max((peak for curve in info.curves for _, peak in curve.fitting), default=0.0)
    limit = (info.device_bytes or 1.05 * highest or _GIB) / _GIB
    chart.update_layout(height=_BATCHES_PX, legend={"title": {"text": ""}})
    chart.update_xaxes(range=[0, 1.06 * max(sizes)], title_text="batch size (samples)")
    chart.update_yaxes(range=[0, 1.1 * max(limit, highest / _GIB)], title_text="peak memory (GiB)")
    for place, curve in enumerate(info.curves):
        before = sum(other.scope is curve.scope for other in info.curves[:place])
        chart.add_traces([_curve(curve, DASHES[before % len(DASHES)]), _crosses(curve, limit)])
    if info.device_bytes:
        chart.add_hline(y=limit, line={"color": LINE_COLOR, "dash": "dash", "width": 1.5})
    return chart


def _curve(curve: BatchCurve, dash: str) -> go.Scatter:
    color = SCOPE_COLORS[curve.scope]
    return go.Scatter(
        x=[size for size, _ in curve.fitting],
        y=[peak / _GIB for _, peak in curve.fitting],
        mode="lines+markers",
        name=f"{curve.setting_id} {curve.scope}",
        legendgroup=curve.setting_id,
        line={"color": color, "width": 2, "dash": dash},
        marker={"color": color, "size": 8},
        hovertext=[row_hover([curve.setting_name, f"batches of {size}: {gib(peak)}"]) for size, peak in curve.fitting],
        hoverinfo="text",
        hoverlabel={"bordercolor": color},
    )


def _crosses(curve: BatchCurve, limit: float) -> go.Scatter:
    color = SCOPE_COLORS[curve.scope]
    return go.Scatter(
        x=curve.too_large,
        y=[limit] * len(curve.too_large),
        mode="markers",
        legendgroup=curve.setting_id,
        showlegend=False,
        marker={"color": color, "symbol": "x-thin-open", "size": 10, "line": {"width": 2.5, "color": color}},
        hovertext=[row_hover([curve.setting_name, f"batches of {size} do not fit"]) for size in curve.too_large],
        hoverinfo="text",
        hoverlabel={"bordercolor": color},
    )
