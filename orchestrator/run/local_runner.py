"""Runs trials in processes of this host, without Ray: each attempt is one forked process, watched until it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from compile_sweep.schema.errors import SweepFolderError
from compile_sweep.schema.outcome import Death
from compile_sweep.schema.phases import Phase
from orchestrator.config import SweepConfig
from orchestrator.guard import scratch_folders, watchdog
from orchestrator.guard.progress import Progress, ProgressTracker
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.guard.watchdog import kill_marked
from orchestrator.run.fork_server import ForkServer, Order, Setup, how_it_ended
from orchestrator.run.runner import Batch, EarlyStopping, Proposals, new_trial_ids, plan_fields, unwritten_error
from orchestrator.run.session import Interrupts
from orchestrator.run.trial import (
    GRACE_S,
    Attempt,
    environment_at_import,
    environment_of_attempt,
    new_marker,
    run_trial,
)
from orchestrator.run.trial_spec import Assignment, TrialPlan, users_python_path
from orchestrator.run.worker import OUTCOME, PROGRESS
from orchestrator.tracking import Tracking

_POLL_S = 0.2

_REAPER_S = 0.6
"""Seconds to wait after a worker died silently, for its reaper to note in the log whether the kernel killed it for memory."""

_REPORTS = ("worker_started", "enter_phase", "report_early_figures")
"""Methods of the progress tracker that a worker may call."""

Watch = Callable[[Progress], None]
"""Called with an attempt's progress while it runs; may request a stop from the tracker."""


class LocalRunner:
    """The runner that needs no Ray: one trial at a time, with one worker, on this host.

    Args:
        config: The sweep's configuration.
        output: The sweep's folder.
        tracking: Where trials are logged besides.
    """

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

    def run(self, batch: Batch) -> None:
        """Runs the trials one after the other."""
        plan = TrialPlan.of(
            self._config,
            self._output,
            cache=self._config.cache,
            python_path=users_python_path(self._config.workload),
            **plan_fields(batch),
        )
        early_stopping = EarlyStopping(self._output, batch.pruning) if batch.pruning else None
        proposals = Proposals.of(batch, is_over=lambda: False)
        make_attempt = partial(attempt, tracker=self._tracker, servers=self._servers, watch=self._watch_with(early_stopping))
        while (setting := proposals.next()) is not None:
            assignment = Assignment(plan=plan, trial_id=next(self._trial_ids), settings=setting)
            _, unwritten = run_trial(assignment, make_attempt, self._call_tracker)
            self._tracking.catch_up()
            if unwritten is not None:
                raise SweepFolderError(unwritten_error(self._output, unwritten))

    def running(self) -> Sequence[Progress]:
        """Returns the progress of the running trial, if one runs."""
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


class Servers:
    """The fork server of trials that run one after the other, started when there is a trial and again when it will not do.

    Args:
        imports_workload: Whether it imports the workload's module, which only several trials are worth.
    """

    def __init__(self, *, imports_workload: bool) -> None:
        self._imports_workload = imports_workload
        self._server: ForkServer | None = None
        self._wanted: tuple[Setup, Mapping[str, str]] | None = None

    def server_for(self, plan: TrialPlan, environment: Mapping[str, str]) -> ForkServer:
        """Returns a server that can run a trial.

        Args:
            plan: The trial's.
            environment: Variables that torch reads when it is imported, besides those of this process.
        """
        setup = Setup(
            workload=plan.workload if self._imports_workload and plan.script is None else None,
            python_path=plan.python_path,
            use_gpu=plan.use_gpu,
        )
        wanted = (setup, {**os.environ, **environment})
        if self._server is None or not self._server.is_alive or self._wanted != wanted:
            self.close()
            self._server, self._wanted = ForkServer(*wanted), wanted
        return self._server

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()
            self._server = None


