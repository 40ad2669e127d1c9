"""A Tune callback that stops trials early: looks at the board, asks `pruning.py`, and tells the board, which workers ask.

Tune's own schedulers see a trial only when it reports, rank one metric, and end a trial by killing its process, which leaks
its worker group's resources (ray 2.60) and leaves no record. Here a trial's worker ends itself, and the trial records why.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.tune import Callback
from ray.tune.experiment import Trial

from orchestrator import records
from orchestrator.board import Ending, Progress, find_board
from orchestrator.pruning import Pruning, Sighting
from workloads.settings import CompileSettings

LOOK_EVERY_S = 0.5


class EarlyStopping(Callback):
    """Stops trials that are not worth going on with.

    Args:
        folder: the sweep's.
        pruning: decides; it is told of every record of the folder, once.
    """

    def __init__(self, folder: Path, pruning: Pruning) -> None:
        self._fresh = records.follow(folder).fresh
        self._pruning = pruning
        self._next = 0.0
        self._told: set[str] = set()

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Looks at the trials under way."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY_S
        for record in self._fresh():
            self._pruning.tell(asdict(record))
        board = find_board()
        running: list[Progress] = []
        with suppress(ray.exceptions.GetTimeoutError):  # a busy head; the next look is soon
            running = ray.get(board.running.remote(), timeout=10)
        for progress in running:
            if progress.trial_id not in self._told and (stop := self._pruning.decide(_sighting(progress))) is not None:
                self._told.add(progress.trial_id)
                ending = Ending(label=str(stop.label), reason=stop.reason, bounds=dict(stop.bounds))
                ray.get(board.stop.remote(progress.trial_id, ending))

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles callbacks to resume with them, which nobody does here."""
        return {}


def _sighting(progress: Progress) -> Sighting:
    return Sighting(
        setting=CompileSettings.parse(progress.settings_key),
        phase=progress.phase,
        elapsed_s=progress.worked_s,
        in_phase_s=progress.in_phase_s,
        early=progress.early,
    )
