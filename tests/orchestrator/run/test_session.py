"""What a sweep's own Ray session leaves behind: none of Ray's processes, whatever they do, and all others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from samples import REPOSITORY, is_running, wait_until

from orchestrator.guard.watchdog import SESSION_MARKER
from orchestrator.run.session import ray_session

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ORPHAN = "import os, sys, time\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\ntime.sleep(600)"


def test_workers_are_as_nice_as_the_sweep_and_what_is_left_of_ray_ends_with_its_session_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SESSION_MARKER, "of-who-started-this-one")
    with ray_session():
        import ray

        @ray.remote(num_cpus=0)
        def leave_one_behind() -> int:
            started = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True)
            assert started.stdout is not None
            return int(started.stdout.readline())

        @ray.remote(num_cpus=0)
        def niceness() -> int:
            return os.getpriority(os.PRIO_PROCESS, 0)

        assert ray.get(niceness.remote()) == os.getpriority(os.PRIO_PROCESS, 0)
        orphan = ray.get(leave_one_behind.remote())
        stranger = subprocess.Popen(["sleep", "600"])  # such as W&B's service, which takes the report once the session has ended
        assert psutil.pid_exists(orphan)
    try:
        wait_until(lambda: not is_running(orphan), 60)  # it is told to end, and nothing waits for that
        assert stranger.poll() is None
        assert os.environ[SESSION_MARKER] == "of-who-started-this-one"
    finally:
        stranger.kill()
        stranger.wait()
        if is_running(orphan):
            os.kill(orphan, signal.SIGKILL)


def test_a_home_that_cannot_be_written_is_said_to_be_what_is_wrong() -> None:
    """Runs in a process of its own, because this one may have the token already."""
    done = subprocess.run(
        [sys.executable, "-c", "from orchestrator.run.session import ray_session\nwith ray_session(): pass"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "SessionError: Ray did not start on this host" in done.stderr
    assert "set HOME to a folder that can be written" in done.stderr


def test_a_session_is_cleaned_up_even_if_ctrl_c_ends_its_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    closed = []
    monkeypatch.setattr("orchestrator.run.session._connect", lambda own: own.callback(closed.append, "folder"))
    monkeypatch.setattr(ray, "shutdown", _interrupted)
    with pytest.raises(KeyboardInterrupt), ray_session():
        pass
    assert closed == ["folder"]


def _interrupted() -> None:
    raise KeyboardInterrupt
