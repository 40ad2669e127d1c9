"""The Tune trainable: one trial launches a Ray Train worker group, waits within a deadline, and writes one record.

Background: the trial's own process is reused from trial to trial, which saves seconds and is safe because nothing compiles in
it; what is measured runs in Train workers, which are new processes every time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer's base: its module loads torch

from compile_sweep.schema import record as records
from compile_sweep.schema import redact
from compile_sweep.schema.outcome import (
    LOST_TO_PRECOMPILE,
    OF_PRECOMPILE,
    Label,
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
from orchestrator.cluster import placement as packing
from orchestrator.cluster import placement as placing
from orchestrator.cluster import remote_logs
from orchestrator.config import REDIS, Placement
from orchestrator.guard import scratch_folders, watchdog
from orchestrator.guard.cpu_pressure import is_contended
from orchestrator.guard.progress import Progress, find_progress_actor
from orchestrator.guard.watchdog import ATTEMPT_MARKER, kill_marked
from orchestrator.run import sweep_folder
from orchestrator.run.death import cause_of, death_of, waited_s
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import GroupConfig, train_loop

GRACE_S = 15.0
"""Past the trial's deadline, until the trial kills workers that have not ended themselves, and then until it ends itself."""

RECORD_PATIENCE_S = 30.0
"""How long a finished trial waits for room to write its record."""

UNWRITTEN = "unwritten"
"""Key of what Tune is told of a trial whose record could not be written: why."""

_ARRIVAL_POLL_S = 2.0
"""How often the guard asks, in a cluster, whether a trial's workers are up."""

_PROGRESS_TIMEOUT_S = 60.0
"""A progress actor that died is there again within seconds."""


def run_trial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one setting, appends its record, and returns what Tune needs to know of it.

    Args:
        config: `Assignment.to_dict()`.
    """
    assignment = Assignment.from_dict(config)
    folder = Path(assignment.plan.folder)
    if is_recorded(folder, assignment.trial_id):  # by one whose process died, or was given up, before Tune heard of it
        return {"status": "recorded", "done": True}
    record = _tried(assignment)
    redact.redact_logs(assignment.log_folder)
    unwritten = _append(folder, record)
    return {"status": str(record.status), "done": True, **({UNWRITTEN: unwritten} if unwritten else {})}


def is_recorded(folder: Path, trial_id: str) -> bool:
    """Whether the folder holds a trial's record."""
    trials, starts = records.read(folder), records.read_warm_starts(folder)
    return trial_id in {trial.trial_id for trial in trials} | {start.trial_id for start in starts}


def _tried(assignment: Assignment) -> TrialRecord | WarmStart:
    """The record of an assignment, tried again for as long as only the machines or `--precompile` may be at fault."""
    failed: list[str] = _ask("failures", assignment.trial_id) or []
    first_began = time.monotonic()
    waits_s: list[float] = []  # of each try, for a host
    if failed:  # in a process that died of it
        time.sleep(backoff_s(Label.TRIAL_DIED, failed[:-1]) or 0.0)
    while True:
        assignment = assignment.after(failed)
        began = time.monotonic()
        _ask("begin", assignment.trial_id, assignment.settings_key)
        try:
            measurement, verdict, progress = _attempt(assignment)
        finally:
            _ask("end", assignment.trial_id)
        waits_s.append(progress.waited_s if progress else 0.0)
        wall_s = time.monotonic() - began - waits_s[-1]
        started_at = sweep_folder.now(wall_s)
        wait_s, reason = backoff_s(verdict.label, failed), verdict.reason or str(verdict.label)
        if assignment.compiles and assignment.plan.precompile and verdict.label in OF_PRECOMPILE:
            wait_s, reason = 0.0, LOST_TO_PRECOMPILE + reason
        if wait_s is None:
            break
        failed.append(reason)
        _ask("record_failure", assignment.trial_id, len(failed), reason)
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
        figures=_figures(measurement, assignment.plan, progress) | _bounds(verdict, progress) | _gpus(progress) | before,
    )


def _append(folder: Path, record: TrialRecord | WarmStart) -> str | None:
    """Writes the record, waiting for room if there is none; returns why it could not be written, if it could not."""
    ends_at = time.monotonic() + RECORD_PATIENCE_S
    while True:
        try:
            records.append(folder, record)
        except OSError as error:
            if time.monotonic() >= ends_at:
                return error.strerror or str(error)
            time.sleep(1.0)
        else:
            return None


def _ask(method: str, *arguments: Any) -> Any:
    """What the progress actor answers; None if it does not, which is no reason to give a trial up."""
    try:
        return ray.get(getattr(find_progress_actor(), method).remote(*arguments), timeout=_PROGRESS_TIMEOUT_S)
    except (ray.exceptions.RayError, ValueError):  # ValueError: there is no actor of that name
        return None


