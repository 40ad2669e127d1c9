"""Fixtures of tests that open reports in a browser."""

from collections.abc import Iterator
from typing import Any

import pytest
from sweep_folders import make_sweep as make_sweep
from sweep_folders import report_on as report_on


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from report_browser import FLAGS, PATIENCE_MS, sync_api  # imported here, because it skips the module where it is missing

    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE_MS)
        yield running
        running.close()
