"""What the chart shows, tested by its info, and what only the figure decides: escaping, symbols, label positions."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.figures.callouts import Axes, Box, Callout, Label, callout_annotations, place_labels
from compile_sweep.schema.outcome import Status


def overlap(one: Box, other: Box) -> float:
    """The area that both cover, in square pixels."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    return width * height if width > 0 and height > 0 else 0.0


def test_the_chart_shows_each_trial_that_has_figures(make_sweep: MakeSweep) -> None:
    info = analysis.figures.pareto_info(analysis.load(make_sweep()))
    assert [point.trial_id for point in info.front] == [
        "eager-max",
        "eager-longest",
        "regional",
        "regional-auto",
        "buckets",
    ]
    assert {point.trial_id for point in info.points if not point.on_front} == {"full", "mark"}
    assert [point.trial_id for point in info.points if point.is_knee] == ["regional-auto"]


def test_a_trial_that_is_not_ok_is_hollow_and_carries_its_label(make_sweep: MakeSweep) -> None:
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep()))
    symbols = [symbol for trace in figure.data if trace.hovertext for symbol in trace.marker.symbol]
    assert [symbol for symbol in symbols if symbol.endswith("-open")] == ["circle-open"]
    assert "nan" in [annotation.text for annotation in figure.layout.annotations]
    assert any("infeasible: nan" in text for trace in figure.data for text in trace.hovertext or ())


def test_the_front_passes_a_noisy_trial_at_the_low_end_of_its_interval(make_sweep: MakeSweep) -> None:
    noisy = trial("scope=regional", 850, 60, stable=False, samples_per_s_ci95=(800.0, 930.0))
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep([trial("scope=full", 700, 50), noisy])))
    (line,) = (trace for trace in figure.data if trace.name == "Pareto front")
    assert list(line.y)[1:] == [700, 800, 800]
    assert any(850 in trace.y for trace in figure.data if trace.hovertext)
    assert any("noisy" in text for trace in figure.data for text in trace.hovertext or ())


def test_an_interval_that_nothing_bounds_upwards_has_no_bar_above_and_is_told_in_the_hover(make_sweep: MakeSweep) -> None:
    ends = {"stable": False, "samples_per_s_ci95": (204.6, math.inf), "step_ms_ci95": (100.0, math.inf)}
    df = analysis.load(make_sweep([trial("scope=eager", 500, 1), trial("scope=full", 577, 9, **ends)]))
    info = analysis.figures.pareto_info(df)
    point = next(one for one in info.points if one.is_noisy)
    assert (point.above, point.below) == (0.0, pytest.approx(577 - 204.6))
    figure = analysis.figures.pareto_figure(info)
    assert any("577 samples/s (95%: 205 or more)" in text for trace in figure.data for text in trace.hovertext or ())
    steps = analysis.figures.step_times_figure(analysis.figures.step_times_info(df))
    assert any("(95%: 100 or more)" in text for trace in steps.data if (text := trace.hovertext))
    for drawn in (figure, steps):
        assert not re.search(r"\b(Infinity|NaN|inf|nan)\b", drawn.to_json())


@pytest.mark.parametrize(("fastest", "written"), [(9e5, ",~r"), (2e9, "~s")])
def test_large_figures_are_written_short_at_the_axis(fastest: float, written: str, make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([trial("scope=eager", fastest / 2, 1), trial("scope=full", fastest, 9)]))
    assert analysis.figures.pareto_figure(df).layout.yaxis.tickformat == written


def test_next_to_no_compile_time_is_drawn_at_the_axis_floor_and_says_so(make_sweep: MakeSweep) -> None:
    info = analysis.figures.pareto_info(analysis.load(make_sweep([trial("scope=eager", 500, -0.03)])))
    assert (info.points[0].x, info.points[0].shown_x) == (-0.03, 0.1)
    figure = analysis.figures.pareto_figure(info)
    assert "≤ 0.1" in figure.layout.xaxis.ticktext
    assert any("drawn at 0.1 s" in text for trace in figure.data for text in trace.hovertext or ())


