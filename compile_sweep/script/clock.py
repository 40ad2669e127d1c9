"""Times the steps of a script: from one optimizer step to the next, minus the wait for data.

Background: on a GPU the marks are CUDA events. If the script waits for a `DataLoader`, the GPU idles only after it has finished
what was launched before; an event before the wait and one after it measure for how long. On a CPU the wait is the call's
duration.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import CompileContext
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from compile_sweep.harness.steady import synchronize
from compile_sweep.script.monkeypatch import replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step."""

    ms: float
    """Milliseconds from mark to mark."""
    wait_ms: float
    """Milliseconds of that spent waiting for data."""
    interrupted: bool
    """Whether it included an evaluation or a checkpoint."""
    is_new: bool = False
    """Whether its batch had a shape that has not come often enough before, so that code or kernels were prepared for it."""
    samples: int = 1
    tokens: int = 1
    elements: int = 0
    """Number of elements of the tensors that the script gave to the modules it trains."""

    @property
    def compute_ms(self) -> float:
        """Milliseconds without the wait."""
        return max(self.ms - self.wait_ms, 1e-6)


@dataclass(slots=True)
class _Open:
    """A step whose events may not have completed."""

    began: Any
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    interrupted: bool = False
    is_new: bool = False
    size: tuple[int, int] = (1, 1)
    elements: int = 0


class StepClock:
    """Marks steps as they end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[_Open] = []
        self._now: _Open | None = None
        self._is_waiting = False
        self.behind_ms = 0.0
        """Milliseconds that the device still worked when the last steps were launched."""
        self.idle_share = 0.0
        """Fraction of the last steps' time that this thread slept outside of a `DataLoader`, as in `time.sleep`."""
        self._began_at = 0.0
        self._threads: dict[str, tuple[int, int]] = {}  # at the beginning of what is timed
        self._ran_ns = self._waited_ns = 0
        self._active_ms = 0.0  # that this thread ran or could have run

    def start(self) -> None:
        """Starts timing at the beginning of a step; earlier steps are forgotten."""
        self._steps = []
        self._threads, self._began_at = _thread_times(), time.perf_counter()
        self._now = _Open(self._mark())

    def step(self, size: tuple[int, int]) -> None:
        """Marks the end of a step of so many samples and tokens, and the beginning of the next one."""
        if self._now is not None:
            self._now.ended, self._now.size = self._mark(), size
            self._steps.append(self._now)
            self._now = _Open(self._now.ended)

    def interrupt(self) -> None:
        """Notes that the current step includes something other than training."""
        if self._now is not None:
            self._now.interrupted = True

    def meet_new(self) -> None:
        """Notes that the current step's batch has a new shape."""
        if self._now is not None:
            self._now.is_new = True

    def meet(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Notes that a module was given tensors of these shapes in the current step."""
        if self._now is not None:
            self._now.elements += sum(map(math.prod, shapes))

    @property
    def is_interrupted(self) -> bool:
        """Whether the current step includes something other than training."""
        return self._now is not None and self._now.interrupted

    def stop(self) -> list[StepTime]:
        """Returns the times of all steps since `start`; waits for the device."""
        launched = time.perf_counter()
        synchronize(self._device)
        self.behind_ms = 1e3 * (time.perf_counter() - launched)
        elapsed_ms = 1e3 * (time.perf_counter() - self._began_at)
        self._count_waits_for_cores()
        times = [
            StepTime(
                ms=self._between(one.began, one.ended),
                wait_ms=sum(self._between(before, after) for before, after in one.waits),
                interrupted=one.interrupted,
                is_new=one.is_new,
                samples=one.size[0],
                tokens=one.size[1],
                elements=one.elements,
            )
            for one in self._steps
        ]
        idle_ms = elapsed_ms - self._active_ms - sum(one.wait_ms for one in times)
        self.idle_share = max(0.0, idle_ms / elapsed_ms) if self._active_ms else 0.0
        self._steps, self._now = [], None
        return times

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting for data, once if blocks are nested."""
        if self._now is None or self._is_waiting:
            yield
            return
        before, self._is_waiting = self._mark(), True
        try:
            yield
        finally:
            self._is_waiting = False
            if self._now is not None:
                self._now.waits.append((before, self._mark()))

    @property
    def core_wait_share(self) -> float:
        """Fraction of the time that this process's threads could have run in the last pass and others had their cores.

        0 if the kernel does not tell. Processes of a `DataLoader` are others, too.
        """
        return self._waited_ns / max(1, self._ran_ns + self._waited_ns)

    def _count_waits_for_cores(self) -> None:
        before, self._ran_ns, self._waited_ns, self._active_ms = self._threads, 0, 0, 0.0
        for thread, (ran, waited) in _thread_times().items():
            ran_before, waited_before = before.get(thread, (0, 0))
            self._ran_ns += max(0, ran - ran_before)
            self._waited_ns += max(0, waited - waited_before)
            if int(thread) == threading.get_native_id() and thread in before:
                self._active_ms = (ran - ran_before + waited - waited_before) / 1e6

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        return float(before.elapsed_time(after)) if self._device.type == "cuda" else 1e3 * (after - before)


def _thread_times() -> dict[str, tuple[int, int]]:
    """Returns the nanoseconds that each of this process's threads ran and waited for a core; none if the kernel tells none."""
    found: dict[str, tuple[int, int]] = {}
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        with suppress(OSError, ValueError):  # the thread has ended, or the kernel has no schedstat
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
                ran, waited, _ = file.read().split()
            found[thread] = int(ran), int(waited)
    return found


def interrupting(clock: Callable[[], StepClock | None], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module's call, which without gradients is an evaluation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and (running := clock()) is not None:
            running.interrupt()
        return inner(*args, **kwargs)

    return call


@contextmanager
def saves_watched(clock: Callable[[], StepClock | None]) -> Iterator[None]:
    """Notes calls of `torch.save` in the block as checkpoints, unless the compiler makes them.

    A tensor's storage is pickled by `torch.save`, and so are the constants of a graph that goes into torch's cache.
    """

    def noting(save: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **kwargs: Any) -> None:
            if (running := clock()) is not None and CompileContext.try_get() is None:
                running.interrupt()
            save(*args, **kwargs)

        return noted

    with replaced(torch, "save", noting):
        yield


@contextmanager
def loaders_watched(clock: Callable[[], StepClock | None]) -> Iterator[None]:
    """Counts the time in iterators of `DataLoader` as waiting, in the block, and the time in which their workers start."""

    def wrapped(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def taken(iterated: Any) -> Any:
            running = clock()
            if running is None:
                return take(iterated)
            with running.waiting():
                return take(iterated)

        return taken

    with replaced(_BaseDataLoaderIter, "__next__", wrapped), replaced(DataLoader, "__iter__", wrapped):
        yield
