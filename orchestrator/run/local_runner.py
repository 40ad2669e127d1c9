"""Runs trials in processes of this host, without Ray: each attempt is one forked process, watched until it ends."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from compile_sweep.schema.errors import SweepFolderError
from compile_sweep.schema.outcome import Death, Phase
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import SweepConfig
from orchestrator.guard import watchdog
from orchestrator.guard.progress import Progress, ProgressTracker
from orchestrator.run.forked_attempt import Servers, forked_attempt, prepare_log
from orchestrator.run.runner import Batch, EarlyStopping, Proposals, new_trial_ids, plan_fields, unwritten_error
from orchestrator.run.session import Interrupts
from orchestrator.run.trial import GRACE_S, Attempt, environment_at_import, new_marker, run_trial
from orchestrator.run.trial_spec import Assignment, TrialPlan, users_python_path
from orchestrator.tracking import Tracking

_POLL_S = 0.2

Watch = Callable[[Progress], None]
"""Called with an attempt's progress while it runs; may request a stop from the tracker."""


class LocalRunner:
    """A runner without Ray: one trial at a time, with one worker, on this host."""

    def __init__(self, config: SweepConfig, output: Path, tracking: Tracking) -> None:
        self._config, self._output, self._tracking = config, output, tracking
        self._trial_ids = new_trial_ids(output)
        self._tracker = ProgressTracker()
        self._servers = Servers(imports_workload=True)

    @contextmanager
    def session(self, say: Callable[[str], object], interrupts: Interrupts) -> Iterator[None]:
        """Handles interrupts, and ends the fork server at the end."""
        with interrupts.handled():
            try:
                yield
            finally:
                self._servers.close()

    def run(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        plan = TrialPlan.of(
            self._config,
            self._output,
            cache=self._config.cache,
            python_path=users_python_path(self._config.workload),
            **plan_fields(batch),
        )
        early_stopping = EarlyStopping(self._output, batch) if batch.may_stop_trials else None
        proposals = Proposals(batch)
        make_attempt = partial(attempt, tracker=self._tracker, servers=self._servers, watch=self._watch_with(early_stopping))
        while (setting := proposals.next()) is not None:
            assignment = Assignment(plan=plan, trial_id=next(self._trial_ids), settings=setting)
            _, unwritten = run_trial(assignment, make_attempt, self._call_tracker)
            self._tracking.catch_up()
            if unwritten is not None:
                raise SweepFolderError(unwritten_error(self._output, unwritten))

    def running(self) -> Sequence[Progress]:
        return self._tracker.running()

    def _call_tracker(self, method: str, *arguments: Any) -> Any:
        return getattr(self._tracker, method)(*arguments)

    def _watch_with(self, early_stopping: EarlyStopping | None) -> Watch:
        def watch(progress: Progress) -> None:
            if early_stopping is None or not early_stopping.is_due():
                return
            for trial_id, request in early_stopping.requests([progress]).items():
                self._tracker.request_stop(trial_id, request)

        return watch


def attempt(assignment: Assignment, tracker: ProgressTracker, servers: Servers, watch: Watch = lambda progress: None) -> Attempt:
    """Makes one attempt in a process of its own, which ends when this process does."""
    marker = new_marker(assignment)
    began = time.monotonic()
    gives_up_at = began + assignment.plan.trial_deadline_s + GRACE_S
    prepare_log(assignment, 0)
    log_sizes = watchdog.log_sizes(assignment.log_folder)
    server = servers.server_for(assignment.plan, environment_at_import(assignment))
    with forked_attempt(server, assignment, marker) as forked:
        while True:
            has_ended = forked.wait(_POLL_S)
            for method, *arguments in forked.reports():
                getattr(tracker, method)(assignment.trial_id, *arguments)
            progress = _progress(assignment, tracker)
            watch(progress)
            if has_ended or progress.stop_request is not None or time.monotonic() > gives_up_at:
                break
        if progress.stop_request is not None:
            forked.log(progress.stop_request.reason)
    progress = _progress(assignment, tracker)
    if "figures" in forked.outcome:
        return Attempt(figures=forked.outcome["figures"], progress=progress)
    crash = watchdog.read_crash_report(assignment.log_folder, log_sizes)
    death = Death(
        phase=progress.phase,
        in_phase_s=progress.in_phase_s,
        elapsed_s=time.monotonic() - began,
        compile_deadline_s=assignment.plan.compile_deadline_s,
        trial_deadline_s=assignment.plan.trial_deadline_s,
        fatal=crash.fatal_signal,
        timed_out=crash.timed_out,
        oom_killed=crash.oom_killed,
        recompiles=crash.recompiles,
        has_started=progress.is_up,
        **(forked.outcome or {"error_text": forked.ending}),
    )
    return Attempt(death=death, was_raised=death.error_type is not None, progress=progress)


def attempt_alone(assignment: Assignment, on_phase: Callable[[float, str], None], servers: Servers) -> Attempt:
    """Makes one attempt outside any sweep."""
    tracker, last_phase = ProgressTracker(), str(Phase.STARTING)
    tracker.begin(assignment.trial_id, assignment.settings.key)

    def watch(progress: Progress) -> None:
        nonlocal last_phase
        if progress.phase != last_phase:
            last_phase = progress.phase
            on_phase(progress.elapsed_s - progress.in_phase_s, last_phase)

    return attempt(assignment, tracker, servers, watch)


def server_alone(workload: str, *, use_gpu: bool) -> Servers:
    """Starts the fork server of an attempt outside any sweep before its setting is known, because imports take seconds."""
    servers = Servers(imports_workload=False)
    plan = plan_alone(Path(), workload, "", 0, use_gpu=use_gpu, compile_deadline_s=0.0, trial_deadline_s=0.0)
    servers.server_for(plan, environment_at_import(Assignment(plan=plan, trial_id="alone", settings=CompileSettings())))
    return servers


def plan_alone(folder: Path, workload: str, size: str, seed: int, *, use_gpu: bool, **own: Any) -> TrialPlan:
    """Returns the plan of an attempt outside any sweep: one worker, resident batches, no artifacts."""
    return TrialPlan(
        folder=str(folder),
        workload=workload,
        size=size,
        seed=seed,
        use_gpu=use_gpu,
        num_workers=1,
        pipeline="resident",
        python_path=users_python_path(workload),
        **own,
    )


def _progress(assignment: Assignment, tracker: ProgressTracker) -> Progress:
    return next(progress for progress in tracker.running() if progress.trial_id == assignment.trial_id)
