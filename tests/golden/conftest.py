"""Fixtures of the golden tests: an empty folder to run commands in, and a machine with or without a GPU."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden import REPOSITORY, pretend_gpu

from orchestrator.environment import fingerprint

RESULTS = REPOSITORY / "docs" / "results"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to an empty folder; nothing in the user's environment reaches a command that runs there."""
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("COMPILE_SWEEP_", "RAY_ADDRESS"))]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": "home", "XDG_CONFIG_HOME": "home/.config"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    for name, value in {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "TZ": "UTC"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the working folder
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("a sweep was started"))
    return folder


@pytest.fixture
def results(here: Path) -> Path:
    """Copies the committed records to the working folder, for commands that write next to them."""
    return Path(shutil.copytree(RESULTS, here / "results", ignore=shutil.ignore_patterns("*.png", "*.html")))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates a machine without a GPU, wherever the test runs."""
    pretend_gpu(monkeypatch, None)
    yield
    fingerprint.cache_clear()


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates a machine with one H200, as far as plans and sources go."""
    pretend_gpu(monkeypatch, "NVIDIA H200")
    yield
    fingerprint.cache_clear()
