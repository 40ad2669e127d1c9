"""Where trials say how far they are: a small actor on the head, read by the live view and by whoever explains a death."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import cast

import ray
from ray.actor import ActorHandle

from workloads.phases import Phase

NAME = "compile-sweep-board"
NAMESPACE = "compile-sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One running trial, by the head's clock."""

    trial_id: str
    settings_key: str
    phase: str
    in_phase_s: float
    elapsed_s: float


class Board:
    """Phases of running trials. Ray calls it; `open_board` makes it."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[str, str, float, float]] = {}

    def begin(self, trial_id: str, settings_key: str) -> None:
        """A trial starts."""
        now = time.monotonic()
        self._running[trial_id] = (settings_key, Phase.STARTING, now, now)

    def reach(self, trial_id: str, phase: str) -> None:
        """A trial's worker 0 begins a phase; trials that ended meanwhile are not brought back."""
        if trial_id in self._running:
            key, _, _, began = self._running[trial_id]
            self._running[trial_id] = (key, phase, time.monotonic(), began)

    def end(self, trial_id: str) -> None:
        """A trial is over."""
        self._running.pop(trial_id, None)

    def running(self) -> list[Progress]:
        """Every trial that has begun and not ended."""
        now = time.monotonic()
        return [
            Progress(trial_id=trial_id, settings_key=key, phase=phase, in_phase_s=now - since, elapsed_s=now - began)
            for trial_id, (key, phase, since, began) in self._running.items()
        ]


def open_board() -> ActorHandle[Board]:
    """Makes the sweep's board; it lives as long as the handle's owner."""
    actor = ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001})(Board)
    return cast("ActorHandle[Board]", actor.options(name=NAME, namespace=NAMESPACE).remote())


def find_board() -> ActorHandle[Board]:
    """The sweep's board, from any process of the cluster."""
    handle: ActorHandle[Board] = ray.get_actor(NAME, namespace=NAMESPACE)
    return handle


def find_progress(trial_id: str) -> Progress | None:
    """How far one trial is; None if it is not running."""
    running: list[Progress] = ray.get(find_board().running.remote())
    return next((progress for progress in running if progress.trial_id == trial_id), None)
