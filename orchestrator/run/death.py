"""From Ray Train's error to what is known of an attempt's end: whose word counts, and whether its host is still there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import ray
from ray.exceptions import RayTaskError
from ray.train.v2.api.exceptions import PreemptionError, TrainingFailedError

from compile_sweep.schema.outcome import Death, Phase, is_let_down
from compile_sweep.schema.redact import redact_text
from orchestrator.guard.progress import Progress
from orchestrator.guard.watchdog import CrashReport
from orchestrator.run.trial_spec import TrialPlan
from orchestrator.run.worker import MeasurementFailed

_TAIL_CHARS = 20_000
"""Of Ray's log, where a traceback is looked for."""


def death_of(
    plan: TrialPlan, error: Exception | None, progress: Progress | None, elapsed_s: float, evidence: CrashReport
) -> Death:
    """What is known of an attempt that returned no measurement.

    Args:
        plan: of the trial.
        error: what the worker group's trainer raised.
        progress: how far the progress actor knows it to have been; None if it knows nothing.
        elapsed_s: seconds since the attempt began, or had a host.
        evidence: what its logs say.
    """
    cause = cause_of(error)
    # What is not Train's word on its workers was raised here: its controller is gone, or its group could not be set up.
    own = None if error is None or isinstance(error, TrainingFailedError) else f"{type(error).__module__}.{type(error).__name__}"
    return Death(
        phase=progress.phase if progress else Phase.STARTING,
        in_phase_s=progress.in_phase_s if progress else 0.0,
        elapsed_s=elapsed_s,
        compile_deadline_s=plan.compile_deadline_s,
        trial_deadline_s=plan.trial_deadline_s,
        num_workers=plan.num_workers,
        error_type=cause.error_type if cause else own,
        error_text=cause.text if cause else str(_innermost(error)),
        error_is_compilers=cause is not None and cause.from_compiler,
        fatal=evidence.fatal_signal,
        timed_out=evidence.timed_out,
        oom_killed=evidence.oom_killed,
        startup_error="" if cause else startup_error(progress, elapsed_s),
        nodes_lost=max(int(isinstance(error, PreemptionError)), _lost(progress.hosts if progress else ())),
    )


def startup_error(progress: Progress | None, elapsed_s: float) -> str:
    """What a worker said that died before its first line, as one that fails at an import does; Ray starts it again and again.

    Until a worker has a log of its own, what it says goes to the log of Ray's agent on its host, `raylet.err`.

    Args:
        progress: how far the progress actor knows the attempt to have been.
        elapsed_s: seconds since the attempt began.

    Returns:
        The error of the last traceback since then on this host; empty if there is none, or a worker was up.
    """
    node = ray._private.worker._global_node
    if node is None or (progress is not None and progress.is_up):
        return ""
    return last_error(Path(node.get_logs_dir_path()) / "raylet.err", time.time() - elapsed_s)


def last_error(log: Path, since: float) -> str:
    """The error of the last traceback in a log, without secrets; empty if nothing was written since, in seconds of the epoch."""
    try:
        if log.stat().st_mtime < since:
            return ""
        lines = log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:].splitlines()
    except OSError:
        return ""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    errors = [line for line in lines[starts[-1] + 1 :] if line[:1].strip()] if starts else []
    return redact_text(errors[0].strip()) if errors else ""


def waited_s(plan: TrialPlan, progress: Progress | None) -> float:
    """For how many seconds of an attempt there was no host for it: all of one that is not up; none on the only host there is."""
    if progress is None or plan.head is None:
        return 0.0
    return progress.waited_s if progress.is_up else progress.elapsed_s


def cause_of(error: BaseException | None) -> MeasurementFailed | None:
    """The exception a worker of ours raised, out of the worker group's error.

    None if none raised one, or if those who did were only let down by one that died without.
    """
    failures = list(_failures(error).values())
    raised = [failure for failure in failures if isinstance(failure, MeasurementFailed)]
    own = [failure for failure in raised if not is_let_down(failure.error_type, failure.text)]
    if own:
        return own[0]
    return raised[0] if raised and len(raised) == len(failures) else None


def _innermost(error: BaseException | None) -> BaseException | None:
    """What Ray Train's error was made of: its own first line only says that there was one."""
    died = [failure for failure in _failures(error).values() if not isinstance(failure, MeasurementFailed)]
    failure = next(iter(died), getattr(error, "controller_failure", error))
    failure = getattr(failure, "health_check_failure", failure)
    # What a worker raised as it was set up; Ray's own words begin with a line that says nothing of it.
    return failure.cause if isinstance(failure, RayTaskError) and isinstance(failure.cause, BaseException) else failure


def _failures(error: BaseException | None) -> Mapping[int, BaseException]:
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return failures


def _lost(hosts: Iterable[str]) -> int:
    """How many of these nodes the cluster has no more."""
    there = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    return sum(host not in there for host in hosts)
