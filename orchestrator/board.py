"""Where trials say how far they are: a small actor on the head, read by the live view and by whoever explains a death."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import ray
from ray.actor import ActorHandle

from workloads.phases import Phase

NAME = "compile-sweep-board"
NAMESPACE = "compile-sweep"


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
    early: Mapping[str, float] = field(default_factory=dict)
    """Figures after the first timed pass, by name; empty before."""
    ended_by: Ending | None = None
    """Why it was told to stop, if it was."""


@dataclass(slots=True)
class _Running:
    settings_key: str
    phase: str
    since: float
    began: float
    hosts: set[str] = field(default_factory=set)
    neighbours: set[str] = field(default_factory=set)
    early: Mapping[str, float] = field(default_factory=dict)
    ended_by: Ending | None = None


class Board:
    """Phases of running trials. Ray calls it; `open_board` makes it."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def begin(self, trial_id: str, settings_key: str) -> None:
        """A trial starts."""
        now = time.monotonic()
        self._running[trial_id] = _Running(settings_key, Phase.STARTING, now, now)

    def arrive(self, trial_id: str, host: str) -> None:
        """One of a trial's workers is up on a host."""
        if trial_id in self._running:
            self._running[trial_id].hosts.add(host)
            self._meet()

    def reach(self, trial_id: str, phase: str) -> None:
        """A trial's worker 0 begins a phase; trials that ended meanwhile are not brought back."""
        if trial_id in self._running:
            trial = self._running[trial_id]
            trial.phase, trial.since = phase, time.monotonic()
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
        """A trial is over."""
        self._running.pop(trial_id, None)

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
                neighbours=len(trial.neighbours),
                early=trial.early,
                ended_by=trial.ended_by,
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


@contextmanager
def open_board() -> Iterator[ActorHandle[Board]]:
    """Keeps the sweep's board while the block lasts."""
    actor = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(Board)
    board = cast("ActorHandle[Board]", actor.options(name=NAME, namespace=NAMESPACE).remote())
    try:
        yield board
    finally:
        ray.kill(board)


def find_board() -> ActorHandle[Board]:
    """The sweep's board, from any process of the cluster."""
    handle: ActorHandle[Board] = ray.get_actor(NAME, namespace=NAMESPACE)
    return handle


def find_progress(trial_id: str) -> Progress | None:
    """How far one trial is; None if it is not running."""
    running: list[Progress] = ray.get(find_board().running.remote())
    return next((progress for progress in running if progress.trial_id == trial_id), None)
