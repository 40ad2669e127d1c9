"""The second guard of a trial counts from its start or, if its workers may wait for a host, from when they have started."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from samples import wait_until

from compile_sweep.schema.settings import CompileSettings
from orchestrator.cluster import placement
from orchestrator.guard.progress import ProgressTracker
from orchestrator.run import worker_group
from orchestrator.run.train_errors import waited_s
from orchestrator.run.trial_spec import Assignment, TrialPlan


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> ProgressTracker:
    """A tracker on which the trial "7" has begun."""
    board = ProgressTracker()
    monkeypatch.setattr(worker_group, "_ask", lambda method, *arguments: getattr(board, method)(*arguments))
    board.begin("7", "scope=eager")
    return board


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists what the guard ends, in order; it waits for tenths of a second."""
    done: list[str] = []
    monkeypatch.setattr(worker_group, "kill_marked", lambda marker: done.append(marker))
    monkeypatch.setattr(os, "_exit", lambda code: done.append("itself"))
    monkeypatch.setattr(worker_group, "GRACE_S", 0.1)
    monkeypatch.setattr(worker_group, "_ARRIVAL_POLL_S", 0.02)
    return done


def of(folder: Path, *, head: str | None) -> Assignment:
    plan = TrialPlan(
        folder=str(folder), workload="toy", size="only", seed=0, num_workers=1, use_gpu=False, pipeline="resident",
        workers_at_once=1, claimed_cpus=0.5, compile_deadline_s=0.2, trial_deadline_s=0.2, head=head,
    )  # fmt: skip
    return Assignment(plan=plan, trial_id="7", settings=CompileSettings.parse("scope=eager"))


def test_a_trial_that_waits_for_a_host_is_given_its_time_once_it_has_one(
    tmp_path: Path, board: ProgressTracker, ended: list[str]
) -> None:
    assignment = of(tmp_path, head="ab")
    with worker_group._deadline(assignment, "its workers"):
        time.sleep(0.8)
        assert ended == []
        board.worker_started("7", "host")
        wait_until(lambda: ended == ["its workers", "itself"], 10)


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize(("head", "wait_s"), [(None, placement.HOST_TIMEOUT_S), ("ab", 0.1)])
def test_on_one_host_and_where_none_comes_the_time_runs_all_the_same(
    tmp_path: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch, head: str | None, wait_s: float
) -> None:
    monkeypatch.setattr(placement, "HOST_TIMEOUT_S", wait_s)
    with worker_group._deadline(of(tmp_path, head=head), "its workers"):
        wait_until(lambda: ended == ["its workers", "itself"], 10)


def test_what_a_trial_waited_for_a_host_is_all_until_it_is_up_and_then_as_it_says(tmp_path: Path, board: ProgressTracker) -> None:
    plan = of(tmp_path, head="ab").plan
    time.sleep(0.05)
    (progress,) = board.running()
    assert (progress.is_up, progress.waited_s) == (False, 0.0)
    assert waited_s(plan, progress) == progress.elapsed_s >= 0.05
    assert waited_s(of(tmp_path, head=None).plan, progress) == 0.0
    assert waited_s(plan, None) == 0.0
    board.worker_started("7", "host", None, 0.04)
    board.enter_phase("7", "building")
    (progress,) = board.running()
    assert progress.is_up
    assert waited_s(plan, progress) == progress.waited_s == 0.04


def test_a_board_that_took_a_dead_ones_place_learns_from_a_phase_that_a_trial_is_up(board: ProgressTracker) -> None:
    board._is_successor = True
    board.enter_phase("8", "building", "scope=full")
    time.sleep(0.01)
    assert [progress.is_up for progress in board.running()] == [False, True]


def test_without_a_board_a_trial_is_given_its_time(tmp_path: Path, ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_ask", lambda method, *arguments: None)
    monkeypatch.setattr(placement, "HOST_TIMEOUT_S", 0.1)
    began = time.monotonic()
    with worker_group._deadline(of(tmp_path, head="ab"), "its workers"):
        wait_until(lambda: ended == ["its workers", "itself"], 10)
    assert time.monotonic() - began > 0.1 + 0.2 + 0.1


@pytest.mark.usefixtures("board")
@pytest.mark.parametrize("head", ["ab", None])
def test_a_trial_that_ends_in_time_is_left_alone(tmp_path: Path, ended: list[str], head: str | None) -> None:
    with worker_group._deadline(of(tmp_path, head=head), "its workers"):
        pass
    wait_until(lambda: not any(thread.name == "guards-the-deadline" for thread in threading.enumerate()), 10)
    assert ended == []
