"""What a killed driver leaves of a local Ray session is gone within seconds, also what has overwritten its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from samples import REPOSITORY, is_running, wait_until

from orchestrator.guard import session_reaper

GONE_WITHIN_S = 10

DRIVER = """
import os, subprocess, sys
from pathlib import Path
import psutil
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.guard.session_reaper import session_reaper
from orchestrator.guard.watchdog import SESSION_MARKER
RAYLET = '''
import subprocess, sys, time
agent = subprocess.Popen(["sleep", "600"], env={})  # as if it had overwritten its environment
print(agent.pid, flush=True)
time.sleep(600)
'''
marker = sys.argv[3]
with scratch_folder("ray-", Path(sys.argv[1])) as folder, session_reaper(marker, folder, 0.5) as reaper:
    raylet = subprocess.Popen([sys.executable, "-c", RAYLET], env={**os.environ, SESSION_MARKER: marker}, stdout=subprocess.PIPE,
                              start_new_session=True, text=True)
    agent = raylet.stdout.readline().strip()
    if sys.argv[2] != "starting":
        reaper.session_is_up()
    watcher = next(one.pid for one in psutil.Process().children(recursive=True)
                   if any(word.endswith("session_reaper") for word in one.cmdline()))
    print(raylet.pid, agent, watcher, folder, flush=True)
    sys.stdin.readline()
"""


class Driver(NamedTuple):
    process: subprocess.Popen[str]
    raylet: int
    agent: int
    reaper: int
    folder: Path


def left_of(driver: Driver) -> list[str]:
    """Names what still runs."""
    return [name for name in ("raylet", "agent", "reaper") if is_running(getattr(driver, name))]


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    process = subprocess.Popen(
        # Each has its own marker: a reaper kills what other tests have marked alike.
        [sys.executable, "-c", DRIVER, str(tmp_path), getattr(request, "param", "up"), uuid.uuid4().hex],
        # A reaper also removes what killed drivers have left in this folder, which takes time where other tests have killed some.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        raylet, agent, reaper, folder = process.stdout.readline().split()
        made = Driver(process, int(raylet), int(agent), int(reaper), Path(folder))
        yield made
    finally:
        process.kill()
        process.communicate()
    for left in filter(is_running, (made.raylet, made.agent, made.reaper)):
        psutil.Process(left).kill()


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["up", "starting"], indirect=True)
def test_what_a_killed_driver_leaves_is_gone_with_its_folder(driver: Driver) -> None:
    assert os.getsid(driver.reaper) == driver.reaper  # signals to the driver's process group or terminal do not reach it
    stranger = subprocess.Popen(["sleep", "600"])
    wait_until(lambda: "select" in Path(f"/proc/{driver.reaper}/maps").read_text(), 20)  # it has imported what it needs
    driver.process.kill()
    driver.process.wait()
    try:
        wait_until(lambda: not left_of(driver), GONE_WITHIN_S, lambda: f"{left_of(driver)} run")
        assert not driver.folder.exists()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.slow
def test_a_driver_that_ends_kills_what_is_left_itself_and_the_reaper_ends(driver: Driver) -> None:
    assert driver.process.stdin is not None
    driver.process.stdin.write("\n")
    driver.process.stdin.flush()
    driver.process.wait(timeout=20)
    assert not is_running(driver.agent)
    wait_until(lambda: not any(map(is_running, (driver.raylet, driver.reaper))), GONE_WITHIN_S)
    assert not driver.folder.exists()


def test_what_started_after_the_last_look_is_killed_with_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([[], [7]])
    monkeypatch.setattr(session_reaper, "find_marked", lambda *given: next(looks))
    monkeypatch.setattr(session_reaper, "sessions_led_by", frozenset)
    monkeypatch.setattr(session_reaper, "_KEEP_KILLING_S", 0.0)
    monkeypatch.setattr(session_reaper, "remove_abandoned", lambda *given, **named: None)
    killed: list[frozenset[int]] = []
    monkeypatch.setattr(session_reaper, "kill_marked", lambda marker, variable, sessions: killed.append(sessions))
    theirs, mine = os.pipe()
    os.close(mine)  # the driver is gone
    session_reaper._reap("marker", tmp_path, theirs)
    os.close(theirs)
    assert killed[0] == {7}
