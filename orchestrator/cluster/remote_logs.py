"""Logs of workers on other hosts, in the sweep's folder on the head without a file system in common.

A worker on another host writes its log there, and a thread of it sends what is new to the log book, an actor on the head, every
`EVERY_S`. It says each time whose log that is, so that a book that took a dead one's place knows as well. What a worker that was
killed had not sent yet, the stacks of a deadline among it, the trial reads from that host afterwards. Of a host that is gone the
folder keeps what was sent, and says that there may have been more.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from compile_sweep.schema import redact
from orchestrator.cluster import head_actors
from orchestrator.run.sweep_folder import LOGS
from orchestrator.run.trial_spec import Assignment

NAME = "compile-sweep-log-book"

EVERY_S = 2.0
MAX_BYTES = 2**20
"""Of one message."""

FETCH_S = 20.0
"""For the rest of a log: longer is not worth a trial's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A log whose writer did not say that it is complete."""

    rank: int
    host: str
    path: str
    """On that host."""
    start: int
    """Where it begins in the head's file, behind what earlier attempts left there, in bytes."""
    num_bytes: int = 0
    """Of it that the head has."""


class LogBook:
    """The actor. Ray calls it; `open_log_book` makes it, and Ray makes it again, empty, if its process dies.

    How much of a log the head has, the file says, which outlives the process.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._open: dict[tuple[str, int], Unfinished] = {}

    def begin(self, trial_id: str, rank: int, host: str, path: str, secrets: Sequence[str] = (), start: int | None = None) -> int:
        """A worker on another host, which may know secrets that nobody here does, begins its log, or says again that it has.

        Args:
            trial_id: of the worker's trial.
            rank: the worker's.
            host: the worker's.
            path: of the log on that host.
            secrets: to be kept out of it.
            start: what the first call returned.

        Returns:
            Where the log begins in the head's file.
        """
        for secret in secrets:
            redact.register_secret(secret)
        start = self._size(trial_id, rank) if start is None else start
        self._open[trial_id, rank] = Unfinished(rank=rank, host=host, path=path, start=start)
        return start

    def write(self, trial_id: str, rank: int, offset: int, content: bytes) -> None:
        """What stands in it from a byte on; what is known of that is not written twice."""
        known = self._size(trial_id, rank) - self._open[trial_id, rank].start
        path = self._path(trial_id, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content[max(0, known - offset) :])

    def end(self, trial_id: str, rank: int) -> None:
        """It is complete."""
        self._open.pop((trial_id, rank), None)
        redact.redact_log(self._path(trial_id, rank))  # others of the trial are still written

    def unfinished(self, trial_id: str) -> list[Unfinished]:
        """Logs of a trial that are not."""
        logs = [log for (one, _), log in self._open.items() if one == trial_id]
        return [replace(log, num_bytes=self._size(trial_id, log.rank) - log.start) for log in logs]

    def _path(self, trial_id: str, rank: int) -> Path:
        return self._folder / LOGS / trial_id / file_name(rank)

    def _size(self, trial_id: str, rank: int) -> int:
        path = self._path(trial_id, rank)
        return path.stat().st_size if path.exists() else 0


def file_name(rank: int) -> str:
    """Of a worker's log."""
    return f"worker-{rank}.log"


@contextmanager
def open_log_book(folder: Path) -> Iterator[None]:
    """Keeps the sweep's log book while the block lasts, in a cluster."""
    with head_actors.kept(LogBook, NAME, str(folder.absolute())):
        yield


@contextmanager
def log_file(assignment: Assignment, rank: int) -> Iterator[Path]:
    """Where a worker is to write its log while the block lasts, from where it reaches the sweep's folder."""
    host = ray.get_runtime_context().get_node_id()
    if assignment.plan.head in (None, host):
        assignment.log_folder.mkdir(parents=True, exist_ok=True)
        yield assignment.log_folder / file_name(rank)
        return
    folder = Path(tempfile.mkdtemp(prefix=f"compile-sweep-log-{assignment.trial_id}-"))
    path = folder / file_name(rank)
    path.touch()
    with _sending(assignment.trial_id, rank, host, path):
        yield path


def collect(assignment: Assignment) -> None:
    """Brings to the sweep's folder what workers of a trial that is over did not send of their logs; called on the head."""
    if assignment.plan.head is None:
        return
    try:
        book = _find_log_book()
        logs: list[Unfinished] = ray.get(book.unfinished.remote(assignment.trial_id), timeout=FETCH_S)
        for log in logs:
            ray.get(book.write.remote(assignment.trial_id, log.rank, log.num_bytes, _rest_of(log)), timeout=FETCH_S)
            ray.get(book.end.remote(assignment.trial_id, log.rank), timeout=FETCH_S)
    except (RayError, ValueError):  # without a log book there is nothing to bring them to
        return


def _rest_of(log: Unfinished) -> bytes:
    there = NodeAffinitySchedulingStrategy(node_id=log.host, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_take).options(scheduling_strategy=there)
    try:
        return ray.get(task.remote(log.path, log.num_bytes), timeout=FETCH_S)
    except RayError as error:
        return f"\nthe rest of this log stayed on its host, which cannot be reached ({type(error).__name__})\n".encode()


def _take(path: str, offset: int) -> bytes:
    """The last of what a log holds after so many bytes, on the host that it is on, where nothing is left of it."""
    with open(path, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(offset, size - MAX_BYTES))
        content = log.read()
    _remove(Path(path))
    return content


def _remove(path: Path) -> None:
    with suppress(OSError):  # somebody else did
        path.unlink()
        path.parent.rmdir()


@contextmanager
def _sending(trial_id: str, rank: int, host: str, path: Path) -> Iterator[None]:
    """Sends what is new in the log while the block lasts; all of it, if the block ends.

    A trial is worth more than its log: where nobody takes it, the trial goes on without a word, `FETCH_S` later at most.
    """
    ended = threading.Event()
    start: int | None = None
    sent = 0

    def send() -> None:
        nonlocal start, sent
        # Also where nothing is new: from a book that does not know of it, `collect` would not learn of a crash's last words.
        book, known = _find_log_book(), redact.known_secrets()
        asked: Any = book.begin.remote(trial_id, rank, host, str(path), known, start)
        start = ray.get(asked, timeout=FETCH_S)
        with path.open("rb") as log:
            log.seek(sent)
            while content := log.read(MAX_BYTES):
                ray.get(book.write.remote(trial_id, rank, sent, content), timeout=FETCH_S)
                sent += len(content)

    def follow() -> None:
        while not ended.is_set():
            with suppress(Exception):  # such as of a book that died; the next time there is another
                send()
            ended.wait(EVERY_S)
        with suppress(Exception):
            send()
            ray.get(_find_log_book().end.remote(trial_id, rank), timeout=FETCH_S)
            _remove(path)

    thread = threading.Thread(target=follow, name="sends-the-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(FETCH_S)


def _find_log_book() -> ActorHandle[LogBook]:
    return head_actors.found(LogBook, NAME)
