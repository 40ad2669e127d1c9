"""Folders that a sweep needs only while it runs: removed at its end, or by the next driver if its own was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from samples import REPOSITORY

from orchestrator.guard import scratch_folders
from orchestrator.guard.scratch_folders import scratch_folder


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_lasts_as_long_as_it_is_needed_and_is_nobody_elses(tmp_path: Path) -> None:
    with scratch_folder("mine-") as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "state").write_text("x")
    assert not folder.exists()


def test_it_is_made_where_one_asks(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with scratch_folder("mine-", tmp_path / "there") as folder:
        assert folder.parent == tmp_path / "there"


def test_what_a_killed_driver_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import time; from orchestrator.guard.scratch_folders import scratch_folder\n"
        "with scratch_folder('mine-') as made: (made / 'session').mkdir(); print(made, flush=True); time.sleep(60)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    made = Path(driver.stdout.readline().strip())
    others = [tmp_path / name for name in ("other-abcd_123", "mine-by-hand", "mine-of-someone", "mine-datasets", "mine-20261101")]
    for folder in others:
        folder.mkdir()
        (folder / "theirs").touch()
    monkeypatch.setattr(scratch_folders, "_ABANDONED_AFTER_S", 0.0)
    with scratch_folder("mine-") as mine:
        assert made.exists()  # its driver lives
        with scratch_folder("mine-"):
            assert mine.exists()
        driver.kill()
        driver.communicate()
        monkeypatch.setattr(scratch_folders, "_ABANDONED_AFTER_S", 3600.0)
        with scratch_folder("mine-"):
            assert made.exists()  # it may be in the process of being created
        monkeypatch.setattr(scratch_folders, "_ABANDONED_AFTER_S", 0.0)
        with scratch_folder("mine-"):
            assert not made.exists()
            assert mine.exists()
    assert all((folder / "theirs").exists() for folder in others)
