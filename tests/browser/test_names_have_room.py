"""Names and legends of the front and of the break-even chart in a real browser: no overlaps at any width."""

from __future__ import annotations

import itertools

import pytest
from report_browser import Visit, boxes, overlap
from sweep_folders import ReportOn, trial, typical_trials

from compile_sweep.schema.record import TrialRecord

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser

FURTHER = pytest.mark.nightly("one more width; other cases cover the check")


def close_ends() -> list[TrialRecord]:
    """Settings that win at some length, with lines that end close together, and names of several lines."""
    long = "scope=full,mode=max-autotune,dynamic=buckets,buckets=32/40/64/96/256,group_window=100,fullgraph=on,optimizer"
    return [*typical_trials(), trial(f"{long}=fused", 1050, 470), trial(f"{long}=compiled", 1055, 600)]


@pytest.mark.parametrize("width", [pytest.param(768, marks=FURTHER), pytest.param(1280, marks=FURTHER), 1920])
def test_names_of_lines_stand_apart_in_the_margin(browser: sync_api.Browser, report_on: ReportOn, width: int) -> None:
    with Visit(browser, report_on(close_ends()), width=width) as visit:
        names = boxes(visit.page.locator("#break-even-chart .annotation-text-g"))
        (plot,) = boxes(visit.page.locator("#break-even-chart .nsewdrag").first)
        assert len(names) >= 5
        assert not [pair for pair in itertools.combinations(names, 2) if overlap(*pair)]
        assert all(name["x"] + name["width"] <= width for name in names)
        assert all(name["x"] >= plot["x"] + plot["width"] - 3 for name in names)
        assert visit.errors == []


def test_a_telephone_has_a_legend_under_the_chart_instead(browser: sync_api.Browser, report_on: ReportOn) -> None:
    with Visit(browser, report_on(close_ends()), width=390) as visit:
        assert visit.page.locator("#break-even-chart .annotation").count() == 0
        entries = boxes(visit.page.locator("#break-even-chart .legend .legendtext"))
        (chart,) = boxes(visit.page.locator("#break-even-chart"))
        assert len(entries) >= 5
        assert not [pair for pair in itertools.combinations(entries, 2) if overlap(*pair)]
        assert max(entry["y"] + entry["height"] for entry in entries) <= chart["y"] + chart["height"]
        assert max(entry["x"] + entry["width"] for entry in entries) <= 390


@pytest.mark.parametrize("width", [390, pytest.param(768, marks=FURTHER), 900, pytest.param(1280, marks=FURTHER)])
def test_the_fronts_legend_is_beside_the_plot(browser: sync_api.Browser, report_on: ReportOn, width: int) -> None:
    records = [*typical_trials(), trial("scope=full,optimizer=fused", 1046, 439), trial("scope=full,dynamic=true", 600, 400)]
    with Visit(browser, report_on(records), width=width) as visit:
        (legend,) = boxes(visit.page.locator("#chart .legend"))
        assert not any(overlap(legend, point) for point in boxes(visit.page.locator("#chart .scatterlayer .point")))
        (chart,) = boxes(visit.page.locator("#chart"))
        assert chart["y"] <= legend["y"]
        assert legend["y"] + legend["height"] <= chart["y"] + chart["height"]
        sync_api.expect(visit.page.locator("#chart .legendtext", has_text="cannot be told apart")).to_have_count(1)


@pytest.mark.parametrize("width", [390, pytest.param(800, marks=FURTHER)])
def test_the_legend_of_one_lane_is_whole_above_its_bars(browser: sync_api.Browser, report_on: ReportOn, width: int) -> None:
    names = ("starting", "building", "warming-up", "steady", "checking", "eager-runs", "done")
    phases = dict.fromkeys(names, 5.0)
    record = trial("scope=eager", 586, 5.0, started_at="2026-11-30T09:00:00+00:00", wall_s=35.0, warmup_s=5.0, phases_s=phases)
    with Visit(browser, report_on([record]), width=width) as visit:
        visit.page.locator("#timeline-chart").scroll_into_view_if_needed()
        sync_api.expect(visit.page.locator("#timeline-chart .legendtext")).to_have_count(7)
        entries = boxes(visit.page.locator("#timeline-chart .legendtext"))
        (chart,) = boxes(visit.page.locator("#timeline-chart"))
        (bars,) = boxes(visit.page.locator("#timeline-chart .barlayer"))
        (scrollbar,) = boxes(visit.page.locator("#timeline-chart .legend .scrollbar"))
        assert min(entry["y"] for entry in entries) >= chart["y"]
        assert max(entry["y"] + entry["height"] for entry in entries) <= bars["y"]
        assert scrollbar["height"] == 0
        sync_api.expect(visit.page.locator("#row-count")).to_have_text("1 setting")
        assert visit.errors == []
