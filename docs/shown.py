"""`python docs/shown.py`: updates what the pages next to it show of committed records: tables, and screenshots of the report.

`--check` writes nothing and names outdated tables (exit code 1). Screenshots need Playwright, which the extra `dev` installs,
and an installed Chromium.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_sweep.schema.figure import Figure

DOCS = Path("docs")
"""Relative to the repository's root, which is the working directory, so that no path of this machine gets onto a page."""
SWEEP = DOCS / "results" / "h200-captioning"
WINNER = DOCS / "results" / "h100-resnet"
TORCHES = DOCS / "results" / "cpu-two-torches"
ALONE, SIDE_BY_SIDE = (DOCS / "results" / "h200-scaling" / "sweep" / name for name in ("one", "all"))

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PATIENCE_MS = 150_000
"""Milliseconds for a page to be drawn, also on a busy machine."""

SCREENS: Mapping[str, tuple[int, str, str, str]] = {
    "top": (1280, "light", "header", "#front"),
    "dark": (1280, "dark", "header", "#front"),
    "break-even": (1280, "light", "#break-even", "#break-even"),
    "compile": (1280, "light", "#phases", "#memory"),
    "choices": (1280, "light", "#parallel", "#effects"),
    "table": (1280, "light", "#table", "#timeline"),
    "narrow": (390, "light", "header", "#verdict"),
    "compare": (1280, "light", "h1", ".scrolls"),
}
"""`report-NAME.png` → width of the window in pixels, color scheme, and the first and last part of the page in it."""

COMPARED = "compare"
"""The screenshot of the comparison's page instead of the report's."""


def recommended() -> str:
    """Returns the setting for each length of a job, and where it changes."""
    from analysis import recommend

    return _printed(lambda: recommend.main([str(SWEEP), "--restarts", "10", "--price-per-gpu-hour", "4", "--markdown"]))


def tutorial_verdict() -> str:
    """Returns what the tutorial shows of a recorded sweep that has a winner."""
    from analysis import recommend

    return f"```text\n{_printed(lambda: recommend.main([str(WINNER), '--steps', '100k']))}```\n"


def measured() -> str:
    """Returns every trial with its figures."""
    from analysis import table

    return _printed(lambda: table.main([str(SWEEP)]))


def compared() -> str:
    """Returns the comparison of a sweep of one trial at a time with one of four."""
    return _compared(ALONE, SIDE_BY_SIDE)


def compared_torches() -> str:
    """Returns the comparison of a sweep with one torch with the same sweep with a newer one."""
    return _compared(TORCHES / "torch-2.13", TORCHES / "torch-2.15", "--repeat", str(TORCHES / "torch-2.13-again"))


def _compared(before: Path, after: Path, *words: str) -> str:
    from analysis import compare

    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch, "compare.html")
        return _printed(lambda: compare.main([str(before), str(after), *words, "--markdown", "--output", str(page)]))


def labels() -> str:
    """Returns every label of a trial that is not ok."""
    from compile_sweep.schema.outcome import Label

    rows = [(f"`{label}`", label.status, label.fault.value, label.tries, label.meaning) for label in Label]
    return _rows(("label", "status", "at fault", "tries", "meaning"), rows)


def trial_fields() -> str:
    """Returns every field of a trial's record."""
    from compile_sweep.schema.attempt_record import figures
    from compile_sweep.schema.record import TrialRecord

    return _fields(figures(TrialRecord))


def warm_start_fields() -> str:
    """Returns the fields of a warm start's record that a trial's record lacks."""
    from compile_sweep.schema.attempt_record import figures
    from compile_sweep.schema.record import TrialRecord, WarmStart

    shared = figures(TrialRecord)
    return _fields({name: about for name, about in figures(WarmStart).items() if name not in shared})


def _fields(told: Mapping[str, Figure]) -> str:
    rows = [(f"`{name}`", about.unit, about.meaning, about.missing) for name, about in told.items()]
    return _rows(("field", "unit", "meaning", "null or empty when"), rows)


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "recommended": ("analysis.md", recommended),
    "tutorial verdict": ("tutorial.md", tutorial_verdict),
    "compared": ("analysis.md", compared),
    "compared torches": ("analysis.md", compared_torches),
    "measured": ("results.md", measured),
    "labels": ("records.md", labels),
    "trial fields": ("records.md", trial_fields),
    "warm-start fields": ("records.md", warm_start_fields),
}
"""By name of a block, between `<!-- NAME -->` and `<!-- end -->`: its page, and the function that makes it."""


def renewed(text: str, name: str, block: str) -> str:
    """Returns the page with the block's contents replaced.

    Raises:
        LookupError: The page has no such block.
    """
    whole, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda found: f"{found[1]}{block}{found[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise LookupError(f"there is no block {name!r}")
    return whole


def write_screens() -> list[Path]:
    """Takes the screenshots; returns their paths."""
    from playwright import sync_api

    from analysis import compare, write_report

    browser_path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    written = []
    with tempfile.TemporaryDirectory() as scratch, sync_api.sync_playwright() as playwright:
        folder = Path(shutil.copytree(SWEEP, Path(scratch, SWEEP.name)))
        report, comparison = write_report(folder), Path(scratch, "compare.html")
        _printed(lambda: compare.main([str(ALONE), str(SIDE_BY_SIDE), "--output", str(comparison)]))
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS, timeout=PATIENCE_MS)
        for name, (width, colors, first, last) in SCREENS.items():
            page = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme="dark" if colors == "dark" else "light"
            )
            page.set_default_timeout(PATIENCE_MS)
            page.goto((comparison if name == COMPARED else report).as_uri())
            if name != COMPARED:
                page.wait_for_selector("html[data-drawn=all]", state="attached")
            # the folder's name instead of where this machine keeps its copy
            page.evaluate("for (const one of document.querySelectorAll('.command code')) one.textContent = one.textContent"
                          f".replace('{folder}', 'docs/results/{SWEEP.name}')")  # fmt: skip
            top = page.locator(first).first.bounding_box()
            bottom = page.locator(last).first.bounding_box()
            if top is None or bottom is None:
                raise LookupError(f"the report has no {first} or {last}")
            y, end = max(0, top["y"] - 12), bottom["y"] + bottom["height"] + 12
            path = DOCS / f"report-{name}.png"
            page.screenshot(path=path, full_page=True, clip={"x": 0, "y": y, "width": width, "height": end - y})
            written.append(path)
            page.close()
        browser.close()
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 1 if `--check` found an outdated table."""
    parser = argparse.ArgumentParser(
        prog="python docs/shown.py", description="Makes again what docs/ shows of committed records."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say which tables are not what the records say")
    parser.add_argument("--no-screens", action="store_true", help="tables only")
    told = parser.parse_args(arguments)
    stale = []
    for name, (page, make) in TABLES.items():
        path = DOCS / page
        before = path.read_text(encoding="utf-8")
        after = renewed(before, name, make())
        if after != before:
            stale.append(f"{page}: {name}")
            if not told.check:
                path.write_text(after, encoding="utf-8")
    print(*stale, sep="\n")
    if told.check:
        return 1 if stale else 0
    if not told.no_screens:
        print(*write_screens(), sep="\n")
    return 0


def _rows(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def _printed(command: Callable[[], int]) -> str:
    """Returns the output of a command.

    Raises:
        RuntimeError: The command failed.
    """
    words = io.StringIO()
    with redirect_stdout(words):
        if command() != 0:
            raise RuntimeError("the command failed; its sentence is above")
    return words.getvalue()


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.exit(main())
