"""What the report links: best.py and a comparison if they exist, otherwise the commands that make them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report_browser import Visit
from sweep_folders import MakeSweep, trial
from test_server import get, serving

import analysis
from analysis import compare, export
from analysis.page.page import what_next

sync_api = pytest.importorskip("playwright.sync_api")

HOSTILE = "<script>alert(1)</script>"

SMALL = [trial("scope=eager", 500, 0.1), trial("scope=full", 900, 50)]


def page_of(folder: Path) -> str:
    return re.sub(r"<(script|style)\b.*?</\1>", "", analysis.write_report(folder).read_text(), flags=re.DOTALL)


def offer(folder: Path, **told: object) -> None:
    (folder / "best.json").write_text(json.dumps({"settings_label": "full, default", "sentence": "It came to 1,001."} | told))
    (folder / "best.py").write_text("print(1)\n")


@pytest.mark.slow
def test_the_break_even_lists_are_in_the_page_before_its_data_is_unpacked(make_sweep: MakeSweep) -> None:
    page = page_of(make_sweep(SMALL))
    ranking = re.search(r'<ol id="job-ranking".*?</ol>', page, flags=re.DOTALL)
    flips = re.search(r'<ul id="job-flips".*?</ul>', page, flags=re.DOTALL)
    assert ranking
    assert flips
    assert re.findall(r"<li><span>(.*?)</span>", ranking[0]) == ["A2 full, static", "A1 eager"]
    assert "including 50 s for starts" in ranking[0]
    lengths = [re.sub("<.*?>", "", line) for line in re.findall(r"<li>(.*?)</li>", flips[0])]
    assert [line.rpartition(": ")[2] for line in lengths] == ["A1 eager", "A2 full, static"]
    assert lengths[0].startswith("up to ")


@pytest.mark.slow
def test_best_py_is_linked_with_how_its_run_went(make_sweep: MakeSweep) -> None:
    folder = make_sweep(SMALL)
    assert "compile-sweep export DIR --steps 100000" in page_of(folder)
    offer(folder, sentence=f"It came to 1,001. {HOSTILE}")
    page = page_of(folder)
    assert '<a href="best.py">best.py</a> is “full, default” as a program. It came to 1,001.' in page
    assert HOSTILE not in page
    (folder / "best.py").unlink()
    assert "is not offered" in page_of(folder)


@pytest.mark.parametrize("words", ["", "[]", "{}", "nonsense", '{"settings_label": {}}', "[" * 10_000])
def test_a_best_json_that_is_none_counts_as_none(make_sweep: MakeSweep, words: str) -> None:
    folder = make_sweep()
    (folder / "best.json").write_text(words)
    assert what_next(folder).best is None


@pytest.mark.slow
def test_an_export_beside_the_sweep_renews_its_report_and_one_elsewhere_does_not(make_sweep: MakeSweep, tmp_path: Path) -> None:
    folder = make_sweep([trial("scope=eager", 500, 0.1), trial("scope=full", 900, 50, source="model = torch.compile(model)\n")])
    assert export.main([str(folder), "--only", "best", "--no-rerun"]) == 0
    assert not (folder / "report.html").exists()
    (folder / "report.html").write_text("of before")
    (tmp_path / "elsewhere").mkdir()
    assert export.main([str(folder), "--only", "best", "--no-rerun", "--output", str(tmp_path / "elsewhere")]) == 0
    assert (folder / "report.html").read_text() == "of before"
    (folder / "best.json").unlink()
    assert export.main([str(folder), "--only", "best", "--no-rerun"]) == 0
    assert '<a href="best.py">' in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_comparison_beside_the_sweep_is_linked(make_sweep: MakeSweep) -> None:
    folder = make_sweep(SMALL)
    assert "compile-sweep compare BEFORE DIR" in page_of(folder)
    assert compare.main([str(folder), str(folder)]) == 0
    assert '<a href="compare.html">' in (folder / "report.html").read_text()


@pytest.mark.slow
def test_the_server_gives_what_the_page_links_as_it_is_and_lets_nothing_in_it_run(make_sweep: MakeSweep, tmp_path: Path) -> None:
    folder = make_sweep(SMALL)
    with serving(folder) as server:
        before = get(server, "/version").words
        assert get(server, "/best.py").status == 404
        offer(folder)
        (folder / "compare.html").write_text("<script>alert(1)</script>")
        assert get(server, "/version").words != before
        assert get(server, "/best.py")[1:] == ("print(1)\n", "text/plain; charset=utf-8")
        assert get(server, "/compare.html").kind == "text/html; charset=utf-8"
        assert get(server, "/sweep.json").status == 404
        (tmp_path / "secret").write_text("secret")
        (folder / "best.py").unlink()
        (folder / "best.py").symlink_to(tmp_path / "secret")
        assert get(server, "/best.py").status == 404


@pytest.mark.browser
def test_a_comparison_that_somebody_else_wrote_runs_nothing(browser: sync_api.Browser, make_sweep: MakeSweep) -> None:
    folder = make_sweep(SMALL)
    (folder / "compare.html").write_text("<script>document.title = 'hacked'</script><p>changed</p>")
    with serving(folder) as server, browser.new_page() as page:
        page.goto(server.url + "compare.html")
        sync_api.expect(page.locator("p")).to_have_text("changed")
        assert page.title() != "hacked"


@pytest.mark.browser
def test_commands_name_the_folder_as_one_word_of_a_shell_and_follow_the_job(
    browser: sync_api.Browser, make_sweep: MakeSweep, tmp_path: Path
) -> None:
    folder = make_sweep(SMALL).rename(tmp_path / "it's here")
    quoted = f"'{tmp_path}/it'\\''s here'"
    report = analysis.write_report(folder)
    with Visit(browser, report) as visit:
        code = visit.page.locator("#command-job")
        sync_api.expect(code).to_have_text(f"compile-sweep export {quoted} --steps 100000")
        sync_api.expect(visit.page.locator("#command-compare")).to_have_text(f"compile-sweep compare BEFORE {quoted}")
        visit.page.get_by_label("Restarts").fill("7")
        visit.page.get_by_label("Price of a GPU-hour").fill("2.5")
        asked = f"compile-sweep recommend {quoted} --steps 100000 --restarts 7 --price-per-gpu-hour 2.5"
        sync_api.expect(visit.page.locator("#command-recommend")).to_have_text(asked)
        visit.page.locator("#command-recommend + button").click()
        sync_api.expect(visit.page.locator("#copied")).to_have_text(f"Copied {asked}")
        assert visit.errors == []
