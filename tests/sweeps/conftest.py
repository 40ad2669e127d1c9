"""Runs the sweep's command in the tests' own process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from forked_servers import forked_servers as forked_servers
from samples import TESTS

from orchestrator.sweep import main

SweepHere = Callable[..., str]
"""Runs a sweep in this process with these words of a command line; returns what it prints."""


@pytest.fixture(autouse=True)
def _forked(forked_servers: None) -> None:
    """Spares commands that run in this process the imports of their trials."""


@pytest.fixture
def sweep_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SweepHere:
    """Saves the imports of a process for the driver and one for the plan. Each trial still has its own process."""
    monkeypatch.chdir(TESTS)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working folder

    def swept(*words: str) -> str:
        code = main(["--runner", "local", *words])
        printed = capsys.readouterr()
        assert code == 0, printed.out + printed.err
        return printed.out

    return swept
