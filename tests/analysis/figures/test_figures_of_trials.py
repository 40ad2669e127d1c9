"""Every chart of one sweep accepts the trials as `load` returns them, as in a notebook."""

from __future__ import annotations

import pytest
from sweep_folders import MakeSweep

import analysis
from analysis import figures

CHARTS = (
    "batch_memory",
    "break_even",
    "cache",
    "compile_phases",
    "effects",
    "memory",
    "parallel",
    "pareto",
    "step_times",
    "timeline",
)


@pytest.mark.slow
@pytest.mark.parametrize("chart", CHARTS)
def test_a_chart_of_trials_is_that_of_their_info(make_sweep: MakeSweep, chart: str) -> None:
    df = analysis.load(make_sweep())
    draw, info_of = getattr(figures, f"{chart}_figure"), getattr(figures, f"{chart}_info")
    assert draw(df).to_json() == draw(info_of(df)).to_json()


def test_no_chart_of_one_sweep_is_left_out() -> None:
    drawn = {name.removesuffix("_figure") for name in figures.__all__ if name.endswith("_figure")}
    assert drawn == set(CHARTS)


def test_what_else_a_chart_takes_goes_with_trials_too(make_sweep: MakeSweep) -> None:
    assert figures.pareto_figure(analysis.load(make_sweep()), title="Mine").layout.title.text == "Mine"
