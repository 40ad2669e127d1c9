"""Runs a trial from its assignment to its record: makes attempts, repeats those that the machines ended, and records the result.

The functions that make an attempt (in a worker group on Ray, or in a local process) and call the progress tracker are arguments.
"""

import errno
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compile_sweep.schema import record as records
from compile_sweep.schema import redact
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.outcome import (
    LOST_TO_PRECOMPILE,
    OF_PRECOMPILE,
    Death,
    Label,
    Phase,
    Verdict,
    backoff_s,
    judge_death,
    judge_measurement,
    judge_warm_start,
    verdict_of,
)
from compile_sweep.schema.record import TrialRecord, WarmStart
from orchestrator.artifacts.manifest import kept_apart
from orchestrator.artifacts.redis import NO_SERVER, NOBODY, environment_for
from orchestrator.config import REDIS
from orchestrator.guard import scratch_folders
from orchestrator.guard.cpu_pressure import is_contended
from orchestrator.guard.log_bounds import bound_logs
from orchestrator.guard.progress import Progress
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run import sweep_folder
from orchestrator.run.sweep_folder import ROOM_USED, give_room, note_start
from orchestrator.run.trial_spec import Assignment, TrialPlan

GRACE_S = 15.0  # seconds past the trial's deadline until workers that have not ended themselves are killed
RECORD_PATIENCE_S = 30.0  # seconds that a finished trial waits for disk space to write its record


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one attempt at an assignment."""

    figures: Mapping[str, Any] | None = None  # figures that worker 0 returned; None if it returned none
    death: Death | None = None  # how the attempt ended, if there are no figures
    was_raised: bool = False  # whether an exception raised in a worker ended it
    progress: Progress | None = None  # the last progress reported; None if there was none

    def verdict(self, assignment: Assignment) -> Verdict:
        """Judges the attempt."""
        if self.figures is not None:
            if assignment.plan.warm_start:
                return judge_warm_start(self.figures)
            return judge_measurement(self.figures, claims_cudagraphs=assignment.settings.claims_cudagraphs)
        if self.progress is not None and self.progress.stop_request is not None and not self.was_raised:
            return verdict_of(Label(self.progress.stop_request.label), self.progress.stop_request.reason)
        assert self.death is not None, "an attempt without figures has a death"
        return judge_death(self.death)


Attempts = Callable[[Assignment], Attempt]  # makes one attempt, in new processes
Ask = Callable[..., Any]  # calls a method of the progress tracker by name; returns None if it does not answer


def run_trial(assignment: Assignment, attempt: Attempts, ask: Ask) -> tuple[str, str | None]:
    """Tries one setting, appends its record, and returns its status, and why no further trial should start, if any."""
    folder = Path(assignment.plan.folder)
    if is_recorded(folder, assignment.trial_id):  # by an earlier process, which died or was abandoned before it could report
        return "recorded", None
    if not assignment.plan.warm_start:
        note_start(folder, assignment.trial_id, assignment.settings.key)
    record = _tried(assignment, attempt, ask)
    left_out = bound_logs(assignment.log_folder)
    redact.redact_logs(assignment.log_folder)
    if isinstance(record, TrialRecord):
        record = replace(record, findings=[*record.findings, *left_out])
    return str(record.status), append_record(folder, record)


def is_recorded(folder: Path, trial_id: str) -> bool:
    """Tells whether the folder holds a trial's record."""
    trials, starts = records.read(folder), records.read_warm_starts(folder)
    return trial_id in {trial.trial_id for trial in trials} | {start.trial_id for start in starts}


def new_marker(assignment: Assignment) -> str:
    """Makes a marker that identifies the processes of one attempt."""
    return f"{assignment.trial_id}-{uuid.uuid4().hex[:8]}"


