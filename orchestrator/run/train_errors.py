"""Converts Ray Train's error to what is known of an attempt's end: which worker's error counts, and which hosts are gone."""

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

_TAIL_CHARS = 20_000  # how many characters at the end of Ray's log are searched for a traceback


def death_of(
    plan: TrialPlan, error: Exception | None, progress: Progress | None, elapsed_s: float, evidence: CrashReport
) -> Death:
    """Describes the end of an attempt, `elapsed_s` after it began or got its hosts, that returned no measurement."""
    cause = cause_of(error)
    # An error other than Train's own was raised in this process: the controller is gone, or the group could not be set up.
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
        recompiles=evidence.recompiles,
        has_started=progress is None or progress.is_up,
        startup_error="" if cause else startup_error(progress, elapsed_s),
        nodes_lost=max(int(isinstance(error, PreemptionError)), _lost(progress.hosts if progress else ())),
    )


def startup_error(progress: Progress | None, elapsed_s: float) -> str:
    """Returns what Ray's agent on this host logged of a worker that died before its first line; empty if none did."""
    node = ray._private.worker._global_node
    if node is None or (progress is not None and progress.is_up):
        return ""
    return last_error(Path(node.get_logs_dir_path()) / "raylet.err", time.time() - elapsed_s)


def last_error(log: Path, since: float) -> str:
    """Returns the error of a log's last traceback, without secrets; empty if the log is older than `since` (epoch seconds)."""
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
    """Returns how long an attempt waited for a host, in seconds: all of it if no worker started; 0 outside a cluster."""
    if progress is None or plan.head is None:
        return 0.0
    return progress.waited_s if progress.is_up else progress.elapsed_s


def cause_of(error: BaseException | None) -> MeasurementFailed | None:
    """Returns the exception that a worker raised, from the group's error; None if none did, or only because a peer died."""
    failures = list(_failures(error).values())
    raised = [failure for failure in failures if isinstance(failure, MeasurementFailed)]
    own = [failure for failure in raised if not is_let_down(failure.error_type, failure.text)]
    if own:
        return own[0]
    return raised[0] if raised and len(raised) == len(failures) else None


def _innermost(error: BaseException | None) -> BaseException | None:
    """Returns the cause of Ray Train's error, whose own first line says only that there was an error."""
    died = [failure for failure in _failures(error).values() if not isinstance(failure, MeasurementFailed)]
    failure = next(iter(died), getattr(error, "controller_failure", error))
    failure = getattr(failure, "health_check_failure", failure)
    # The exception that a worker's setup raised; the first line of Ray's own message does not contain it.
    return failure.cause if isinstance(failure, RayTaskError) and isinstance(failure.cause, BaseException) else failure


def _failures(error: BaseException | None) -> Mapping[int, BaseException]:
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    return failures


def _lost(hosts: Iterable[str]) -> int:
    there = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    return sum(host not in there for host in hosts)
