"""Brings logs of workers on other hosts into the sweep's folder on the head, without a shared file system.

A worker on another host writes its log there, and a thread sends what is new every `SEND_INTERVAL_S` to the log actor on the
head. Each message says whose log it is, so that an actor that replaced one that died knows as well. If a worker was killed
before it sent the last part, such as the stacks of a deadline, the trial fetches the rest from that host afterwards. If the
host is gone, the folder keeps what was sent and a note that there may have been more.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
from orchestrator.run.trial_spec import Assignment, log_file_name

LOG_ACTOR = "compile-sweep-log-book"

SEND_INTERVAL_S = 2.0
MAX_MESSAGE_BYTES = 2**20

FETCH_TIMEOUT_S = 20.0  # how long to wait for the rest of a log; a trial's end should not take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedLog:
    """A log whose writer has not reported that it is complete."""

    rank: int
    host: str
    path: str
    start: int  # byte offset in the head's file at which this log begins, after what earlier attempts wrote
    num_bytes: int = 0  # bytes of this log that the head has


class LogActor:
    """Writes logs that workers on other hosts send. `start_log_actor` starts it; if its process dies, Ray restarts it empty.

    The size of the file says how much of a log the head has, because the file outlives the process.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._open: dict[tuple[str, int], UnfinishedLog] = {}

    def begin(self, trial_id: str, rank: int, host: str, path: str, secrets: Sequence[str] = (), start: int | None = None) -> int:
        """Announces a worker's log, or announces it again in case this actor was restarted.

        Args:
            secrets: Secrets to keep out of the log; the worker may know some that the head does not.
            start: What the first call returned.

        Returns:
            Where the log begins in the head's file.
        """
        for secret in secrets:
            redact.register_secret(secret)
        start = self._size(trial_id, rank) if start is None else start
        self._open[trial_id, rank] = UnfinishedLog(rank=rank, host=host, path=path, start=start)
        return start

    def write(self, trial_id: str, rank: int, offset: int, content: bytes) -> None:
        """Appends a part of the log that begins at a byte offset, without what the file already has."""
        known = self._size(trial_id, rank) - self._open[trial_id, rank].start
        path = self._path(trial_id, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content[max(0, known - offset) :])

    def end(self, trial_id: str, rank: int) -> None:
        """Records that the log is complete."""
        self._open.pop((trial_id, rank), None)
        redact.redact_log(self._path(trial_id, rank))  # only this log: others of the trial are still being written

    def unfinished(self, trial_id: str) -> list[UnfinishedLog]:
        """Returns the logs of a trial that are not complete."""
        logs = [log for (one, _), log in self._open.items() if one == trial_id]
        return [replace(log, num_bytes=self._size(trial_id, log.rank) - log.start) for log in logs]

    def _path(self, trial_id: str, rank: int) -> Path:
        return self._folder / LOGS / trial_id / log_file_name(rank)

    def _size(self, trial_id: str, rank: int) -> int:
        path = self._path(trial_id, rank)
        return path.stat().st_size if path.exists() else 0


def start_log_actor(folder: Path) -> AbstractContextManager[ActorHandle[LogActor]]:
    """Runs the log actor while the block lasts; used in clusters only."""
    return head_actors.start_actor(LogActor, LOG_ACTOR, str(folder.absolute()))


@contextmanager
def log_file(assignment: Assignment, rank: int) -> Iterator[Path]:
    """Yields the path to which a worker writes its log; from there it reaches the sweep's folder."""
    host = ray.get_runtime_context().get_node_id()
    if assignment.plan.head in (None, host):
        assignment.log_folder.mkdir(parents=True, exist_ok=True)
        yield assignment.log_folder / log_file_name(rank)
        return
    folder = Path(tempfile.mkdtemp(prefix=f"compile-sweep-log-{assignment.trial_id}-"))
    path = folder / log_file_name(rank)
    path.touch()
    with _sending(assignment.trial_id, rank, host, path):
        yield path


def collect_logs(assignment: Assignment) -> None:
    """Fetches what the workers of a finished trial did not send of their logs. Runs on the head."""
    if assignment.plan.head is None:
        return
    try:
        book = _find_log_actor()
        logs: list[UnfinishedLog] = ray.get(book.unfinished.remote(assignment.trial_id), timeout=FETCH_TIMEOUT_S)
        for log in logs:
            ray.get(book.write.remote(assignment.trial_id, log.rank, log.num_bytes, _fetch_rest(log)), timeout=FETCH_TIMEOUT_S)
            ray.get(book.end.remote(assignment.trial_id, log.rank), timeout=FETCH_TIMEOUT_S)
    except (RayError, ValueError):  # without a log actor there is nothing to write to
        return


def _fetch_rest(log: UnfinishedLog) -> bytes:
    there = NodeAffinitySchedulingStrategy(node_id=log.host, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_read_and_remove).options(scheduling_strategy=there)
    try:
        return ray.get(task.remote(log.path, log.num_bytes), timeout=FETCH_TIMEOUT_S)
    except RayError as error:
        return f"\nthe rest of this log stayed on its host, which cannot be reached ({type(error).__name__})\n".encode()


def _read_and_remove(path: str, offset: int) -> bytes:
    """Returns the end of a log after a byte offset, at most one message, and removes the log. Runs on the log's host."""
    with open(path, "rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(offset, size - MAX_MESSAGE_BYTES))
        content = log.read()
    _remove(Path(path))
    return content


def _remove(path: Path) -> None:
    with suppress(OSError):  # already removed
        path.unlink()
        path.parent.rmdir()


@contextmanager
def _sending(trial_id: str, rank: int, host: str, path: Path) -> Iterator[None]:
    """Sends new parts of the log while the block lasts, and the rest when it ends."""
    ended = threading.Event()
    start: int | None = None
    sent = 0

    def send() -> None:
        nonlocal start, sent
        # Also if there is nothing new: `collect_logs` learns of a crash's last lines only from an actor that knows this log.
        book, known = _find_log_actor(), redact.known_secrets()
        asked: Any = book.begin.remote(trial_id, rank, host, str(path), known, start)
        start = ray.get(asked, timeout=FETCH_TIMEOUT_S)
        with path.open("rb") as log:
            log.seek(sent)
            while content := log.read(MAX_MESSAGE_BYTES):
                ray.get(book.write.remote(trial_id, rank, sent, content), timeout=FETCH_TIMEOUT_S)
                sent += len(content)

    def follow() -> None:
        while not ended.is_set():
            with suppress(Exception):  # the actor may have died; by the next try there is another one
                send()
            ended.wait(SEND_INTERVAL_S)
        with suppress(Exception):
            send()
            ray.get(_find_log_actor().end.remote(trial_id, rank), timeout=FETCH_TIMEOUT_S)
            _remove(path)

    thread = threading.Thread(target=follow, name="sends-the-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(FETCH_TIMEOUT_S)


def _find_log_actor() -> ActorHandle[LogActor]:
    return head_actors.find_actor(LogActor, LOG_ACTOR)
