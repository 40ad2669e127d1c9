"""How a trial receives a request to stop, and what it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_sweep.schema.outcome import Label, Status, verdict_of
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.guard import progress as progress_module
from orchestrator.guard.progress import Progress, ProgressTracker, StopRequest
from orchestrator.run import train_errors, trial, worker_group
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import MeasurementFailed

ENDING = StopRequest(label="dominated", reason="stopped: it had nothing left to gain", bounds={"compile_s": 70.0})


def test_the_first_word_to_stop_stands_and_ended_trials_are_not_told() -> None:
    board = ProgressTracker()
    board.begin("1", "scope=full")
    assert board.stop_request("1") is None
    board.request_stop("1", ENDING)
    board.request_stop("1", StopRequest(label="compile-deadline", reason="given up", bounds={}))
    assert board.stop_request("1") == ENDING
    (progress,) = board.running()
    assert progress.stop_request == ENDING
    board.end("1")
    board.request_stop("1", ENDING)
    board.report_early_figures("1", {"samples_per_s": 5.0})
    assert (board.stop_request("1"), board.running()) == (None, [])


def test_what_the_first_pass_told_stands_on_the_board() -> None:
    board = ProgressTracker()
    board.begin("1", "scope=full")
    board.report_early_figures("1", {"samples_per_s": 5.0})
    (progress,) = board.running()
    assert progress.early_figures == {"samples_per_s": 5.0}


def test_a_trial_says_what_its_seconds_went_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    board = ProgressTracker()
    board.begin("1", "scope=full")
    for clock.now, phase in ((12.0, "building"), (14.0, "warming-up"), (50.0, "steady"), (56.0, "done")):
        board.enter_phase("1", phase)
    clock.now = 57.0
    (told,) = board.running()
    assert told.phases_s == {"starting": 12.0, "building": 2.0, "warming-up": 36.0, "steady": 6.0, "done": 1.0}
    waited = replace(told, waited_s=10.0)
    figures = trial._of_progress(waited, verdict_of(Label.DOMINATED, ""), wall_s=47.5)
    assert figures["phases_s"] == told.phases_s | {"starting": 2.0, "done": 1.5}


class _Died(Exception):
    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__("a worker died")
        self.worker_failures = failures


class _Group:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def run(self, *attempt: Any) -> None:
        raise self._error


def outcome(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrialRecord:
    """Returns the record of a trial that was asked to stop and ended with this error."""
    told = Progress(
        trial_id="1", settings_key="scope=full", phase="warming-up", in_phase_s=70, elapsed_s=90, neighbors=0, stop_request=ENDING
    )
    monkeypatch.setattr(worker_group, "_group_for", lambda plan: _Group(error))
    monkeypatch.setattr(worker_group, "_ask", lambda method, *arguments: [told] if method == "running" else None)
    monkeypatch.setattr(train_errors, "_lost", lambda hosts: 0)
    plan: dict[str, Any] = {"folder": str(folder), "workload": "captioning", "size": "tiny", "seed": 0, "num_workers": 1}
    plan |= {"use_gpu": False, "pipeline": "resident", "workers_at_once": 1, "claimed_cpus": 1.0}
    deadlines = {"compile_deadline_s": 600.0, "trial_deadline_s": 900.0}
    assignment = Assignment(plan=TrialPlan(**plan, **deadlines), trial_id="1", settings=CompileSettings.parse("scope=full"))
    attempt = worker_group._attempt(assignment)
    verdict = attempt.verdict(assignment)
    of_progress = trial._of_progress(attempt.progress, verdict, wall_s=90.0)
    figures = trial._figures(attempt.figures, assignment.plan, attempt.progress) | of_progress
    record = assignment.record(verdict, phase="warming-up", started_at="", wall_s=90.0, figures=figures)
    assert isinstance(record, TrialRecord)
    return record


def test_a_worker_that_ended_because_it_was_told_to_leaves_a_record_with_bounds_that_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = outcome(_Died({0: RuntimeError("exit code 75")}), tmp_path, monkeypatch)
    assert (record.status, record.label, record.reason) == (Status.STOPPED, Label.DOMINATED, ENDING.reason)
    assert record.bounds == {"compile_s": 70.0}
    assert TrialRecord.from_json(record.to_json()) == record


def test_a_worker_that_failed_of_itself_before_it_heard_is_told_by_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = MeasurementFailed("torch.OutOfMemoryError", "CUDA out of memory", False, "worker-0.log")
    record = outcome(_Died({0: failed}), tmp_path, monkeypatch)
    assert (record.status, record.label, record.bounds) == (Status.INFEASIBLE, Label.OUT_OF_MEMORY, {})
