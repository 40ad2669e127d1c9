"""Logs of workers on other hosts, in the sweep's folder on the head without a file system in common.

A worker on another host writes its log there, and a thread of it sends what is new to the log book, an actor on the head, every
`EVERY_S`. What a worker that was killed had not sent yet, the stacks of a deadline among it, the trial reads from that host
afterwards. Of a host that is gone the folder keeps what was sent, and says that there may have been more.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator import secrecy
from orchestrator.assignment import Assignment
from orchestrator.folder import LOGS

NAME = "compile-sweep-log-book"
NAMESPACE = "compile-sweep"

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
    num_bytes: int
    """Of it that the head has."""


class LogBook:
    """The actor. Ray calls it; `open_log_book` makes it.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._open: dict[tuple[str, int], Unfinished] = {}

    def begin(self, trial_id: str, rank: int, host: str, path: str, secrets: Sequence[str] = ()) -> None:
        """A worker on another host, which may know secrets that nobody here does, begins its log."""
        for secret in secrets:
            secrecy.keep(secret)
        self._open[trial_id, rank] = Unfinished(rank=rank, host=host, path=path, num_bytes=0)

    def write(self, trial_id: str, rank: int, offset: int, content: bytes) -> None:
        """What stands in it from a byte on; what is known of that is not written twice."""
        log = self._open[trial_id, rank]
        content = content[max(0, log.num_bytes - offset) :]
        path = self._folder / LOGS / trial_id / file_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
        self._open[trial_id, rank] = Unfinished(rank=rank, host=log.host, path=log.path, num_bytes=log.num_bytes + len(content))

    def end(self, trial_id: str, rank: int) -> None:
        """It is complete."""
        self._open.pop((trial_id, rank), None)
        secrecy.clear_log(self._folder / LOGS / trial_id / file_name(rank))  # others of the trial are still written

    def unfinished(self, trial_id: str) -> list[Unfinished]:
        """Logs of a trial that are not."""
        return [log for (one, _), log in self._open.items() if one == trial_id]


def file_name(rank: int) -> str:
    """Of a worker's log."""
    return f"worker-{rank}.log"


@contextmanager
def open_log_book(folder: Path) -> Iterator[None]:
    """Keeps the sweep's log book while the block lasts, in a cluster."""
    actor = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(LogBook)
    book = cast("ActorHandle[LogBook]", actor.options(name=NAME, namespace=NAMESPACE).remote(str(folder.absolute())))
    try:
        yield
    finally:
        ray.kill(book)


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

    A trial is worth more than its log: where nobody takes it, the trial goes on without a word.
    """
    ended = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        with path.open("rb") as log:
            log.seek(sent)
            while content := log.read(MAX_BYTES):
                ray.get(_find_log_book().write.remote(trial_id, rank, sent, content), timeout=FETCH_S)
                sent += len(content)

    def follow() -> None:
        with suppress(Exception):
            ray.get(_find_log_book().begin.remote(trial_id, rank, host, str(path), secrecy.known()), timeout=FETCH_S)
            while not ended.wait(EVERY_S):
                send()

    thread = threading.Thread(target=follow, name="sends-the-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(FETCH_S)
        with suppress(Exception):
            send()
            ray.get(_find_log_book().end.remote(trial_id, rank), timeout=FETCH_S)
            _remove(path)


def _find_log_book() -> ActorHandle[LogBook]:
    book: ActorHandle[LogBook] = ray.get_actor(NAME, namespace=NAMESPACE)
    return book
