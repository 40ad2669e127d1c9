"""An open report, for tests that drive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

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


_LEFT: WeakKeyDictionary[sync_api.Browser, list[sync_api.Page]] = WeakKeyDictionary()
"""Pages that visits have left, as new: a page whose process exists opens a report in a third of the CPU time."""


class Visit:
    """An open report, and the errors in it.

    Args:
        anew: Opens it as a browser does that has no other page: with nothing kept, in a process of its own.
    """

    def __init__(
        self, browser: sync_api.Browser, report: Path, *, width: int = 1280, dark: bool = False, anew: bool = False
    ) -> None:
        self._anew, self._left = anew, _LEFT.setdefault(browser, [])
        self.page = self._left.pop() if self._left and not anew else browser.new_context(offline=True).new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(media="screen", color_scheme="dark" if dark else "light")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._listeners: dict[str, Callable[[Any], None]] = {
            "console": lambda message: self.errors.append(message.text) if message.type == "error" else None,
            "pageerror": lambda error: self.errors.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)
        self.page.goto(report.as_uri())
        self.page.wait_for_selector("html[data-drawn=all]", state="attached")

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._anew or error is not None:
            self.page.context.close()
            return
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.mouse.move(0, 0)
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self._left.append(self.page)

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
