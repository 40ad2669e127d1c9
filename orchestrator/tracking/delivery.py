"""Brings what is recorded to the trackers, each in a thread of its own: one that hangs or fails costs a sweep nothing.

A tracker is opened before the sweep begins, so that a wrong address is found then; whatever it does not take later is told in a
sentence at the end, and remains in the sweep's folder.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError, TrackingError
from orchestrator.config import shown
from orchestrator.tracking.base import Destination, LoggedTrial, Service, entry_of

OPENS_WITHIN_S = 90.0
"""Time for a tracker to answer at all, importing its library included."""

ENDS_WITHIN_S = 60.0
"""Time for all trackers to take what is left once the sweep has ended."""

_LONGEST = 300
"""Characters of a complaint that are worth reading."""


class Tracker(Protocol):
    """Something that trials are logged to. Used by one thread; every method may raise anything."""

    def log(self, entry: LoggedTrial) -> None:
        """Takes a trial."""
        ...

    def close(self, report: Path | None) -> None:
        """Takes the sweep's report, if there is one, and ends."""
        ...


class Tracking:
    """What a sweep logs to; nothing without destinations.

    Args:
        destinations: where, like `mlflow:http://host:5000`.
        output: the sweep's folder, which need not exist yet. What it holds already is not logged again.

    Raises:
        ConfigError: a destination is none, or its library is not installed.
        TrackingError: one does not answer.
    """

    def __init__(self, destinations: Sequence[str] = (), output: Path = Path()) -> None:
        places = [Destination.parse(text) for text in destinations]
        self._deliveries = [Delivery(place, lambda place=place: opened(place, output)) for place in places]  # type: ignore[misc]
        self._fresh: list[Callable[[], Sequence[records.TrialRecord | records.WarmStart]]] = []
        if places:
            self._fresh = [records.follow(output).fresh, records.follow_warm_starts(output).fresh]
        for fresh in self._fresh:
            fresh()

    def __bool__(self) -> bool:
        return bool(self._deliveries)

    def catch_up(self) -> None:
        """Has everything logged that was recorded since the last call; does not wait for it."""
        for fresh in self._fresh:
            for record in fresh():
                for delivery in self._deliveries:
                    delivery.put(entry_of(record))

    def finish(self, report: Path | None = None, limit_s: float = ENDS_WITHIN_S) -> list[str]:
        """Waits until all is logged, at most this long; a sentence for each tracker that did not take everything."""
        self.catch_up()
        ends_at = time.monotonic() + limit_s
        for delivery in self._deliveries:
            delivery.end(report)
        complaints = [delivery.complaint(max(0.0, ends_at - time.monotonic())) for delivery in self._deliveries]
        return [complaint for complaint in complaints if complaint is not None]


class Delivery:
    """One tracker and its thread.

    Raises:
        ConfigError: its library is not installed.
        TrackingError: it could not be opened.
    """

    def __init__(self, destination: Destination, open_it: Callable[[], Tracker]) -> None:
        self._destination = destination
        self._waiting: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._opening: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._count = 0
        self._refused: list[str] = []
        self._taken = 0
        self._thread = threading.Thread(target=self._work, args=(open_it,), name=f"log-to-{destination.service}", daemon=True)
        self._thread.start()
        try:
            failure = self._opening.get(timeout=OPENS_WITHIN_S)
        except queue.Empty:
            raise TrackingError(f"{destination} did not answer within {OPENS_WITHIN_S:g} s; see that it is there") from None
        if isinstance(failure, ConfigError):
            raise failure
        if failure is not None:
            raise TrackingError(f"{destination} cannot be logged to ({_said(failure)}); see that it is there and lets you in")

    def put(self, entry: LoggedTrial) -> None:
        """Has it logged."""
        self._count += 1
        self._waiting.put(lambda tracker: tracker.log(entry))

    def end(self, report: Path | None) -> None:
        """Has the report logged, and the tracker closed."""
        self._count += 1
        self._waiting.put(lambda tracker: tracker.close(report))
        self._waiting.put(None)

    def complaint(self, limit_s: float) -> str | None:
        """What was not logged, and why, after waiting for the rest; None if all was."""
        self._thread.join(limit_s)
        missing = self._count - self._taken
        if not missing:
            return None
        why = self._refused[0] if self._refused else f"it was not done within {limit_s:.0f} s"
        return f"{self._destination} did not take {missing} of {self._count} entries ({why}); the sweep's folder has them all"

    def _work(self, open_it: Callable[[], Tracker]) -> None:
        try:
            tracker = open_it()
        except Exception as error:
            self._opening.put(error)
            return
        self._opening.put(None)
        while (job := self._waiting.get()) is not None:
            try:
                job(tracker)
                self._taken += 1
            except Exception as error:  # a library's or a server's; the sweep goes on without it
                self._refused.append(_said(error))


def opened(destination: Destination, output: Path) -> Tracker:
    """The tracker of a destination.

    Raises:
        ConfigError: its library is not installed.
        Exception: whatever its library says.
    """
    openers: dict[Service, Callable[[str, Path], Any]] = {
        Service.MLFLOW: _mlflow, Service.TENSORBOARD: _tensorboard, Service.WANDB: _wandb,
    }  # fmt: skip
    try:
        tracker: Tracker = openers[destination.service](destination.where, output)
    except ModuleNotFoundError as error:
        name = destination.service
        raise ConfigError(f"--log-to {destination} needs {error.name}; install it with: make install EXTRAS={name}") from None
    return tracker


def _mlflow(where: str, output: Path) -> Tracker:
    from orchestrator.tracking.mlflow import MlflowRuns  # each imports its library, which most sweeps do without

    return MlflowRuns(where, output)


def _tensorboard(where: str, output: Path) -> Tracker:
    from orchestrator.tracking.tensorboard import EventFiles

    return EventFiles(where, output)


def _wandb(where: str, output: Path) -> Tracker:
    from orchestrator.tracking.wandb import WandbRuns

    return WandbRuns(where, output)


def _said(error: BaseException) -> str:
    """What an error of a library says, in one line and without a password."""
    words = " ".join(shown(str(error)).split())
    return f"{type(error).__name__}: {words if len(words) <= _LONGEST else words[: _LONGEST - 1] + '…'}"
