"""Deadlines, and that nothing outlives a trial.

Every process of a trial's worker inherits a marker in its environment. A reaper, a small process beside the worker, notices
when the worker is gone, however it went, kills whatever still carries the marker (compile workers, compilers) and removes the
worker's scratch folder. It says in the trial's log if the kernel's out-of-memory killer was at work. Deadlines in the worker use
`faulthandler`, which needs no GIL: a compiler stuck in C++ is ended too, and the stacks of all its threads are left in the log.

What a dead worker left in its trial's log: a fatal signal, its own deadline, a host without memory. Read, never guessed.

Background: Ray says of a worker that is gone only that it is gone. Its log says more: Python's fault handler writes
"Fatal Python error" and the stacks when a signal such as SIGSEGV ends the process, and "Timeout" when its deadline does; the
reaper beside it (`watchdog.py`) notes whether the kernel ended processes for want of memory meanwhile. SIGKILL leaves nothing.
Where a worker's log lay on a host that is gone, there is no evidence, and the clock and Ray's words decide.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OOM_NOTE = "the kernel's out-of-memory killer ended"
"""How the reaper's note begins."""

_FATAL = re.compile(r"^Fatal Python error: (.+?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$", re.MULTILINE)
_MOST_BYTES = 1_000_000
"""Read of the end of a log; stacks of some hundred threads fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the logs of one attempt say."""

    fatal: str | None = None
    """Python's words for the signal, like "Segmentation fault"."""
    timed_out: bool = False
    oom_killed: bool = False


def lengths(folder: Path) -> dict[str, int]:
    """Bytes of each worker's log so far, by file name; what is behind them belongs to the attempt that begins now."""
    return {path.name: path.stat().st_size for path in folder.glob("worker-*.log")} if folder.is_dir() else {}


def gathered(folder: Path, before: Mapping[str, int]) -> Evidence:
    """What the logs say since they had these lengths; nothing where they cannot be read.

    Args:
        folder: the trial's own.
        before: what `lengths` returned when the attempt began.
    """
    text = "".join(_tail(path, before.get(path.name, 0)) for path in sorted(folder.glob("worker-*.log")))
    return read_from(text)


def read_from(text: str) -> Evidence:
    """What the text of a log says."""
    fatal = _FATAL.search(text)
    return Evidence(
        fatal=fatal.group(1) if fatal else None,
        timed_out=_TIMEOUT.search(text) is not None,
        oom_killed=OOM_NOTE in text,
    )


def _tail(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(begin, size - _MOST_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


MARKER = "COMPILE_SWEEP_ATTEMPT"
"""Environment variable whose value names the attempt a process belongs to."""

SESSION = "COMPILE_SWEEP_SESSION"
"""The same for the Ray session of a sweep on this host alone. A reaper has neither, for it outlives both."""

_POLL_S = 0.2
_POLLS_BEFORE = 10
"""Of the reaper, over which it looks back when the worker goes: an out-of-memory kill of long ago has nothing to do with it."""

_NO_MORE_STARTS_S = 1.0
"""How long the reaper goes on looking: a process may be starting another while it is killed."""


def explain_crashes(log: IO[str]) -> None:
    """Has the stacks of all threads written to `log` should a signal such as SIGSEGV end this process."""
    faulthandler.enable(file=log, all_threads=True)


def arm(seconds: float, log: IO[str]) -> None:
    """Ends this process after so many seconds with the stacks of all threads in `log`; replaces an earlier deadline."""
    faulthandler.dump_traceback_later(max(0.1, seconds), exit=True, file=log)


def disarm() -> None:
    """Takes the deadline back."""
    faulthandler.cancel_dump_traceback_later()


def start_reaper(scratch: Path) -> None:
    """Starts the process that cleans up after this one.

    Args:
        scratch: a folder to remove once this process is gone.

    Raises:
        RuntimeError: this process does not carry the marker.
    """
    marker = os.environ.get(MARKER)
    if not marker:
        raise RuntimeError(f"{MARKER} is not set, so nothing could be told apart")
    environment = {name: value for name, value in os.environ.items() if name not in (MARKER, SESSION)}
    mine = os.getpid()
    started = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.guard.watchdog", str(mine), _started_at(mine) or "", marker, str(scratch)],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=started.wait, name="starts-the-reaper", daemon=True).start()  # it goes at once, see below


def kill_marked(marker: str, variable: str = MARKER) -> int:
    """Kills every process of this host that carries the marker; returns how many there were."""
    killed = 0
    for process in marked(marker, variable):
        with suppress(OSError):  # gone meanwhile
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def marked(marker: str, variable: str = MARKER) -> list[int]:
    """The processes of this host, this one left out, that carry the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # gone meanwhile, or another user's
            if f"{variable}={marker}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _reap(watched: int, started_at: str, marker: str, scratch: Path) -> None:
    kills = deque([_oom_kills()], maxlen=_POLLS_BEFORE)
    while _started_at(watched) == started_at:
        time.sleep(_POLL_S)
        kills.append(_oom_kills())
    if killed := kills[-1] - kills[0]:
        print(f"{OOM_NOTE} {killed} process{'es' if killed > 1 else ''} of this host as the worker went", flush=True)
    give_up = time.monotonic() + _NO_MORE_STARTS_S
    while kill_marked(marker) or time.monotonic() < give_up:
        time.sleep(_POLL_S)
    shutil.rmtree(scratch, ignore_errors=True)


def _oom_kills() -> int:
    """Processes of this host that the kernel ended for want of memory, since it started; 0 where it does not say."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _started_at(process: int) -> str | None:
    """When a process began, by the kernel's clock, which tells it from a later one of its number; None once it is gone."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state, *others = file.read().rpartition(")")[2].split()  # a name may hold spaces and brackets
    except OSError:
        return None
    return None if state in "ZX" else others[18]


if __name__ == "__main__":
    if os.fork():  # Ray kills the children of a worker that it ends, the reaper among them, were it one
        os._exit(0)
    _reap(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
