"""Enforces deadlines, cleans up after dead workers, and reads from their logs why they died.

Background: every process of a trial's worker inherits a marker in its environment. When the worker is gone, no matter how it
ended, the reaper, a small process next to it, kills every process that still carries the marker (compile workers, compilers) or
is in the Unix session that the worker led, and removes the worker's scratch folder. Until then it keeps the log from filling the
disk (`log_bounds.py`). If the kernel's out-of-memory killer was active, the reaper says so in the trial's log.
Deadlines inside the worker use `faulthandler`, which does not need the GIL: it also ends a compiler that is stuck in C++, and
writes the stacks of all threads to the log.

Ray reports only that a worker is gone. Its log says more: Python's fault handler writes "Fatal Python error" and the stacks
when a signal such as SIGSEGV ends the process, and "Timeout" when its deadline does. SIGKILL leaves nothing. If the log was on
a host that is gone, there is no crash report, and the clock and Ray's message have to do.
"""

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
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from orchestrator.guard.log_bounds import free_middle

OOM_NOTE = "the kernel's out-of-memory killer ended"  # start of the reaper's note in a log

_FATAL = re.compile(r"^Fatal Python error: (.+?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$", re.MULTILINE)
_RECOMPILE = re.compile(r"^.*\[__recompiles\] Recompiling function .*(?:\n.*\[__recompiles\] (?!Recompiling).*)*", re.MULTILINE)
_PREFIX = re.compile(r"^.*?\[__recompiles\] ", re.MULTILINE)
_MAX_TAIL_BYTES = 1_000_000  # how much of the end of a log is read; enough for the stacks of several hundred threads


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What the logs of one attempt say about its end."""

    fatal_signal: str | None = None  # Python's name of the signal, such as "Segmentation fault"
    timed_out: bool = False
    oom_killed: bool = False
    recompiles: tuple[str, ...] = ()  # what torch compiled again, and why, as in a record's `recompile_reasons`


def log_sizes(folder: Path) -> dict[str, int]:
    """Returns the current size of each worker's log in bytes, by file name; the next attempt's output starts there."""
    return {path.name: path.stat().st_size for path in folder.glob("worker-*.log")} if folder.is_dir() else {}


def read_crash_report(folder: Path, before: Mapping[str, int]) -> CrashReport:
    """Reads what was added to a trial's logs; logs that cannot be read count as empty."""
    text = "".join(_tail(path, before.get(path.name, 0)) for path in sorted(folder.glob("worker-*.log")))
    return parse_crash_report(text)


def parse_crash_report(text: str) -> CrashReport:
    """Parses the text of a log."""
    from compile_sweep.harness.diagnostics.torch_logs import parse_recompile  # only dead trials need it

    fatal = _FATAL.search(text)
    return CrashReport(
        fatal_signal=fatal.group(1) if fatal else None,
        timed_out=_TIMEOUT.search(text) is not None,
        oom_killed=OOM_NOTE in text,
        recompiles=tuple(parse_recompile(_PREFIX.sub("", told[0])) for told in _RECOMPILE.finditer(text)),
    )


