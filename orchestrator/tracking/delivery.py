"""Delivers records to trackers, each in a thread of its own: a tracker that hangs or fails costs a sweep nothing.

A tracker is opened before the sweep begins, so that a wrong address is found then. What it refuses later is reported in a
sentence at the end and remains in the sweep's folder.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError, TrackingError
from orchestrator.config import shown
from orchestrator.tracking.base import Destination, LoggedTrial, Service, entry_of

OPENS_WITHIN_S = 90.0  # seconds that a tracker may take to answer at all, including the import of its library
ENDS_WITHIN_S = 60.0  # seconds that all trackers together may take for the rest once the sweep has ended
_LONGEST = 300  # maximum length of a complaint, in characters


class Tracker(Protocol):
    """Something that trials are logged to. Used by one thread; every method may raise anything."""

    def log(self, entry: LoggedTrial) -> None:
        """Logs a trial."""
        ...

    def close(self, report: Path | None) -> None:
        """Logs the sweep's report, if there is one, and closes the tracker."""
        ...


class Tracking:
    """Trackers of a sweep, if any; ConfigError or TrackingError if one does not open. Existing records are not logged."""

    def __init__(self, destinations: Sequence[str] = (), output: Path = Path()) -> None:
        places = [Destination.parse(text) for text in destinations]
        self._deliveries = [Delivery(place, lambda place=place: opened(place, output)) for place in places]  # type: ignore[misc]
        self._fresh: list[Callable[[], Sequence[records.TrialRecord | records.WarmStart]]] = []
        if places:
            self._fresh = [records.follow(output).fresh, records.follow_warm_starts(output).fresh]
        for fresh in self._fresh:
            fresh()

    def catch_up(self) -> None:
        """Queues every record since the last call for logging, without waiting."""
        for fresh in self._fresh:
            for record in fresh():
                for delivery in self._deliveries:
                    delivery.put(entry_of(record))

    def finish(self, report: Path | None = None, limit_s: float = ENDS_WITHIN_S) -> list[str]:
        """Waits at most `limit_s` until everything is logged; returns a sentence for each tracker that missed something."""
        self.catch_up()
        ends_at = time.monotonic() + limit_s
        for delivery in self._deliveries:
            delivery.end(report)
        complaints = [delivery.complaint(max(0.0, ends_at - time.monotonic())) for delivery in self._deliveries]
        return [complaint for complaint in complaints if complaint is not None]


class Delivery:
    """A tracker and the thread that feeds it; raises ConfigError or TrackingError if it cannot be opened."""

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
        """Queues a trial for logging."""
        self._count += 1
        self._waiting.put(lambda tracker: tracker.log(entry))

    def end(self, report: Path | None) -> None:
        """Queues the report for logging, then the tracker's end."""
        self._count += 1
        self._waiting.put(lambda tracker: tracker.close(report))
        self._waiting.put(None)

    def complaint(self, limit_s: float) -> str | None:
        """Waits for the rest; returns what was not logged and why, or None if everything was."""
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
            except Exception as error:  # from a library or a server; the sweep continues without the tracker
                self._refused.append(_said(error))


def opened(destination: Destination, output: Path) -> Tracker:
    """Opens a destination's tracker; raises ConfigError if its library is not installed, or any error of that library."""
    try:
        match destination.service:  # each imports its library, which most sweeps do not need
            case Service.MLFLOW:
                from orchestrator.tracking.mlflow import MlflowRuns

                return MlflowRuns(destination.where, output)
            case Service.TENSORBOARD:
                from orchestrator.tracking.tensorboard import EventFiles

                return EventFiles(destination.where, output)
            case Service.WANDB:
                from orchestrator.tracking.wandb import WandbRuns

                return WandbRuns(destination.where, output)
    except ModuleNotFoundError as error:
        name = destination.service
        raise ConfigError(f"--log-to {destination} needs {error.name}; install it with: make install EXTRAS={name}") from None


def _said(error: BaseException) -> str:
    """Returns a library error's message on one line, without passwords."""
    words = " ".join(shown(str(error)).split())
    return f"{type(error).__name__}: {words if len(words) <= _LONGEST else words[: _LONGEST - 1] + '…'}"
