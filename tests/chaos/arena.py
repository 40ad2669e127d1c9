"""Breaks sweeps on purpose: starts them, finds their processes, and checks what is left when they are over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_workload
import psutil
from samples import wait_until

RUN = "CHAOS_RUN"
"""Environment variable whose value distinguishes one arena's processes from all others on the host."""

GONE_WITHIN_S = 10.0
"""Seconds after a sweep until all of it must be gone, if processes need not wait for a core."""

HERE = Path(__file__).resolve().parent
PYTHON_PATH = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE, *sys.path)))
"""Import path of started processes: the project, shared test modules, and this interpreter's packages."""


def setting(multiple: int, further: str = "scope=eager") -> str:
    """Returns the setting that the workload recognizes by this multiple; 0 means none."""
    return f"{further},padding=longest,pad_multiple={multiple}" if multiple else f"{further},padding=max"


@dataclass(slots=True)
class Arena:
    """One sweep's folder, faults and processes."""

    folder: Path
    """An empty folder for the sweep and its files."""
    temporary: Path
    """A short path, for Ray's sockets."""
    faults: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What happens to which setting, by its multiple: `kind`, `phase`, and `times` unless always."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the workload's plan."""
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Path = field(init=False)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex, init=False)
    _shared_before: set[Path] = field(default_factory=set, init=False)
    _sessions: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.output = self.folder / "sweep"
        self._shared_before = _shared_memory()
        faults = {str(multiple): dict(fault) for multiple, fault in self.faults.items()}
        plan = {"faults": faults, "events": str(self._events), **self.further}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts a sweep in the folder, or continues it."""
        environment = {
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "TMPDIR": str(self.temporary),
            "COMPILE_SWEEP_CACHE_KEY": "ab" * 32,
            "RAY_worker_niceness": "0",  # 15 by default, with which a trial on a busy machine hardly progresses
            chaos_workload.PLAN: str(self.folder / "plan.json"),
            RUN: self.run_id,
            **self.environment,
        }
        usual = [] if "--resume" in words else ["--workload", "chaos_workload:Chaotic"]
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.sweep", "--output", str(self.output), *usual, *words],
            cwd=HERE,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def damage(self, text: str) -> None:
        """Appends text after the last record."""
        with (self.output / "trials.jsonl").open("a") as log:
            log.write(text)

    def sweep(self, *words: str, timeout_s: float = 1700.0) -> subprocess.CompletedProcess[str]:
        """Runs a sweep to its end."""
        return self.finish(self.start(*words), timeout_s)

    def finish(self, running: subprocess.Popen[str], timeout_s: float = 1700.0) -> subprocess.CompletedProcess[str]:
        """Waits for a sweep's end; it must not have ended in a traceback."""
        try:
            printed, complaints = running.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.end_all()
            raise
        assert "Traceback" not in printed + complaints, printed + complaints
        return subprocess.CompletedProcess(running.args, running.returncode, printed, complaints)

    def records(self) -> list[dict[str, Any]]:
        """Returns the trials' records, in order."""
        path = self.output / "trials.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self, multiple: int) -> dict[str, Any]:
        """Returns the record of this setting."""
        (found,) = (record for record in self.records() if (record["settings"]["pad_multiple"] or 0) == multiple)
        return found

    def events(self) -> list[dict[str, Any]]:
        """Returns the events that the workers recorded."""
        return chaos_workload.events(self._events)

    def note_fault(self, multiple: int = -1) -> None:
        """Records that something is being broken from outside; negative numbers distinguish several faults."""
        chaos_workload.note(self._events, "fault", multiple)

    def has_begun(self, multiple: int, times: int = 1) -> bool:
        """Tells whether workers have begun with this setting that often."""
        return sum(event["what"] == "begun" and event["multiple"] == multiple for event in self.events()) >= times

    def begun(self) -> int:
        """Returns how many workers have begun."""
        return sum(event["what"] == "begun" for event in self.events())

    def recovery_s(self, multiple: int = -1) -> float | None:
        """Returns the seconds from this setting's first fault, or the first from outside, to the next worker's begin, if any."""
        events = self.events()
        fault_at = next(event["at"] for event in events if event["what"] == "fault" and event["multiple"] == multiple)
        after = [event["at"] - fault_at for event in events if event["what"] == "begun" and event["at"] > fault_at]
        return min(after, default=None)

    def processes(self) -> list[psutil.Process]:
        """Every process of this arena's sweeps, by its environment, and by its Unix session if an earlier call saw the leader.

        Two of Ray's agents overwrite their environment with a title.
        """
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                session = os.getsid(process.pid)
                if process.environ().get(RUN) == self.run_id:
                    found.append(process)
                    if session == process.pid:
                        self._sessions.add(session)
                elif session in self._sessions:
                    found.append(process)
        return found

    def kill(self, words: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to the processes whose command contains these words; returns how many there were."""
        killed = 0
        for process in self.processes():
            with suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    process.send_signal(number)
                    killed += 1
        return killed

    def end_all(self) -> None:
        """Kills whatever is left."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def check_records(self, *, total: int, measured: set[int]) -> None:
        """Checks that no record is lost or duplicated, and that every undisturbed trial was measured."""
        records = self.records()
        assert len(records) == total, [(record["settings_key"], record["label"]) for record in records]
        assert max(Counter(record["settings_key"] for record in records).values()) == 1
        assert max(Counter(record["trial_id"] for record in records).values()) == 1
        for multiple in measured:
            record = self.record(multiple)
            assert record["status"] == "ok", record
            assert record["phase"] == "done"

    def check_nothing_is_left(self) -> float:
        """Checks that no process, shared memory or scratch folder of the sweep remains; returns when the last process ended."""
        began = time.monotonic()
        within_s = GONE_WITHIN_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        wait_until(lambda: not self.processes(), within_s, self.processes)
        gone_s = time.monotonic() - began
        wait_until(lambda: not self._scratch(), max(1.0, within_s - gone_s), self._scratch)
        wait_until(lambda: not self._shared_memory_left(), max(1.0, within_s - gone_s), self._shared_memory_left)
        return gone_s

    @property
    def _events(self) -> Path:
        return self.folder / "events.jsonl"

    def _scratch(self) -> list[Path]:
        return list(self.temporary.glob("compile-sweep-[0-9]*"))

    def _shared_memory_left(self) -> set[Path]:
        return {path for path in _shared_memory() - self._shared_before if not _is_used(path)}


@dataclass(slots=True)
class Arenas:
    """Creates arenas, and ends what is left of them."""

    folder: Path
    temporary: Path
    _made: list[Arena] = field(default_factory=list)

    def __call__(self, faults: Mapping[int, Mapping[str, Any]] | None = None, **further: Any) -> Arena:
        folder = self.folder / str(len(self._made))
        folder.mkdir()
        arena = Arena(folder=folder, temporary=self.temporary, faults=faults or {}, **further)
        self._made.append(arena)
        return arena

    def close(self) -> None:
        """Ends what a failed test left behind."""
        for arena in self._made:
            arena.end_all()


def temporary_folder() -> Iterator[Path]:
    """A folder for all sweeps of a run, with a path short enough for sockets; without C++ headers, which nothing here needs."""
    folder = Path(tempfile.mkdtemp(prefix="ch", dir="/tmp"))
    from compile_sweep.harness.toolchain import cpp_header_mark

    mark = cpp_header_mark()
    headers = folder / mark.parent.parent.name / mark.parent.name
    headers.mkdir(parents=True)
    (headers / mark.name).write_text("not needed\n")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def when(condition: Callable[[], bool], timeout_s: float = 900.0) -> None:
    """Waits for a condition that may take long on a busy machine."""
    wait_until(condition, timeout_s)


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def _is_used(segment: Path) -> bool:
    """Tells whether a living process has it mapped or open: then it belongs to that process and is not a leak.

    It is searched for by its inode, because a semaphore is mapped under another name before it gets its own.
    """
    try:
        stat = segment.stat()
    except FileNotFoundError:
        return True  # removed meanwhile
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if f" {device} {stat.st_ino} " in Path(f"/proc/{process.pid}/maps").read_text():
                return True
            if any(str(segment) == os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
    return False