def _tail(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(begin, size - _MAX_TAIL_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


ATTEMPT_MARKER = "COMPILE_SWEEP_ATTEMPT"  # environment variable that identifies the attempt a process belongs to

SESSION_MARKER = "COMPILE_SWEEP_SESSION"
"""Environment variable that identifies the local Ray session a process belongs to. Reapers have neither: they outlive both."""

_POLL_S = 0.2
_OOM_WINDOW_POLLS = 10
"""Number of polls over which the reaper looks back when the worker ends: an earlier out-of-memory kill is unrelated."""

_LOG = 1  # the reaper's standard output is the log of the worker that it watches
_KILL_AGAIN_S = 1.0  # how long the reaper keeps killing: a process may start another one while it is being killed


def log_crashes(log: IO[str]) -> None:
    """Makes a signal such as SIGSEGV write the stacks of all threads to `log` before it ends this process."""
    faulthandler.enable(file=log, all_threads=True)


def set_deadline(seconds: float, log: IO[str]) -> None:
    """Ends this process after so many seconds, with the stacks of all threads in `log`. Replaces an earlier deadline."""
    faulthandler.dump_traceback_later(max(0.1, seconds), exit=True, file=log)


def clear_deadline() -> None:
    """Cancels the deadline."""
    faulthandler.cancel_dump_traceback_later()


def start_reaper(scratch: Path) -> None:
    """Starts the process that cleans up after this one, which must carry the marker."""
    marker = os.environ.get(ATTEMPT_MARKER)
    if not marker:
        raise RuntimeError(f"{ATTEMPT_MARKER} is not set, so this process's children could not be identified")
    mine = os.getpid()
    words = (str(mine), _start_time(mine) or "", marker, str(scratch))
    start_apart("orchestrator.guard.watchdog", *words, stdin=subprocess.DEVNULL)  # it forks and exits at once, see below


def start_apart(module: str, *words: str, **options: Any) -> None:
    """Runs a module in a session of its own, with these options of `Popen`. It outlives what the markers identify."""
    environment = {name: value for name, value in os.environ.items() if name not in (ATTEMPT_MARKER, SESSION_MARKER)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", module, *words]
    started = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    threading.Thread(target=started.wait, name="collects-what-ends", daemon=True).start()


def kill_marked(marker: str, variable: str = ATTEMPT_MARKER, sessions: Collection[int] = ()) -> int:
    """Kills every process on this host that `find_marked` finds; returns their number."""
    killed = 0
    for process in find_marked(marker, variable, sessions):
        with suppress(OSError):  # the process has ended
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed


def find_marked(marker: str, variable: str = ATTEMPT_MARKER, sessions: Collection[int] = ()) -> list[int]:
    """Returns the IDs of other processes of this host that carry the marker or, whatever their title, are in such a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # the process has ended or belongs to another user
            state, _, _, session = _status_fields(entry)[:4]
            if state in "ZX":
                continue
            if int(session) in sessions or f"{variable}={marker}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def sessions_led_by(processes: Collection[int]) -> frozenset[int]:
    """Returns the Unix sessions whose leader is one of the processes; their members were all started by it."""
    leaders = set()
    for process in processes:
        with suppress(OSError):  # the process has ended
            if os.getsid(process) == process:
                leaders.add(process)
    return frozenset(leaders)


def _reap(watched: int, started_at: str, marker: str, scratch: Path) -> None:
    kills = deque([_oom_kills()], maxlen=_OOM_WINDOW_POLLS)
    sessions = sessions_led_by([watched])
    while _start_time(watched) == started_at:
        time.sleep(_POLL_S)
        kills.append(_oom_kills())
        free_middle(_LOG)
    if killed := kills[-1] - kills[0]:
        print(f"{OOM_NOTE} {killed} process{'es' if killed > 1 else ''} of this host as the worker went", flush=True)
    give_up = time.monotonic() + _KILL_AGAIN_S
    while kill_marked(marker, sessions=sessions) or time.monotonic() < give_up:
        time.sleep(_POLL_S)
    shutil.rmtree(scratch, ignore_errors=True)


def _oom_kills() -> int:
    """Returns the number of processes that the kernel has killed for lack of memory since boot; 0 if it does not say."""
    with suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _start_time(process: int) -> str | None:
    """Returns when a process started, in kernel ticks, which identifies it if its ID is reused; None once it is gone."""
    try:
        state, *others = _status_fields(Path(f"/proc/{process}"))
    except OSError:
        return None
    return None if state in "ZX" else others[18]


def _status_fields(process: Path) -> list[str]:
    """Returns the fields of a process's `stat` after its name: state, parent, process group, session and so on."""
    text = (process / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()  # the name may contain spaces and parentheses


if __name__ == "__main__":
    if os.fork():  # exit the parent: Ray kills the children of a worker that it ends, and the reaper must not be one of them
        os._exit(0)
    _reap(int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
