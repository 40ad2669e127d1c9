"""The report in a real browser, offline: it draws, sorts, fits a phone, and hostile text does nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from report_browser import Visit, boxes, overlap
from sweep_folders import MakeSweep, ReportOn, trial, typical_trials

import analysis
from analysis import compare, picture
from compile_sweep.schema.outcome import Status

sync_api = pytest.importorskip("playwright.sync_api")

HOSTILE = """</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">"""

pytestmark = pytest.mark.browser


def test_the_report_draws_offline_without_errors_or_requests(browser: sync_api.Browser, report_on: ReportOn) -> None:
    report = report_on()
    with Visit(browser, report) as visit:
        assert visit.trials_drawn() == 7
        assert visit.errors == []
        assert [url for url in visit.requests if not url.startswith("data:")] == [report.as_uri()]


def test_hostile_strings_are_inert_text(browser: sync_api.Browser, make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 700, 50, numerics={"status": HOSTILE}, environment_key=HOSTILE),
        trial("scope=regional", 600, 9, status=Status.INFEASIBLE, label=HOSTILE, reason=HOSTILE, phase=HOSTILE),
    ]
    folder = make_sweep(records, config={HOSTILE: HOSTILE, "workload": HOSTILE}, environment={HOSTILE: [HOSTILE]})
    with Visit(browser, analysis.write_report(folder)) as visit:
        for point in visit.page.locator("#chart .point").all():
            point.scroll_into_view_if_needed()
            box = point.bounding_box()
            assert box is not None
            visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            visit.page.wait_for_selector("#chart .hovertext")
            assert "window.hacked" in (visit.page.locator("#chart .hovertext").text_content() or "")
        assert visit.page.evaluate("window.hacked") is None
        assert visit.page.locator("img").count() == 0
        assert HOSTILE in visit.page.locator(".reason").inner_text()
        assert visit.errors == []


@pytest.mark.parametrize("width", [390, 1300])
def test_bars_of_compile_time_have_room_for_their_names(browser: sync_api.Browser, report_on: ReportOn, width: int) -> None:
    long = "scope=full,mode=max-autotune,dynamic=buckets,buckets=32/40/64/96/256,optimizer=compiled,group_window=100,fullgraph=on"
    records = [*typical_trials(), trial(long, 1200, 500), trial(f"{long},inductor.coordinate_descent_tuning=on", 1210, 510)]
    with Visit(browser, report_on(records), width=width) as visit:
        names = boxes(visit.page.locator("#phases-chart .annotation"))
        assert len(names) == 6
        assert all(name["x"] + name["width"] <= width for name in names)
        parts = boxes(visit.page.locator("#phases-chart .point path"))
        assert not [pair for pair in itertools.combinations(names, 2) if overlap(*pair)]
        assert not [pair for pair in itertools.product(names, parts) if overlap(*pair)]
        assert visit.errors == []


def test_a_telephone_that_is_turned_shows_what_a_page_opened_that_way_does(
    browser: sync_api.Browser, report_on: ReportOn
) -> None:
    report = report_on()
    parts = ("#chart .legend", "#chart .point", "#phases-chart .legend", "#phases-chart .annotation")
    with Visit(browser, report, width=390) as turned, Visit(browser, report, width=844) as opened:
        turned.page.set_viewport_size({"width": 844, "height": 900})
        for part in parts:
            turned.page.wait_for_function(
                "([part, x, y]) => { const box = document.querySelector(part).getBoundingClientRect();"
                " return Math.abs(box.x + scrollX - x) + Math.abs(box.y + scrollY - y) < 2; }",
                arg=[part, *(boxes(opened.page.locator(part))[0][at] for at in ("x", "y"))],
            )


@pytest.mark.parametrize(("width", "dark"), [(390, True), (768, False)])
def test_a_small_screen_needs_no_sideways_scrolling(
    browser: sync_api.Browser, report_on: ReportOn, width: int, dark: bool
) -> None:
    records = [*typical_trials(), trial("scope=modular,dynamic=true", status=Status.FAILED, reason="x" * 500)]
    with Visit(browser, report_on(records), width=width, dark=dark) as visit:
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        assert visit.page.evaluate(
            "[...document.querySelectorAll('.tiles b')].every((one) => one.scrollWidth <= one.clientWidth)"
        )
        red, green, blue = visit.page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (red + green + blue < 3 * 60) == dark


def test_a_telephone_shows_the_throughput_beside_the_name_and_remarks_below_it(
    browser: sync_api.Browser, report_on: ReportOn
) -> None:
    report = report_on([trial("scope=full", 900, 60, stable=False), trial("scope=eager", 500, 0)])
    with Visit(browser, report, width=390) as visit:
        row = visit.page.locator("#trials tbody tr").first
        assert row.locator("td:visible").first.inner_text().startswith("900")
        assert boxes(row.locator("td:visible"))[0]["x"] < 390
        sync_api.expect(row.locator(".below .tag")).to_be_visible()
        visit.page.set_viewport_size({"width": 1280, "height": 900})
        sync_api.expect(row.locator(".below")).to_be_hidden()
        sync_api.expect(row.locator(".remarks .tag")).to_be_visible()


def test_without_javascript_the_page_is_as_dark_as_the_system_and_its_links_lead_somewhere(
    browser: sync_api.Browser, report_on: ReportOn
) -> None:
    context = browser.new_context(color_scheme="dark", java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(report_on().as_uri())
    assert page.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor") == "rgb(20, 23, 28)"
    links = page.locator("nav a:visible")
    assert links.count() > 5
    for link in links.all():
        sync_api.expect(page.locator(str(link.get_attribute("href")))).to_be_visible()
    fold = page.locator("details.trial").first
    folded = fold.evaluate("(fold) => fold.offsetHeight")
    page.emulate_media(media="print")
    assert page.locator("body").evaluate("(body) => getComputedStyle(body).backgroundColor") == "rgb(255, 255, 255)"
    assert fold.evaluate("(fold) => fold.offsetHeight") > 2 * folded  # paper cannot be unfolded
    context.close()


def test_without_javascript_the_page_says_what_its_table_lacks(browser: sync_api.Browser, report_on: ReportOn) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    failed = trial("scope=full", status=Status.FAILED, label="worker-died", reason="it ended")
    for records, rows, words in (
        ([failed], "There are none.", "usual length."),
        ([trial("scope=eager", 500)], "eager", "usual length."),
        ([trial(f"scope=full,group_window={window}", 500 + window) for window in range(2, 40)], "full", "30 fastest settings."),
    ):
        page.goto(report_on(records).as_uri())
        sync_api.expect(page.locator("#trials tbody")).to_contain_text(rows)
        assert str(page.locator("noscript .cautions").inner_text()).endswith(words)
    context.close()


def test_a_printed_comparison_is_as_wide_as_its_paper(browser: sync_api.Browser, make_sweep: MakeSweep) -> None:
    before, after = (
        make_sweep([trial("scope=eager", 500, 0.01), trial("scope=full,mode=reduce-overhead", rate, 60)], name=str(rate))
        for rate in (900, 700)
    )
    compare.main([str(before), str(after)])
    page = browser.new_page(viewport={"width": 703, "height": 1000})
    page.goto((after / "compare.html").as_uri())
    page.emulate_media(media="print")
    table = page.locator(".scrolls table").first
    assert table.evaluate("(table) => table.getBoundingClientRect().right") <= 703
    page.close()


def test_the_picture_is_a_png_under_a_megabyte(make_sweep: MakeSweep, tmp_path: Path) -> None:
    path = picture.write_picture(make_sweep(), tmp_path / "front.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < path.stat().st_size < 1_000_000
