"""Where trials say how far they are: a small actor on the head, read by the live view and by whoever explains a death."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError

from compile_sweep.schema.errors import SessionError
from compile_sweep.schema.phases import Phase
from orchestrator.cluster import head_actors

NAME = "compile-sweep-board"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """That a trial is to stop, and why; plain values, because they cross processes."""

    label: str
    reason: str
    bounds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One running trial, by the head's clock."""

    trial_id: str
    settings_key: str
    phase: str
    in_phase_s: float
    elapsed_s: float
    neighbours: int
    """Other trials that had a worker on one of its hosts at some time of its warm-up."""
    is_up: bool = False
    """Whether one of its workers is, or was."""
    waited_s: float = 0.0
    """Of `elapsed_s`, for a host to be free, or to be there; known once it is up."""
    early: Mapping[str, float] = field(default_factory=dict)
    """Figures after the first timed pass, by name; empty before."""
    ended_by: Ending | None = None
    """Why it was told to stop, if it was."""
    hosts: tuple[str, ...] = ()
    """Ray's identifiers of the nodes its workers are on."""
    gpus: tuple[str, ...] = ()
    """Its workers' GPUs, each as host:index."""

    @property
    def worked_s(self) -> float:
        """`elapsed_s` without the wait for a host."""
        return self.elapsed_s - self.waited_s


@dataclass(slots=True)
class _Running:
    settings_key: str
    phase: str
    since: float
    began: float
    waited_s: float | None = None
    """None until it is up."""
    hosts: set[str] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    neighbours: set[str] = field(default_factory=set)
    early: Mapping[str, float] = field(default_factory=dict)
    ended_by: Ending | None = None


class Board:
    """Phases of running trials. Ray calls it; `open_board` makes it, and Ray makes it again, empty, if its process dies."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._ended: set[str] = set()
        self._failed: dict[str, dict[int, str]] = {}
        self._is_successor = _is_restarted()

    def begin(self, trial_id: str, settings_key: str) -> None:
        """A trial starts, or starts again."""
        now = time.monotonic()
        self._ended.discard(trial_id)
        self._running[trial_id] = _Running(settings_key, Phase.STARTING, now, now)

    def arrive(self, trial_id: str, host: str, gpu: str | None = None, waited_s: float = 0.0) -> None:
        """One of a trial's workers is up on a host, and on a GPU if it has one. The trial had waited so long for its hosts."""
        if trial_id in self._running:
            trial = self._running[trial_id]
            trial.waited_s = waited_s
            trial.hosts.add(host)
            trial.gpus |= {gpu} if gpu else set()
            self._meet()

    def reach(self, trial_id: str, phase: str, settings_key: str = "") -> None:
        """A trial's worker 0 begins a phase; trials that ended meanwhile are not brought back.

        A trial that began before this board took another's place is known from then on, by its settings' key.
        """
        if self._is_successor and settings_key and trial_id not in self._running and trial_id not in self._ended:
            self.begin(trial_id, settings_key)
        if trial_id in self._running:
            trial = self._running[trial_id]
            trial.phase, trial.since = phase, time.monotonic()
            trial.waited_s = trial.waited_s or 0.0
            self._meet()

    def measure(self, trial_id: str, early: Mapping[str, float]) -> None:
        """A trial's worker 0 has done its first timed pass."""
        if trial_id in self._running:
            self._running[trial_id].early = dict(early)

    def stop(self, trial_id: str, ending: Ending) -> None:
        """Tells a trial to stop, which its worker 0 asks now and then; the first word stands."""
        if trial_id in self._running and self._running[trial_id].ended_by is None:
            self._running[trial_id].ended_by = ending

    def ending(self, trial_id: str) -> Ending | None:
        """Whether a trial is to stop."""
        return self._running[trial_id].ended_by if trial_id in self._running else None

    def end(self, trial_id: str) -> None:
        """A trial is over, or an attempt at it is."""
        self._running.pop(trial_id, None)
        self._ended.add(trial_id)

    def fail(self, trial_id: str, attempt: int, reason: str) -> None:
        """An attempt at a trial failed and is repeated; the first is number 1."""
        self._failed.setdefault(trial_id, {})[attempt] = reason

    def failed(self, trial_id: str) -> list[str]:
        """Why each of a trial's attempts before failed, in order."""
        return [reason for _, reason in sorted(self._failed.get(trial_id, {}).items())]

    def running(self) -> list[Progress]:
        """Every trial that has begun and not ended."""
        now = time.monotonic()
        return [
            Progress(
                trial_id=trial_id,
                settings_key=trial.settings_key,
                phase=trial.phase,
                in_phase_s=now - trial.since,
                elapsed_s=now - trial.began,
                is_up=trial.waited_s is not None,
                waited_s=trial.waited_s or 0.0,
                neighbours=len(trial.neighbours),
                early=trial.early,
                ended_by=trial.ended_by,
                hosts=tuple(sorted(trial.hosts)),
                gpus=tuple(sorted(trial.gpus)),
            )
            for trial_id, trial in self._running.items()
        ]

    def _meet(self) -> None:
        """Notes who is on a host with a trial that warms up."""
        for trial_id, trial in self._running.items():
            if trial.phase == Phase.WARMING_UP:
                trial.neighbours |= {
                    other_id for other_id, other in self._running.items() if other_id != trial_id and other.hosts & trial.hosts
                }


def _is_restarted() -> bool:
    """Whether this process is an actor that took a dead one's place."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)


@contextmanager
def open_board() -> Iterator[ActorHandle[Board]]:
    """Keeps the sweep's board while the block lasts.

    Raises:
        SessionError: the cluster has one already.
    """
    with ExitStack() as stack:
        try:
            board = stack.enter_context(head_actors.kept(Board, NAME))
        except ActorAlreadyExistsError:
            raise SessionError("another sweep runs in this cluster; wait until it has ended, or name another cluster") from None
        yield board


def find_board() -> ActorHandle[Board]:
    """The sweep's board, from any process of the cluster."""
    return head_actors.found(Board, NAME)


def find_progress(trial_id: str, timeout_s: float = 30.0) -> Progress | None:
    """How far one trial is; None if it is not running.

    Raises:
        RayError: the board does not answer in time.
    """
    running: list[Progress] = ray.get(find_board().running.remote(), timeout=timeout_s)
    return next((progress for progress in running if progress.trial_id == trial_id), None)
