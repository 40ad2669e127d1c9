"""The report's charts, in their order on the page."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import pandas as pd

from analysis import figures as charts
from analysis.formatting import duration, number, percent
from analysis.load import SweepInfo
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import WarmStart


class Drawn(Protocol):
    """The part of a plotly figure's interface that is used here."""

    def to_json(self) -> str: ...


class Chart(NamedTuple):
    """One chart of the page, with the text around it."""

    name: str  # ID of its section, and name of its figure in the page's data
    title: str
    short_title: str
    description: str  # description for readers who cannot see the chart
    note: str
    figure: dict[str, Any]
    filter: bool = False  # whether the filter of trials applies to it
    is_wide: bool = False  # whether it scrolls sideways on a narrow screen instead of shrinking
    is_detail: bool = False  # whether it belongs to the details, rather than to the explanation of settings' speed


class Fronts(NamedTuple):
    """The front over each pair of axes with figures."""

    figures: dict[str, dict[str, Any]]  # `front PRICE GAIN` → the figure
    prices: list[tuple[str, str]]
    gains: list[tuple[str, str]]  # name of an axis, and its label on the page
    has_points: bool
    has_ties: bool
    has_hollow: bool
    num_left_out: int


def fronts(df: pd.DataFrame, attempts: pd.DataFrame) -> Fronts:
    """Draws the front of the trials over each pair of axes; takes trials and attempts as `load` returns them."""
    prices = charts.axes_with_figures(df, charts.PRICES)
    gains = charts.axes_with_figures(df, charts.GAINS)
    infos = {
        (price, gain): charts.pareto_info(df, price=price, gain=gain, attempts=attempts) for price in prices for gain in gains
    }
    return Fronts(
        figures={f"front {price} {gain}": as_json(charts.pareto_figure(info)) for (price, gain), info in infos.items()},
        prices=[(name, charts.PRICES[name].choice) for name in prices],
        gains=[(name, charts.GAINS[name].choice) for name in gains],
        has_points=any(info.points for info in infos.values()),
        has_ties=any(info.ties for info in infos.values()),
        has_hollow=any(point.status is not Status.OK for info in infos.values() for point in info.points),
        num_left_out=max(info.num_left_out for info in infos.values()),
    )


def page_charts(df: pd.DataFrame, attempts: pd.DataFrame, starts: Sequence[WarmStart], sweep: SweepInfo) -> list[Chart]:
    """Returns the charts below the verdict that have something to show, in order."""
    device_bytes = number(sweep.environment.get("gpu_memory_bytes"))
    return [
        *_parallel(df), *_effects(df, attempts), *_regions(df, attempts), *_phases(df), *_step_times(df),
        *_memory(df, device_bytes), *_batches(df, device_bytes), *_timeline(attempts, starts), *_caches(df),
    ]  # fmt: skip


def as_json(figure: Drawn) -> dict[str, Any]:
    """Returns a figure in the form that plotly's script takes."""
    drawn: dict[str, Any] = json.loads(figure.to_json())
    return drawn


def _phases(df: pd.DataFrame) -> Iterator[Chart]:
    if (info := charts.compile_phases_info(df)).bars:
        yield Chart(
            "phases", "Where the compile time goes", "Compile time",
            "Cold compile time of each usable setting by phase; the table has the seconds",
            f"Usable settings, the quickest to compile on top; ★ is on the front.{_no_room(info.num_left_out)}",
            as_json(charts.compile_phases_figure(info)),
        )  # fmt: skip


def _step_times(df: pd.DataFrame) -> Iterator[Chart]:
    if (info := charts.step_times_info(df)).rows:
        yield Chart(
            "steps", "Distribution of step times", "Step times", "Timed steps of each usable setting, with their quartiles",
            "Each point is a step; the box holds half of them, its whiskers nine in ten. Batches of different lengths take "
            "different times, so a wide box alone does not mean noise; the interval in the hover shows that."
            f"{_no_room(info.num_left_out)}",
            as_json(charts.step_times_figure(info)),
        )  # fmt: skip


def _limit(device_bytes: float | None) -> str:
    return " The dashed line is the device's whole memory." if device_bytes else ""


def _memory(df: pd.DataFrame, device_bytes: float | None) -> Iterator[Chart]:
    if (info := charts.memory_info(df, device_bytes)).bars:
        yield Chart(
            "memory", "Memory", "Memory", "Peak memory of each usable setting; the table has the figures",
            "Bars show the most that was allocated at once; the allocator reserves more than it hands out."
            f"{_limit(info.device_bytes)}{_no_room(info.num_left_out)}",
            as_json(charts.memory_figure(info)),
        )  # fmt: skip


