"""A Tune callback that keeps one trial's death from costing the sweep: its record, and the resources it held."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # generated at build time
from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.util.placement_group import PlacementGroup, remove_placement_group

from orchestrator import folder as sweep_folder
from orchestrator import records, secrecy
from orchestrator.assignment import Assignment
from orchestrator.autopsy import waited_s
from orchestrator.board import Progress, find_board, find_progress
from orchestrator.failures import Verdict, judge_trial_death
from orchestrator.retrying import backoff_s
from orchestrator.trial import UNWRITTEN, is_recorded

_SWEEP_EVERY_S = 2.0
_BOARD_TIMEOUT_S = 30.0


class Cleanup(Callback):
    """Records trials whose own process died, and frees placement groups nobody will free.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next = 0.0
        self.unwritten: str | None = None
        """Why a record could not be written, if one could not; no further trial is of use then."""

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Frees what dead trials left."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SWEEP_EVERY_S
            remove_orphaned_placement_groups()

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Notes that a trial could not write its record."""
        self.unwritten = self.unwritten or (trial.last_result or {}).get(UNWRITTEN)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Tune starts the trial again. If it is not to be, a record keeps it from measuring anything."""
        assignment = Assignment.from_dict(trial.config)
        verdict, progress = self._judge(assignment, trial)
        with suppress(ray.exceptions.RayError):
            failed: list[str] = ray.get(find_board().failed.remote(assignment.trial_id), timeout=_BOARD_TIMEOUT_S)
            if backoff_s(verdict.label, failed) is not None:
                reason = verdict.reason or str(verdict.label)
                ray.get(find_board().fail.remote(assignment.trial_id, len(failed) + 1, reason), timeout=_BOARD_TIMEOUT_S)
                return
        self._write(assignment, verdict, progress)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Writes the record the trial could not write itself."""
        assignment = Assignment.from_dict(trial.config)
        self._write(assignment, *self._judge(assignment, trial))

    def _judge(self, assignment: Assignment, trial: Trial) -> tuple[Verdict, Progress | None]:
        progress: Progress | None = None
        with suppress(ray.exceptions.RayError):
            progress = find_progress(assignment.trial_id, _BOARD_TIMEOUT_S)
            ray.get(find_board().end.remote(assignment.trial_id), timeout=_BOARD_TIMEOUT_S)
        elapsed_s = progress.elapsed_s - waited_s(assignment.plan, progress) if progress else 0.0
        text = str(trial.get_error() or "no message")
        return judge_trial_death(elapsed_s, assignment.plan.trial_deadline_s, text), progress

    def _write(self, assignment: Assignment, verdict: Verdict, progress: Progress | None) -> None:
        if is_recorded(self._folder, assignment.trial_id):
            return
        failed: list[str] = []
        with suppress(ray.exceptions.RayError):
            failed = ray.get(find_board().failed.remote(assignment.trial_id), timeout=_BOARD_TIMEOUT_S)
        wall_s = progress.worked_s if progress else 0.0
        record = assignment.after(failed).record(
            verdict,
            phase=progress.phase if progress else None,
            started_at=sweep_folder.now(wall_s),
            wall_s=wall_s,
            figures={"waited_s": progress.waited_s if progress else 0.0, "tries": len(failed) + 1, "retry_reasons": failed},
        )
        secrecy.clear_logs(assignment.log_folder)
        try:
            records.append(self._folder, record)
        except OSError as error:
            self.unwritten = error.strerror or str(error)


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
