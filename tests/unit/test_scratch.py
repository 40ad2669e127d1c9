"""The folder for disposable state: there while it is needed, and removed by the next driver if its own was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from orchestrator.scratch import scratch_folder


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_lasts_as_long_as_it_is_needed(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        assert folder.parent == tmp_path
        (folder / "state").write_text("x")
    assert not folder.exists()


def test_what_a_killed_driver_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    abandoned, mine, other = (
        tmp_path / f"compile-sweep-tune-{owner}" for owner in (f"{gone.pid}-x", f"{os.getpid()}-x", "of-someone")
    )
    for folder in (abandoned, mine, other):
        folder.mkdir()
        (folder / "state").write_text("x")
    with scratch_folder():
        pass
    assert [folder.exists() for folder in (abandoned, mine, other)] == [False, True, True]
