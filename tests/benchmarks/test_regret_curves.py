from __future__ import annotations

import pytest

from benchmarks.search.regret_curves import regret_figure, regret_info

CURVES = {
    "gain": [[(0.1, 0.5), (0.2, 0.99)], [(0.1, 0.5), (0.3, 1.0)], [(0.1, 0.9), (0.2, 1.0)]],
    "random": [[(0.5, 0.5), (1.0, 1.0)]],
}


def at(cost: list[float], values: list[float], percent: float) -> float:
    return values[min(range(len(cost)), key=lambda index: abs(cost[index] - percent))]


def test_regret_is_what_is_missing_at_each_cost_with_quartiles_over_seeds() -> None:
    info = regret_info(CURVES, title="a table")
    gain, random = info.lines
    assert gain.searcher == "gain"
    assert at(info.cost, gain.median, 5) == 100
    assert at(info.cost, gain.median, 15) == pytest.approx(50)
    assert at(info.cost, gain.upper, 15) == pytest.approx(50)
    assert at(info.cost, gain.lower, 15) == pytest.approx(30)
    assert at(info.cost, gain.median, 25) == pytest.approx(1)
    assert at(info.cost, gain.median, 100) == pytest.approx(0), "a search that ended keeps what it had"
    assert at(info.cost, random.median, 75) == pytest.approx(50)
    assert info.goal_percent == pytest.approx(2)


def test_the_chart_has_a_line_a_searcher_and_bands_for_the_two_that_matter() -> None:
    chart = regret_figure(regret_info(CURVES, title="a <table>", until=0.5))
    lines = {trace.name: trace for trace in chart.data if trace.name}
    assert set(lines) == {"gain", "random"}
    assert lines["gain"].line.dash != lines["random"].line.dash
    assert sum(trace.fill == "toself" for trace in chart.data) == 2
    assert min(lines["gain"].y) > 0, "the axis is logarithmic"
    assert tuple(chart.layout.xaxis.range) == (0, 50)
    assert "&lt;table&gt;" in chart.layout.title.text


def test_nothing_replayed_is_said() -> None:
    assert "No search was replayed" in regret_figure(regret_info({})).layout.annotations[0].text