def _attempt(assignment: Assignment) -> tuple[dict[str, Any] | None, Verdict, Progress | None]:
    plan = assignment.plan
    marker = f"{assignment.trial_id}-{uuid.uuid4().hex[:8]}"
    measurement: dict[str, Any] | None = None
    error: Exception | None = None
    began, logged = time.monotonic(), watchdog.log_sizes(assignment.log_folder)
    try:
        with (
            tempfile.TemporaryDirectory(prefix=sweep_folder.TRAIN_STATE, dir=plan.folder) as storage,
            _deadline(assignment, marker),
        ):
            measurement = _trainer(assignment, marker, storage).fit().return_value
    except Exception as raised:  # whatever ends a worker group: a result of this attempt, not of the sweep
        error = raised
    finally:
        kill_marked(marker)
        remote_logs.collect_logs(assignment)
        if plan.head is not None:
            packing.release_host(assignment.trial_id)
        shutil.rmtree(scratch_folders.attempt_folder(marker), ignore_errors=True)
    progress = _progress(assignment)
    if measurement is not None:
        if plan.warm_start:
            return measurement, judge_warm_start(measurement), progress
        claims_cudagraphs = assignment.settings.claims_cudagraphs
        return measurement, judge_measurement(measurement, claims_cudagraphs=claims_cudagraphs), progress
    if progress is not None and progress.stop_request is not None and cause_of(error) is None:
        return None, verdict_of(Label(progress.stop_request.label), progress.stop_request.reason), progress
    found = watchdog.read_crash_report(assignment.log_folder, logged)
    worked_s = time.monotonic() - began - waited_s(plan, progress)
    return None, judge_death(death_of(plan, error, progress, worked_s, found)), progress


def _progress(assignment: Assignment) -> Progress | None:
    """How far the progress actor knows the trial to be."""
    return next((one for one in _ask("running") or [] if one.trial_id == assignment.trial_id), None)


def _trainer(assignment: Assignment, marker: str, storage: str) -> Any:
    """A worker group's trainer. Untyped, because `ray.train` is typed as V1 and is V2 when it runs."""
    plan = assignment.plan
    run_config: Any = RunConfig
    failure_config: Any = FailureConfig
    trainer: Any = DataParallelTrainer
    scaling_config: Any = ScalingConfig
    placement = Placement(plan.placement)
    claimed = placing.worker_resources(placement, plan.num_workers, use_gpu=plan.use_gpu, cpus=plan.claimed_cpus)
    packs = plan.head is not None and placement is Placement.PACK
    return trainer(
        train_loop,
        train_loop_config={"assignment": assignment.to_dict()},
        backend_config=GroupConfig(backend="nccl" if plan.use_gpu else "gloo"),
        scaling_config=scaling_config(
            num_workers=plan.num_workers,
            use_gpu=plan.use_gpu,
            resources_per_worker=claimed,
            placement_strategy=placing.placement_strategy(placement),
            label_selector=packing.host_label(assignment.trial_id, claimed, plan.num_workers) if packs else None,
        ),
        run_config=run_config(
            name=assignment.trial_id,
            storage_path=storage,
            failure_config=failure_config(max_failures=0, max_preemption_failures=0),  # repeating is `retrying.py`'s to decide
            worker_runtime_env={"env_vars": _worker_environment(assignment, marker)},
        ),
    )


def _worker_environment(assignment: Assignment, marker: str) -> dict[str, str]:
    """Empty caches of its own for a cold compile, and the marker its children inherit."""
    plan = assignment.plan
    remote: dict[str, str] = {}
    if assignment.restores and str(plan.cache).startswith(REDIS):
        # A workload may switch back-ends of attention, which torch's keys leave out like these settings.
        apart = {"workload": plan.workload, "size": plan.size, "sealed": "1", **kept_apart(assignment.settings)}
        # The worker itself sets the address, which Ray would log, once what comes from there is verified.
        remote = environment_for(NOBODY, tag=hashlib.sha256(json.dumps(apart, sort_keys=True).encode()).hexdigest()[:16])
    return {
        **NO_SERVER,
        **remote,
        ATTEMPT_MARKER: marker,
        **scratch_folders.compile_cache_env(
            scratch_folders.attempt_folder(marker)
        ),  # some of torch reads them when it is imported; see worker.py
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # output belongs to the trial's log, see worker.py
    }


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


def _gpus(progress: Progress | None) -> dict[str, Any]:
    """Where it ran, whatever became of it."""
    return {"gpus": list(progress.gpus)} if progress else {}


def _bounds(verdict: Verdict, progress: Progress | None) -> dict[str, Any]:
    """What is known of a trial that was stopped."""
    ending = progress.stop_request if progress else None
    return {"bounds": dict(ending.bounds)} if ending and verdict.reason == ending.reason else {}


@contextmanager
def _deadline(assignment: Assignment, marker: str) -> Iterator[None]:
    """The second guard, for workers that outlive the trial's deadline: kills them, and if that does not help, this process.

    In a cluster it counts from when they are up, as their own does, for they may have to wait for a host.
    """
    plan, ended = assignment.plan, threading.Event()

    def guard() -> None:
        has_host = plan.head is None or _has_host(assignment, ended)
        if not ended.wait(plan.trial_deadline_s + GRACE_S if has_host else 0.0):
            kill_marked(marker)
            if not ended.wait(GRACE_S):
                os._exit(1)

    threading.Thread(target=guard, name="guards-the-deadline", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _has_host(assignment: Assignment, ended: threading.Event) -> bool:
    """Returns once one of the trial's workers is up, or none for as long as a sweep waits for a host, and whether one may be."""
    progress: Progress | None = None
    ends_at = time.monotonic() + placing.HOST_TIMEOUT_S
    while time.monotonic() < ends_at and not ended.wait(_ARRIVAL_POLL_S):
        progress = _progress(assignment)
        if progress is not None and progress.is_up:
            return True
    return progress is None  # without a progress actor nobody knows
