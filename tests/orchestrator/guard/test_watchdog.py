"""Deadlines and reaping, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from samples import REPOSITORY, is_running, wait_until

from orchestrator.guard.watchdog import ATTEMPT_MARKER, kill_marked, start_reaper

pytestmark = pytest.mark.slow

PARENT = """
import subprocess, sys, time
from pathlib import Path
from orchestrator.guard.watchdog import start_reaper
scratch = Path(sys.argv[1])
scratch.mkdir()
(scratch / "artifact").write_text("x")
start_reaper(scratch)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # as compile workers do, out of the group
print(child.pid, flush=True)
time.sleep(600)
"""

STUCK = """
import sys, time
from orchestrator.guard import watchdog
log = open(sys.argv[1], "w")
watchdog.set_deadline(1.0, log)
if sys.argv[2] == "disarmed":
    watchdog.clear_deadline()
    time.sleep(2)
    sys.exit(0)
time.sleep(600)
"""


def environment(marker: str | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **({ATTEMPT_MARKER: marker} if marker else {})}


def test_a_killed_worker_takes_its_children_and_its_scratch_folder_with_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(scratch)], env=environment("reaped"), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(child), 10)
    wait_until(lambda: not scratch.exists(), 10)


def test_a_worker_that_kills_its_children_before_it_goes_is_cleaned_up_after_all_the_same(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(scratch)], env=environment("kills-its-own"), stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    wait_until(lambda: len(psutil.Process(parent.pid).children()) == 1, 20)  # what started the reaper is gone
    for child in psutil.Process(parent.pid).children():
        child.kill()
    parent.kill()
    parent.communicate()
    wait_until(lambda: not scratch.exists(), 10)


def test_only_processes_of_the_same_attempt_are_killed() -> None:
    mine, other = (subprocess.Popen(["sleep", "600"], env=environment(marker)) for marker in ("mine", "mine-too"))
    try:
        assert kill_marked("mine") == 1
        assert mine.wait(timeout=5) == -9
        assert other.poll() is None
        assert kill_marked("nobody") == 0
    finally:
        other.kill()
        other.wait()


def test_a_deadline_ends_a_stuck_process_and_leaves_its_stacks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", STUCK, str(log), "armed"], env=environment(), timeout=30)
    assert done.returncode == 1
    assert "Timeout" in log.read_text()
    assert "line 9 in <module>" in log.read_text() or "File" in log.read_text()


def test_a_deadline_can_be_taken_back(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STUCK, str(tmp_path / "log"), "disarmed"], env=environment(), timeout=30)
    assert done.returncode == 0


def test_a_process_without_the_marker_cannot_start_a_reaper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT_MARKER, raising=False)
    with pytest.raises(RuntimeError, match=ATTEMPT_MARKER):
        start_reaper(tmp_path)