def _tried(assignment: Assignment, attempt: Attempts, ask: Ask) -> TrialRecord | WarmStart:
    """Returns an assignment's record, after retries for as long as only the machines or `--precompile` may be at fault."""
    failed: list[str] = ask("failures", assignment.trial_id) or []
    first_began = time.monotonic()
    waits_s: list[float] = []  # time that each try waited for a host
    if failed:  # in a process that crashed
        time.sleep(backoff_s(Label.TRIAL_DIED, failed[:-1]) or 0.0)
    while True:
        assignment = assignment.after(failed)
        began = time.monotonic()
        ask("begin", assignment.trial_id, assignment.settings.key)
        try:
            result = attempt(assignment)
        finally:
            ask("end", assignment.trial_id)
        verdict, progress = result.verdict(assignment), result.progress
        waits_s.append(progress.waited_s if progress else 0.0)
        wall_s = time.monotonic() - began - waits_s[-1]
        started_at = sweep_folder.now(wall_s)
        wait_s, reason = backoff_s(verdict.label, failed), verdict.reason or str(verdict.label)
        if assignment.compiles and assignment.plan.precompile and verdict.label in OF_PRECOMPILE:
            wait_s, reason = 0.0, LOST_TO_PRECOMPILE + reason
        if wait_s is None:
            break
        failed.append(reason)
        ask("record_failure", assignment.trial_id, len(failed), reason)
        time.sleep(wait_s)
    before = {
        "waited_s": sum(waits_s),
        "tries": len(failed) + 1,
        "retry_reasons": failed,
        "retried_s": began - first_began - sum(waits_s[:-1]) if failed else 0.0,
    }
    return assignment.record(
        verdict,
        phase=progress.phase if progress else None,
        started_at=started_at,
        wall_s=wall_s,
        figures=_figures(result.figures, assignment.plan, progress) | _of_progress(progress, verdict, wall_s) | before,
    )


def append_record(folder: Path, record: TrialRecord | WarmStart) -> str | None:
    """Writes the record, if the disk is full in the room kept for it; returns why no further trial should start, if so."""
    ends_at, why = time.monotonic() + RECORD_PATIENCE_S, None
    while True:
        try:
            records.append(folder, record)
        except RecordsError as error:
            return str(error)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and give_room(folder):
                why = ROOM_USED
                continue
            if time.monotonic() >= ends_at:
                return error.strerror or str(error)
            time.sleep(1.0)
        else:
            return why


def environment_at_import(assignment: Assignment) -> dict[str, str]:
    """Returns variables for an attempt's workers that torch reads on import: which remote caches it uses."""
    plan = assignment.plan
    remote: dict[str, str] = {}
    if assignment.restores and str(plan.cache).startswith(REDIS):
        # A workload may switch attention back-ends, which torch's keys leave out, like these settings.
        apart = {"workload": plan.workload, "size": plan.size, "sealed": "1", **kept_apart(assignment.settings)}
        # The worker sets the address itself, once the values from there are verified; Ray would log it.
        remote = environment_for(NOBODY, tag=hashlib.sha256(json.dumps(apart, sort_keys=True).encode()).hexdigest()[:16])
    return {**NO_SERVER, **remote}


def environment_of_attempt(marker: str) -> dict[str, str]:
    """Returns variables for the workers of one attempt: empty caches of its own, and the marker that their children inherit."""
    return {ATTEMPT_MARKER: marker, **scratch_folders.compile_cache_env(scratch_folders.attempt_folder(marker))}


def _figures(measurement: Mapping[str, Any] | None, plan: TrialPlan, progress: Progress | None) -> dict[str, Any]:
    if measurement is None:
        return {}
    neighbors = progress.neighbors if progress else 0
    figures = {**measurement, "contended": is_contended(neighbors, measurement["cpu_pressure"])}
    if plan.warm_start:
        return figures
    return {
        **figures,
        "graph_breaks": len(figures["graph_break_reasons"]),
        "recompiles": len(figures["recompile_reasons"]),
    }


def _of_progress(progress: Progress | None, verdict: Verdict, wall_s: float) -> dict[str, Any]:
    """Returns figures that follow from the last progress. Time after it counts toward the last phase."""
    if progress is None:
        return {}
    phases_s = {**progress.phases_s, Phase.STARTING: progress.phases_s.get(Phase.STARTING, 0.0) - progress.waited_s}
    phases_s = {str(phase): max(0.0, seconds) for phase, seconds in phases_s.items()}
    rest_s = max(0.0, wall_s - sum(phases_s.values()))
    phases_s |= {progress.phase: phases_s.get(progress.phase, 0.0) + rest_s}
    ending = progress.stop_request
    bounds = {"bounds": dict(ending.bounds)} if ending and verdict.reason == ending.reason else {}
    return {"gpus": list(progress.gpus), "phases_s": phases_s, **bounds}