def _batches(df: pd.DataFrame, device_bytes: float | None) -> Iterator[Chart]:
    if (info := charts.batch_memory_info(df, device_bytes)).curves:
        yield Chart(
            "batches", "Memory by batch size", "Batch size", "Peak memory of a step by batch size; each trial has the figures",
            "Each line is a setting, by its ID; a cross is a batch that did not fit. Two training steps were made with each "
            f"size, on the longest length.{_limit(info.device_bytes)}{_no_room(info.num_left_out)}",
            as_json(charts.batch_memory_figure(info)),
        )  # fmt: skip


def _parallel(df: pd.DataFrame) -> Iterator[Chart]:
    info = charts.parallel_info(df)
    if len(info.axes) < 2 or len(info.lines) < 2:
        return
    yield Chart(
        "parallel", "Choices and their results", "Choices", "Each usable setting as a line through its choices and figures",
        "Each line is a setting, colored by scope as in the front; thick ones are on the front. A click on a choice, or the "
        f"filter, dims the others, here and in the table.{_no_room(info.num_left_out)}",
        as_json(charts.parallel_figure(info)), filter=True, is_wide=True,
    )  # fmt: skip


def _effects(df: pd.DataFrame, attempts: pd.DataFrame) -> Iterator[Chart]:
    if (info := charts.effects_info(df, attempts)).effects:
        yield Chart(
            "effects", "What one change is worth", "One change", "Change of throughput by changing one field",
            "Each row is the mean over all pairs of settings that differ only in this field. The name also says what the change "
            "costs in cold compile time, estimated for warm trials; the hover says after how many steps that pays off, and "
            f"shows the interval, which the axis may cut off.{_no_room(info.num_left_out)}",
            as_json(charts.effects_figure(info)),
        )  # fmt: skip


def _regions(df: pd.DataFrame, attempts: pd.DataFrame) -> Iterator[Chart]:
    if (info := charts.region_prices_info(df, attempts)).effects:
        yield Chart(
            "regions", "What each part of the model is worth", "Parts",
            "Change of throughput by compiling one part of the model differently",
            "From modular settings: compiling one part, or the optimizer, differently from the rest, and the seconds of cold "
            f"compiling that this adds or saves.{_no_room(info.num_left_out)}",
            as_json(charts.effects_figure(info)),
        )  # fmt: skip


def _timeline(attempts: pd.DataFrame, starts: Sequence[WarmStart]) -> Iterator[Chart]:
    info = charts.timeline_info(attempts, starts)
    if not info.spans:
        return
    left_out = f" {info.num_left_out} earlier ones are left out." if info.num_left_out else ""
    busy = f"Trials ran {percent(info.busy)} of the time: {percent(info.compiling)} warming up, "
    busy += f"{percent(info.measuring - info.compiling)} timing steps, the rest starting, building and checking"
    if info.num_gpus:
        lanes = f"{info.num_gpus} GPUs" if info.num_gpus > 1 else "One GPU"
        elsewhere = ", or on another lane" if len(info.lane_names) > info.num_gpus else ""
        whose = f"Trials without a recorded GPU are placed where there was room{elsewhere}."
    else:
        count = len(info.lane_names)
        lanes = f"{count} lanes, one for each worker running at the same time" if count > 1 else "One lane: one worker at a time"
        whose = "Records name no GPU, so lanes are assigned in order."
    paused_s = sum(pause.length_s for pause in info.pauses)
    cut = f" Dashed lines are pauses without any trial, {duration(paused_s)} in all, which are not counted." if paused_s else ""
    yield Chart(
        "timeline", "What the machine did when", "Timeline", "Trials over time, by what they were doing",
        f"{lanes}. {busy}; gaps are idle time.{cut} {whose}{left_out}",
        as_json(charts.timeline_figure(info)), is_detail=True,
    )  # fmt: skip


def _caches(df: pd.DataFrame) -> Iterator[Chart]:
    if (info := charts.cache_info(df)).rows:
        yield Chart(
            "caches", "What compile caches save", "Caches",
            "Cold compile time of each setting, and what a warm start takes instead",
            "A cold start compiles everything. A warm start, in a fresh process with the setting's own artifacts, restores them "
            "and compiles the rest. What both spend anyway, on imports, building the model and the warm-up's steps, is left out "
            f"here but included in the table's warm start. The hover has hits and misses.{_no_room(info.num_left_out)}",
            as_json(charts.cache_figure(info)), is_detail=True,
        )  # fmt: skip


def _no_room(num_left_out: int) -> str:
    return f" {num_left_out} more are not shown." if num_left_out else ""
