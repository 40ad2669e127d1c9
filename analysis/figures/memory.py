"""How much of the device's memory each setting needs, and when."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
import plotly.graph_objects as go

from analysis.figures.chart_style import LINE_COLOR, SCOPE_COLORS, or_trials
from analysis.figures.setting_rows import BAR, RowName, notable, row_hover, rows_figure
from analysis.formatting import gib, number
from compile_sweep.schema.settings import Scope

_MOST_BARS = 12
_GIB = 2**30
_RESERVED_COLOR, _COMPILING_COLOR, _POOL_COLOR = "#C48600", "#B8649A", "#4499D0"


class MemoryBar(NamedTuple):
    """One setting, in bytes; unknown values are None. Text is unescaped, as in the record."""

    trial_id: str
    setting_name: str
    scope: Scope
    peak_bytes: float
    """Maximum allocated."""
    reserved_bytes: float | None
    """Maximum reserved by torch's allocator."""
    compiling_bytes: float | None
    """Maximum allocated during the warm-up."""
    pool_bytes: float | None
    """Reserved by the pool of CUDA graphs."""
    on_front: bool


class MemoryInfo(NamedTuple):
    """Contents of the chart."""

    bars: list[MemoryBar]
    """Ascending in peak."""
    device_bytes: float | None
    """Memory of the device; None if it is not known."""
    num_left_out: int
    """Number of settings that are not shown."""


def memory_info(df: pd.DataFrame, device_bytes: float | None = None) -> MemoryInfo:
    """Chooses what to show of the trials that `load` returned: usable ones with a peak, the front's first, then the fastest.

    Args:
        df: The trials.
        device_bytes: Memory of the device they ran on; None if it is not known.
    """
    trials = notable(df).dropna(subset="peak_memory_bytes")
    bars = [
        MemoryBar(
            trial_id=str(row["trial_id"]),
            setting_name=str(row["setting_name"]),
            scope=Scope(row["scope"]),
            peak_bytes=float(row["peak_memory_bytes"]),
            reserved_bytes=number(row["peak_reserved_bytes"]),
            compiling_bytes=number(row["compile_peak_memory_bytes"]),
            pool_bytes=number(row["cudagraph_pool_bytes"]),
            on_front=bool(row["on_front"]),
        )
        for _, row in trials.head(_MOST_BARS).iterrows()
    ]
    return MemoryInfo(sorted(bars, key=lambda bar: bar.peak_bytes), device_bytes, max(0, len(trials) - _MOST_BARS))


@or_trials(memory_info)
def memory_figure(info: MemoryInfo) -> go.Figure:
    """Draws GiB to the right, the least on top; a bar for allocated memory, marks for what is reserved in addition.

    The device's memory is a dashed line if it is known.

    Args:
        info: Result of `memory_info`, or the trials themselves.
    """
    names = [RowName(bar.setting_name, gib(bar.peak_bytes), bar.on_front) for bar in info.bars]
    chart = rows_figure(names, x_title="memory, worst of workers (GiB)", nothing="No usable trial says what memory it needed.")
    if not names:
        return chart
    chart.add_trace(_allocated(info))
    for name, values, symbol, color in (
        ("reserved by the allocator", [bar.reserved_bytes for bar in info.bars], "line-ns-open", _RESERVED_COLOR),
        ("peak of the warm-up", [bar.compiling_bytes for bar in info.bars], "diamond", _COMPILING_COLOR),
        ("CUDA-graph pool", [bar.pool_bytes or None for bar in info.bars], "circle", _POOL_COLOR),
    ):
        if any(value is not None for value in values):
            chart.add_trace(_marks(name, values, symbol, color, info))
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


def _marks(name: str, values: list[float | None], symbol: str, color: str, info: MemoryInfo) -> go.Scatter:
    shown = [(place, value) for place, value in enumerate(values) if value is not None]
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
    share = f", {100 * bar.peak_bytes / device_bytes:.0f} % of the device" if device_bytes else ""
    others = (
        ("reserved by the allocator", bar.reserved_bytes),
        ("peak of the warm-up", bar.compiling_bytes),
        ("CUDA-graph pool", bar.pool_bytes),
    )
    lines = [f"{words} {gib(value)}" for words, value in others if value is not None]
    return row_hover([bar.setting_name, f"allocated {gib(bar.peak_bytes)}{share}", *lines])
