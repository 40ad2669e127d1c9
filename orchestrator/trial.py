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
from ray.train.torch import TorchConfig, TorchTrainer

from orchestrator import folder as sweep_folder
from orchestrator import records
from orchestrator.assignment import Assignment, TrialPlan
from orchestrator.board import Progress, find_board, find_progress
from orchestrator.config import REDIS
from orchestrator.failures import Death, Label, Verdict, judge_death, judge_measurement, judge_stop, judge_warm_start
from orchestrator.pressure import is_contended
from orchestrator.watchdog import MARKER, kill_marked
from orchestrator.worker import MeasurementFailed, train_loop
from workloads.phases import Phase

GRACE_S = 15.0
"""Past the trial's deadline, until the trial kills workers that have not ended themselves, and then until it ends itself."""


def run_trial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Measures one setting, appends its record, and returns what Tune needs to know of it.

    Args:
        config: `Assignment.to_dict()`.
    """
    assignment = Assignment.from_dict(config)
    board = find_board()
    ray.get(board.begin.remote(assignment.trial_id, assignment.settings_key))
    started_at, began = sweep_folder.now(), time.monotonic()
    try:
        measurement, verdict, progress = _attempt(assignment)
        record = assignment.record(
            verdict,
            phase=progress.phase if progress else None,
            started_at=started_at,
            wall_s=time.monotonic() - began,
            figures=_figures(measurement, assignment.plan, progress) | _bounds(verdict, progress),
        )
        records.append(Path(assignment.plan.folder), record)
    finally:
        ray.get(board.end.remote(assignment.trial_id))
    return {"status": str(verdict.status), "done": True}


def _attempt(assignment: Assignment) -> tuple[dict[str, Any] | None, Verdict, Progress | None]:
    plan = assignment.plan
    marker = f"{assignment.trial_id}-{uuid.uuid4().hex[:8]}"
    scratch = Path(tempfile.gettempdir()) / f"compile-sweep-{marker}"
    measurement: dict[str, Any] | None = None
    error: Exception | None = None
    try:
        with tempfile.TemporaryDirectory(prefix=sweep_folder.TRAIN_STATE, dir=plan.folder) as storage, _deadline(plan, marker):
            measurement = _trainer(assignment, marker, scratch, storage).fit().return_value
    except Exception as raised:  # whatever ends a worker group: a result of this attempt, not of the sweep
        error = raised
    finally:
        kill_marked(marker)
        shutil.rmtree(scratch, ignore_errors=True)
    progress = find_progress(assignment.trial_id)
    if measurement is not None:
        if plan.warm_start:
            return measurement, judge_warm_start(measurement), progress
        claims_cudagraphs = assignment.settings.claims_cudagraphs
        return measurement, judge_measurement(measurement, claims_cudagraphs=claims_cudagraphs), progress
    if progress is not None and progress.ended_by is not None and _worker_exception(error) is None:
        return None, judge_stop(Label(progress.ended_by.label), progress.ended_by.reason), progress
    return None, judge_death(_death(plan, error, progress)), progress


def _trainer(assignment: Assignment, marker: str, scratch: Path, storage: str) -> Any:
    """A worker group's trainer. Untyped, because `ray.train` is typed as V1 and is V2 when it runs."""
    plan = assignment.plan
    run_config: Any = RunConfig
    trainer: Any = TorchTrainer
    return trainer(
        train_loop,
        train_loop_config={"assignment": assignment.to_dict(), "scratch": str(scratch)},
        torch_config=TorchConfig(backend="nccl" if plan.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=plan.num_workers,
            use_gpu=plan.use_gpu,
            resources_per_worker={"CPU": plan.claimed_cpus, **({"GPU": 1} if plan.use_gpu else {})},
        ),
        run_config=run_config(
            name=assignment.trial_id,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=0),
            worker_runtime_env={"env_vars": _worker_environment(assignment, marker, scratch)},
        ),
    )


def _worker_environment(assignment: Assignment, marker: str, scratch: Path) -> dict[str, str]:
    """Empty caches of its own for a cold compile, and the marker its children inherit."""
    plan = assignment.plan
    remote: dict[str, str] = {}
    if assignment.restores and str(plan.cache).startswith(REDIS):
        from orchestrator.caches.redis import environment_for

        # A workload may switch back-ends of attention, which torch's keys leave out like these settings.
        apart = {"workload": plan.workload, "size": plan.size, **assignment.process_wide()}
        remote = environment_for(str(plan.cache), tag=hashlib.sha256(json.dumps(apart, sort_keys=True).encode()).hexdigest()[:16])
    return {
        **remote,
        MARKER: marker,
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # output belongs to the trial's log, see worker.py
    }


def _figures(measurement: Mapping[str, Any] | None, plan: TrialPlan, progress: Progress | None) -> dict[str, Any]:
    if measurement is None:
        return {}
    neighbours = progress.neighbours if progress else 0
    figures = {**measurement, "contended": is_contended(neighbours, measurement["cpu_pressure"])}
    if plan.warm_start:
        return figures
    num_workers = plan.num_workers
    # Workers step in lockstep on batches of one size, so the group's rate is worker 0's times their number.
    low, high = figures["samples_per_s_ci95"]
    return {
        **figures,
        "samples_per_s": figures["samples_per_s"] * num_workers,
        "samples_per_s_ci95": (low * num_workers, high * num_workers),
        "tokens_per_s": figures["tokens_per_s"] * num_workers,
        "graph_breaks": len(figures["graph_break_reasons"]),
        "recompiles": len(figures["recompile_reasons"]),
    }


def _bounds(verdict: Verdict, progress: Progress | None) -> dict[str, Any]:
    """What is known of a trial that was stopped."""
    ending = progress.ended_by if progress else None
    return {"bounds": dict(ending.bounds)} if ending and verdict.reason == ending.reason else {}


def _death(plan: TrialPlan, error: Exception | None, progress: Progress | None) -> Death:
    cause = _worker_exception(error)
    return Death(
        phase=progress.phase if progress else Phase.STARTING,
        in_phase_s=progress.in_phase_s if progress else 0.0,
        elapsed_s=progress.elapsed_s if progress else 0.0,
        compile_deadline_s=plan.compile_deadline_s,
        trial_deadline_s=plan.trial_deadline_s,
        error_type=cause.error_type if cause else None,
        error_text=cause.text if cause else str(_innermost(error)),
        error_is_compilers=cause is not None and cause.from_compiler,
    )


def _worker_exception(error: BaseException | None) -> MeasurementFailed | None:
    """The exception our worker raised, out of the worker group's error; None if no worker raised one."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return next((failure for failure in failures.values() if isinstance(failure, MeasurementFailed)), None)


def _innermost(error: BaseException | None) -> BaseException | None:
    """What Ray Train's error was made of: its own first line only says that there was one."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    failure = next(iter(failures.values()), getattr(error, "controller_failure", error))
    return getattr(failure, "health_check_failure", failure)


@contextmanager
def _deadline(plan: TrialPlan, marker: str) -> Iterator[None]:
    """The second guard, for workers that outlive the trial's deadline: kills them, and if that does not help, this process."""
    guards = [
        threading.Timer(plan.trial_deadline_s + GRACE_S, kill_marked, [marker]),
        threading.Timer(plan.trial_deadline_s + 2 * GRACE_S, os._exit, [1]),
    ]
    for guard in guards:
        guard.daemon = True
        guard.start()
    try:
        yield
    finally:
        for guard in guards:
            guard.cancel()