def test_the_axis_begins_a_decade_under_the_quickest_compile(make_sweep: MakeSweep) -> None:
    info = analysis.figures.pareto_info(analysis.load(make_sweep()))
    assert info.floor == 1
    assert {point.trial_id for point in info.points if point.shown_x == 1} == {"eager-max", "eager-longest"}


def test_a_crowded_front_has_ids_instead_of_names(make_sweep: MakeSweep) -> None:
    records = [trial(f"scope=eager,padding=longest,pad_multiple={n}", 500 + n, n) for n in range(1, 12)]
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep(records)))
    assert [annotation.text for annotation in figure.layout.annotations] == [f"A{n}" for n in range(1, 12)]


def test_the_hover_holds_the_whole_setting_and_the_main_figures(make_sweep: MakeSweep) -> None:
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep()))
    hover = next(text for trace in figure.data for text in trace.hovertext or () if "buckets of 32" in text)
    words = hover.replace("<br>", " ")
    for expected in (
        "bucket_size=32",
        "optimizer=compiled",
        "1,046 samples/s",
        "440 s",
        "18.0 GiB",
        "numerics ok",
        "ms",
    ):
        assert expected in words


def test_text_of_a_record_is_never_mark_up_in_the_chart(make_sweep: MakeSweep) -> None:
    hostile = '<a href="javascript:alert(1)">x</a>'
    record = trial("scope=full", 700, 50, status=Status.INFEASIBLE, label=hostile, numerics={"status": hostile})
    text = json.dumps(analysis.figures.pareto_figure(analysis.load(make_sweep([record]))).to_plotly_json(), default=str)
    assert "<a" not in text
    assert "&lt;a href" in text


def test_a_sweep_without_figures_makes_a_chart_that_says_so(make_sweep: MakeSweep) -> None:
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep([])))
    assert "No trial" in figure.layout.annotations[0].text


def test_labels_of_crowded_points_do_not_overlap() -> None:
    labels = [Label(300 + 14 * i, 200 - 9 * i, 150, 34) for i in range(8)]
    area = Box(0, 0, 1100, 560)
    offsets = place_labels(labels, [], area)
    boxes = [
        Box(x + dx - w / 2, y + dy - h / 2, x + dx + w / 2, y + dy + h / 2)
        for (x, y, w, h), (dx, dy) in zip(labels, offsets, strict=True)
    ]
    assert all(overlap(one, other) == 0 for one, other in itertools.combinations(boxes, 2))
    assert all(overlap(box, area) == (box.right - box.left) * (box.bottom - box.top) for box in boxes)


def test_a_label_leaves_a_tall_interval_free() -> None:
    axes = Axes((0, 10), (0, 10), 1000, 600)
    (label,) = callout_annotations([Callout("front", 5, 5, ["A2 eager, channels_last"])], [(5, 5)], [], axes, [(5, 1, 9)])
    half_width = 23 * 6.9 / 2
    assert abs(label["ax"]) >= half_width


def test_a_page_runs_plotly_outside_its_modules_function_and_with_its_notice() -> None:
    script = analysis.figures.plotly_script()
    assert script.startswith("/**\n* plotly.js v")
    assert re.search(r'\*/\s*"use strict";var Plotly=', script[:1000])
    assert script.endswith("\nwindow.Plotly = Plotly;")


def test_scopes_can_be_told_apart_without_colors(make_sweep: MakeSweep) -> None:
    figure = analysis.figures.pareto_figure(analysis.load(make_sweep()))
    symbols = {
        (trace.name, symbol.removesuffix("-open")) for trace in figure.data if trace.hovertext for symbol in trace.marker.symbol
    }
    assert sorted(name for name, _ in symbols) == ["eager", "full", "regional"]
    assert len({symbol for _, symbol in symbols}) == 3
