"""One attempt at a trial in a process that a fork server forks: reports, outcome and cleanup.

The local runner and the workers of a standing group on Ray both make attempts this way.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from compile_sweep.script.job import ScriptJob, leading_imports
from compile_sweep.script.sandbox import OFFLINE
from orchestrator.guard import scratch_folders
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.guard.watchdog import kill_marked
from orchestrator.run.fork_server import ForkedScriptRun, ForkServer, Order, Setup, how_it_ended, script_order
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial import environment_of_attempt
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import OUTCOME, PROGRESS

_REAPER_S = 0.6
"""Seconds to wait after a worker died silently, so that its reaper can log whether the kernel killed it for lack of memory."""

_REPORTS = ("worker_started", "enter_phase", "report_early_figures")
"""Methods of the progress tracker that a worker may call."""


class Servers:
    """Keeps a fork server for trials that run one after the other, and starts another when a trial needs it."""

    def __init__(self, *, imports_workload: bool, core_shares: tuple[int, int | None] = (1, None)) -> None:
        self._imports_workload, self._core_shares = imports_workload, core_shares
        self._server: ForkServer | None = None
        self._wanted: tuple[Setup, Mapping[str, str]] | None = None

    def server_for(self, plan: TrialPlan, environment: Mapping[str, str]) -> ForkServer:
        """Returns a server that can run a trial."""
        setup = Setup(
            workload=plan.workload if self._imports_workload and plan.script is None else None,
            python_path=plan.python_path,
            use_gpu=plan.use_gpu,
            core_shares=self._core_shares,
        )
        if plan.script is not None:
            return self.server_of(ScriptJob.from_dict(plan.script), setup, environment)
        return self.server_with(setup, environment)

    def server_of(self, job: ScriptJob, setup: Setup, environment: Mapping[str, str]) -> ForkServer:
        """Returns a server that has imported what a script begins with, with the same variables as for `server_for`."""
        offline = {} if job.in_place else OFFLINE
        return self.server_with(
            replace(setup, runs_scripts=True, imports=leading_imports(job)),
            {**environment, "PYTHONHASHSEED": str(job.seed), **offline},
        )

    def server_with(self, setup: Setup, environment: Mapping[str, str]) -> ForkServer:
        """Returns a server of this kind, with the same variables as for `server_for`."""
        wanted = (setup, {**os.environ, **environment})
        if self._server is None or not self._server.is_alive or self._wanted != wanted:
            self.close()
            self._server, self._wanted = ForkServer(*wanted), wanted
        return self._server

    def close(self) -> None:
        """Closes the server."""
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkedScriptRuns:
    """Starts runs of a script, one after the other, in forks of one server, which has imported what the script begins with."""

    def __init__(self, job: ScriptJob, environment: Mapping[str, str], *, use_gpu: bool) -> None:
        self._servers = Servers(imports_workload=False)
        setup = Setup(workload=None, python_path="", use_gpu=use_gpu)
        self._server = partial(self._servers.server_of, job, setup, environment)
        self._server()  # begins to import

    def start(self, assignment: Path, folder: str, environment: Mapping[str, str], log: Path | None) -> ForkedScriptRun:
        """Starts a run, as `compile_sweep.script.trial.StartRun` says; the one before it must have ended."""
        return ForkedScriptRun(self._server(), script_order(assignment, folder, environment, log, marker="check"))

    def close(self) -> None:
        """Ends the server."""
        self._servers.close()


class ForkedAttempt:
    """An attempt that a fork server is running."""

    def __init__(self, server: ForkServer, assignment: Assignment, rank: int, folder: Path, reports: IO[str]) -> None:
        self._server, self._assignment, self._rank, self._folder, self._reports = server, assignment, rank, folder, reports
        self._returncode: int | None = None
        self.outcome: Mapping[str, Any] = {}
        """What the process left when it ended: `figures`, or its error as fields of a `Death`; empty if it left nothing."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for the outcome or the end of the process; returns whether there is one within `timeout_s`."""
        self._returncode = self._server.wait(timeout_s)
        return self._returncode is not None or (self._folder / OUTCOME).exists()

    def reports(self) -> Iterator[tuple[Any, ...]]:
        """Yields the process's reports since the last call, each a method of the progress tracker and its arguments."""
        while True:
            start = self._reports.tell()
            line = self._reports.readline()
            if not line.endswith("\n"):
                self._reports.seek(start)  # an unfinished line; the rest follows
                return
            match _json_or_none(line):
                case [str(method), str() | dict() as first, *rest] if method in _REPORTS:
                    yield method, first, *rest

    def log(self, sentence: str) -> None:
        """Adds a line to the worker's log."""
        with self._assignment.log_file(self._rank).open("a", encoding="utf-8") as log:
            log.write(f"{now()} {sentence}\n")

    @property
    def ending(self) -> str:
        """Describes, in a sentence, how a process that left no outcome ended."""
        return how_it_ended(self._server, -signal.SIGKILL if self._returncode is None else self._returncode)

    def read_outcome(self) -> None:
        """Reads the outcome that the process left."""
        with suppress(OSError):
            outcome = _json_or_none((self._folder / OUTCOME).read_text(encoding="utf-8", errors="replace"))
            self.outcome = outcome if isinstance(outcome, dict) else {}


def _json_or_none(text: str) -> Any:
    """Parses what a trial's process wrote, into which a workload may have written, too; returns None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def prepare_log(assignment: Assignment, rank: int) -> None:
    """Creates a worker's log if it does not exist yet."""
    path = assignment.log_file(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@contextmanager
def forked_attempt(
    server: ForkServer,
    assignment: Assignment,
    marker: str,
    *,
    rank: int = 0,
    gpu: int | None = None,
    environment: Mapping[str, str] | None = None,
    has_own_work_folder: bool = False,
) -> Iterator[ForkedAttempt]:
    """Makes the server, which runs no other attempt, fork a process for this one; ends it and its compilers with the block."""
    with scratch_folder("compile-sweep-trial-") as folder:
        (folder / PROGRESS).touch()
        with (folder / PROGRESS).open(encoding="utf-8", errors="replace") as reports:
            forked = ForkedAttempt(server, assignment, rank, folder, reports)
            server.start(
                Order(
                    assignment=assignment.to_dict(),
                    marker=marker,
                    environment={**environment_of_attempt(marker), **(environment or {})},
                    folder=str(folder),
                    work_folder=str(folder / "work") if has_own_work_folder else None,
                    rank=rank,
                    gpu=gpu,
                )
            )
            try:
                yield forked
            finally:
                server.kill()
                if not (folder / OUTCOME).exists():
                    time.sleep(_REAPER_S)
                kill_marked(marker)  # compilers that the worker started outlive it
                shutil.rmtree(scratch_folders.attempt_folder(marker), ignore_errors=True)
                forked.read_outcome()
