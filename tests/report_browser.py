"""An open report, for tests that drive it."""

from __future__ import annotations

from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")


FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

PATIENCE_MS = 150_000
"""Milliseconds that a page may take for an action, on a busy machine."""

sync_api.expect.set_options(timeout=PATIENCE_MS)  # five seconds otherwise, whatever a context's own is


_TRIALS_DRAWN = """() => [...document.querySelectorAll("#chart .scatterlayer .trace")]
    .filter((trace) => trace.__data__[0].trace.name !== "cannot be told apart")
    .reduce((sum, trace) => sum + trace.querySelectorAll(".point").length, 0)"""


class Visit:
    """An open report, and the errors in it."""

    def __init__(self, browser: sync_api.Browser, report: Path, *, width: int = 1280, dark: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("html[data-drawn=all]", state="attached")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def trials_drawn(self) -> int:
        """Returns the number of trials with a marker on the front's chart; ends of lines between tied trials do not count."""
        return int(self.page.evaluate(_TRIALS_DRAWN))

    def expect_trials_drawn(self, count: int) -> None:
        """Waits until so many trials have a marker on the front's chart."""
        # A function, because a page's policy forbids the `eval` with which other text is looked at again.
        self.page.wait_for_function(f"() => ({_TRIALS_DRAWN})() === {count}")

    def column(self, number: int) -> list[str]:
        return [cell.strip() for cell in self.page.locator(f"#trials tbody tr > :nth-child({number})").all_inner_texts()]


def boxes(places: sync_api.Locator) -> list[sync_api.FloatRect]:
    return [box for place in places.all() if (box := place.bounding_box())]


def overlap(one: sync_api.FloatRect, other: sync_api.FloatRect) -> bool:
    """Tells whether they overlap by more than 3 pixels, which allows for outlines."""
    wide = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
    high = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
    return wide > 3 and high > 3