def attempt(assignment: Assignment, tracker: ProgressTracker, servers: Servers, watch: Watch = lambda progress: None) -> Attempt:
    """Makes one attempt in a process of its own, which ends when this process does.

    Args:
        assignment: What to measure. The log goes to the folder that its plan names.
        tracker: Receives the attempt's progress. The trial must have begun there.
        servers: Forks the process.
        watch: Called several times a second while the process runs.
    """
    marker = new_marker(assignment)
    log_path = assignment.log_file(0)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.touch()
    log_sizes = watchdog.log_sizes(assignment.log_folder)
    with scratch_folder("compile-sweep-trial-") as folder:
        (folder / PROGRESS).touch()
        began = time.monotonic()
        gives_up_at = began + assignment.plan.trial_deadline_s + GRACE_S
        server = servers.server_for(assignment.plan, environment_at_import(assignment))
        with (folder / PROGRESS).open(encoding="utf-8") as reports:
            order = Order(
                assignment=assignment.to_dict(), marker=marker, environment=environment_of_attempt(marker), folder=str(folder)
            )
            server.start(order)
            try:
                while True:
                    returncode = server.wait(_POLL_S)
                    _read_reports(reports, assignment, tracker)
                    progress = _progress(assignment, tracker)
                    watch(progress)
                    if returncode is not None or progress.stop_request is not None or time.monotonic() > gives_up_at:
                        break
                if progress.stop_request is not None:
                    with log_path.open("a", encoding="utf-8") as log:
                        log.write(f"{progress.stop_request.reason}\n")
            finally:
                server.kill()
                if not (folder / OUTCOME).exists():
                    time.sleep(_REAPER_S)
                kill_marked(marker)  # compilers that the worker started outlive it
                shutil.rmtree(scratch_folders.attempt_folder(marker), ignore_errors=True)
            progress = _progress(assignment, tracker)
        written = folder / OUTCOME
        outcome: dict[str, Any] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    if "figures" in outcome:
        return Attempt(figures=outcome["figures"], progress=progress)
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
        **(outcome or {"error_text": how_it_ended(server, -signal.SIGKILL if returncode is None else returncode)}),
    )
    return Attempt(death=death, was_raised=death.error_type is not None, progress=progress)


def attempt_alone(assignment: Assignment, on_phase: Callable[[float, str], None] = lambda elapsed_s, phase: None) -> Attempt:
    """Makes one attempt outside any sweep.

    Args:
        assignment: What to measure. Its plan names a folder for the log.
        on_phase: Called with the seconds since the attempt began and the phase it entered.
    """
    tracker, last_phase = ProgressTracker(), str(Phase.STARTING)
    tracker.begin(assignment.trial_id, assignment.settings.key)

    def watch(progress: Progress) -> None:
        nonlocal last_phase
        if progress.phase != last_phase:
            last_phase = progress.phase
            on_phase(progress.elapsed_s - progress.in_phase_s, last_phase)

    servers = Servers(imports_workload=False)
    try:
        return attempt(assignment, tracker, servers, watch)
    finally:
        servers.close()


def plan_alone(folder: Path, workload: str, size: str, seed: int, *, use_gpu: bool, **own: Any) -> TrialPlan:
    """Returns the plan of an attempt outside any sweep: one worker, resident batches, no artifacts.

    Args:
        folder: Where the log goes.
        workload: A built-in workload's name, or `package.module:Class`.
        size: One of the workload's sizes.
        seed: Decides weights and data.
        use_gpu: Whether to train on a GPU.
        own: Further fields of `TrialPlan`.
    """
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


def _read_reports(reports: IO[str], assignment: Assignment, tracker: ProgressTracker) -> None:
    """Passes on to the tracker what the worker has reported since the last call."""
    while True:
        start = reports.tell()
        line = reports.readline()
        if not line.endswith("\n"):
            reports.seek(start)  # half a line; the rest follows
            return
        method, *arguments = json.loads(line)
        if method in _REPORTS:
            getattr(tracker, method)(assignment.trial_id, *arguments)


def _progress(assignment: Assignment, tracker: ProgressTracker) -> Progress:
    return next(progress for progress in tracker.running() if progress.trial_id == assignment.trial_id)
