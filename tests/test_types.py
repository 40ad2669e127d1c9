"""The source passes mypy: a test, so that its half minute on one core passes beside other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_mypy_finds_nothing(repository: Path) -> None:
    pytest.importorskip("mypy")
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=repository, capture_output=True, text=True, timeout=500)
    assert checked.returncode == 0, checked.stdout + checked.stderr
