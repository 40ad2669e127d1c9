"""A Tune callback that keeps one trial's death from costing the sweep: its record, and the resources it held."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # generated at build time
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.util.placement_group import PlacementGroup, remove_placement_group

from orchestrator import folder as sweep_folder
from orchestrator import records
from orchestrator.assignment import Assignment
from orchestrator.board import find_board, find_progress
from orchestrator.failures import judge_trial_death

_SWEEP_EVERY_S = 2.0


class Cleanup(Callback):
    """Records trials whose own process died, and frees placement groups nobody will free.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Frees what dead trials left."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SWEEP_EVERY_S
            remove_orphaned_placement_groups()

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Writes the record the trial could not write itself."""
        assignment = Assignment.from_dict(trial.config)
        progress = find_progress(assignment.trial_id)
        ray.get(find_board().end.remote(assignment.trial_id))
        written = [*records.read(self._folder), *records.read_warm_starts(self._folder)]
        if any(record.trial_id == assignment.trial_id for record in written):
            return
        elapsed_s = progress.elapsed_s if progress else 0.0
        verdict = judge_trial_death(elapsed_s, assignment.plan.trial_deadline_s, str(trial.get_error() or "no message"))
        phase = progress.phase if progress else None
        records.append(
            self._folder, assignment.record(verdict, phase=phase, started_at=sweep_folder.now(elapsed_s), wall_s=elapsed_s)
        )


def remove_orphaned_placement_groups() -> int:
    """Removes placement groups whose creator, an actor, is dead; returns how many.

    Ray frees a Train worker group's placement group only where its dashboard runs, and not even there when a worker dies
    before its function starts; the next trial would wait for the resources for ever (ray 2.60).
    """
    removed = 0
    for table in _placement_groups():
        alive = table.state != PlacementGroupTableData.REMOVED
        by_actor = not ray.ActorID(table.creator_actor_id).is_nil()  # a driver's own count as "actor dead" from the start
        if alive and by_actor and table.creator_actor_dead and not table.is_detached:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(table.placement_group_id)))
            removed += 1
    return removed


def _placement_groups() -> Sequence[Any]:
    accessor = state._connect_and_get_accessor()
    return [PlacementGroupTableData.FromString(raw) for raw in accessor.get_placement_group_table()]
