"""CPU pressure: the fraction of time that a process and its descendants spent waiting for a core.

Background: for each thread, the kernel counts the nanoseconds it ran and the nanoseconds it was runnable without a core
(`/proc/<pid>/task/<tid>/schedstat`, first and second number). Pressure stall information (PSI) reports the same for the whole
host or cgroup, including what other processes waited. A trial has no cgroup of its own, so its threads are added up here.

Definition: the sum of waiting times over threads is not a fraction of time. PSI's "some" is a fraction of wall time per core,
averaged over the cores and weighted by how busy they were (kernel/sched/psi.c). This module does the same: if the threads ran R
seconds and waited W seconds in a sampling interval of dt seconds, they occupied K = (R + W) / dt cores, at least 1 and at most as
many as they are bound to, and the pressure is W / (K dt), at most 1. One thread that shares its core evenly with another process:
0.5. Sixteen threads on sixteen cores, each sharing its core this way: also 0.5, not 8. A main thread that waits for the GPU half
of the time: 0.

Limits: threads that start and end between two samples are missed. Without schedstat, the pressure is not known.
"""

import os
import threading
import time
from pathlib import Path

CONTENDED_ABOVE = 0.05  # pressure above which a compile that ran next to other trials counts as slowed by them

_PROC = Path("/proc")
_SAMPLE_INTERVAL_S = 1.0
"""A sample takes a few milliseconds of a thread that competes with Dynamo for the interpreter, so not more often."""

_ThreadTimes = dict[tuple[int, int], tuple[int, int]]  # nanoseconds run and waited, by (process, thread)


def is_contended(neighbors: int, cpu_pressure: float | None) -> bool:
    """Tells whether other trials inflated a compile time. If the pressure is None (unknown), any neighbor counts."""
    return neighbors > 0 and (cpu_pressure is None or cpu_pressure > CONTENDED_ABOVE)


class PressureGauge:
    """Samples this process and its descendants from a thread of its own, between `start` and `stop`."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pressure-gauge", daemon=True)
        self._seen: _ThreadTimes = {}
        self._sampled_at = 0.0
        self._ran_s = self._pressed_s = self._span_s = 0.0

    def start(self) -> None:
        """Starts sampling."""
        self._seen, self._sampled_at = _thread_times(os.getpid()), time.monotonic()
        self._thread.start()

    def stop(self) -> float | None:
        """Stops sampling and returns the pressure, from 0 to 1; None if the kernel does not report it."""
        self._ended.set()
        self._thread.join()
        self._sample()
        return self._pressed_s / self._span_s if self._ran_s > 0 else None

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        now, times = time.monotonic(), _thread_times(os.getpid())
        ran_s = waited_s = 0.0
        for thread, (ran, waited) in times.items():
            ran_before, waited_before = self._seen.get(thread, (0, 0))
            if ran < ran_before:  # the kernel reused the thread's number
                ran_before = waited_before = 0
            ran_s += (ran - ran_before) / 1e9
            waited_s += (waited - waited_before) / 1e9
        span_s = now - self._sampled_at
        self._seen, self._sampled_at = times, now
        self._ran_s += ran_s
        self._span_s += span_s
        self._pressed_s += span_s * interval_pressure(ran_s, waited_s, span_s, self._cores)


def interval_pressure(ran_s: float, waited_s: float, span_s: float, cores: int) -> float:
    """Computes the pressure of one interval, in which threads ran `ran_s`, and could have run `waited_s` more, in all."""
    if span_s <= 0:
        return 0.0
    occupied = min(max((ran_s + waited_s) / span_s, 1.0), cores)
    return min(1.0, waited_s / (occupied * span_s))


def _thread_times(root: int) -> _ThreadTimes:
    """Returns the times of every thread of a process and its descendants."""
    found: _ThreadTimes = {}
    for process in process_tree(root):
        try:
            threads = os.listdir(_PROC / str(process) / "task")
        except OSError:
            continue  # the process has ended
        for thread in threads:
            try:
                with open(_PROC / str(process) / "task" / thread / "schedstat", "rb") as file:
                    ran, waited, _ = file.read().split()
            except (OSError, ValueError):
                continue  # the thread has ended, or the kernel has no schedstat
            found[process, int(thread)] = int(ran), int(waited)
    return found


def process_tree(root: int) -> set[int]:
    """Returns the process IDs of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                with open(_PROC / entry / "stat", "rb") as file:
                    after_name = file.read().rpartition(b")")[2]  # the name may contain spaces and parentheses
                parent = int(after_name.split()[1])
            except (OSError, IndexError, ValueError):
                continue  # the process has ended
            children.setdefault(parent, []).append(int(entry))
    tree, waiting = {root}, [root]
    while waiting:
        new = [child for child in children.get(waiting.pop(), []) if child not in tree]
        tree.update(new)
        waiting.extend(new)
    return tree
