"""CPU pressure: for how much of a time span a process and its descendants waited for a core.

Background: the kernel counts for each thread the nanoseconds it ran and those it could have run and had no core
(`/proc/<pid>/task/<tid>/schedstat`, first and second number). Pressure stall information says the same of the whole host or
cgroup, where neighbours' waiting counts too; a trial has no cgroup of its own, so its threads are added up here.

Definition: a sum of waiting over threads is no share of time yet. PSI's "some" is a share of wall time for each core, averaged
over the cores weighted by how busy they were (kernel/sched/psi.c), and so is this: within a sampling interval of dt seconds in
which the threads ran R and waited W seconds, they kept K = (R + W) / dt cores occupied, at least 1 and at most those they are
bound to, and the pressure is W / (K dt), at most 1. One thread that shares its core evenly with a stranger: 0.5. Sixteen
threads on sixteen cores that each do: 0.5 too, not 8. A main thread that waits for the GPU half of the time: 0.

What is missed: threads that begin and end between two samples. Where there is no schedstat, PSI of the host is taken.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CONTENDED_ABOVE = 0.05
"""Pressure above which a compile beside other trials counts as slowed by them."""

_PROC = Path("/proc")
_EVERY_S = 1.0
"""Between two samples; one costs some milliseconds of a thread that competes with Dynamo for the interpreter."""

_Times = dict[tuple[int, int], tuple[int, int]]
"""Nanoseconds run and waited, by process and thread."""


def is_contended(neighbours: int, cpu_pressure: float | None) -> bool:
    """Whether a trial's compile time is inflated by other trials, as far as can be told.

    Args:
        neighbours: other trials on the same host at some time of the warm-up.
        cpu_pressure: of the warm-up; None if it is not known, and then neighbours are enough.
    """
    return neighbours > 0 and (cpu_pressure is None or cpu_pressure > CONTENDED_ABOVE)


class PressureGauge:
    """Samples this process and its descendants between `start` and `stop`, from a thread of its own.

    Args:
        cores: those the process is bound to.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pressure-gauge", daemon=True)
        self._seen: _Times = {}
        self._sampled_at = 0.0
        self._ran_s = self._pressed_s = self._span_s = 0.0
        self._host_before: float | None = None

    def start(self) -> None:
        """Begins the time span."""
        self._host_before = _host_some_s()
        self._seen, self._sampled_at = _times(os.getpid()), time.monotonic()
        self._thread.start()

    def stop(self) -> float | None:
        """Ends the time span and returns its pressure, from 0 to 1; None where the kernel does not say."""
        self._ended.set()
        self._thread.join()
        self._sample()
        if self._ran_s > 0:
            return self._pressed_s / self._span_s
        host_now = _host_some_s()
        if host_now is None or self._host_before is None:
            return None
        return min(1.0, (host_now - self._host_before) / self._span_s)

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        now, times = time.monotonic(), _times(os.getpid())
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in times.items():
            ran_before, waited_before = self._seen.get(thread, (0, 0))
            if ran < ran_before:  # another thread, of the same number
                ran_before = waited_before = 0
            ran_s += (ran - ran_before) / 1e9
            waited_s += (waited - waited_before) / 1e9
        span_s = now - self._sampled_at
        self._seen, self._sampled_at = times, now
        self._ran_s += ran_s
        self._span_s += span_s
        self._pressed_s += span_s * pressure(ran_s, waited_s, span_s, self._cores)


def pressure(ran_s: float, waited_s: float, span_s: float, cores: int) -> float:
    """The definition at the head of this module, for one interval.

    Args:
        ran_s: seconds that threads ran, added up.
        waited_s: seconds that they were ready to run and did not.
        span_s: the interval's length.
        cores: those the threads may run on.
    """
    if span_s <= 0:
        return 0.0
    occupied = min(max((ran_s + waited_s) / span_s, 1.0), cores)
    return min(1.0, waited_s / (occupied * span_s))


def _times(root: int) -> _Times:
    """Of every thread of a process and its descendants."""
    found: _Times = {}
    for process in _tree(root):
        try:
            threads = os.listdir(_PROC / str(process) / "task")
        except OSError:
            continue  # gone meanwhile
        for thread in threads:
            try:
                with open(_PROC / str(process) / "task" / thread / "schedstat", "rb") as file:
                    ran, waited, _ = file.read().split()
            except (OSError, ValueError):
                continue  # gone meanwhile, or a kernel without it
            found[process, int(thread)] = int(ran), int(waited)
    return found


def descendants(root: int) -> set[int]:
    """The process and its descendants."""
    return set(_tree(root))


def _tree(root: int) -> Iterator[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                with open(_PROC / entry / "stat", "rb") as file:
                    after_name = file.read().rpartition(b")")[2]  # a name may hold spaces and brackets
                parent = int(after_name.split()[1])
            except (OSError, IndexError, ValueError):
                continue  # gone meanwhile
            children.setdefault(parent, []).append(int(entry))
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting.extend(children.get(process, []))


def _host_some_s() -> float | None:
    """Seconds of the host's "some" CPU pressure since it started; None where the kernel does not count it."""
    try:
        text = (_PROC / "pressure" / "cpu").read_text(encoding="ascii")
        return int(text.splitlines()[0].rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None
