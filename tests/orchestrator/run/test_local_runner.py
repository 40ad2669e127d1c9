"""Attempts in a fresh process of this host, without Ray: their results, however the process ends."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from compile_sweep.harness.toolchain import cpp_header_folder
from compile_sweep.schema.outcome import Label
from compile_sweep.schema.record import append, read
from compile_sweep.schema.settings import CompileSettings
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run import local_runner
from orchestrator.run.fork_server import ForkServer, Order, Setup
from orchestrator.run.forked_attempt import Servers, how_it_ended
from orchestrator.run.local_runner import attempt_alone, plan_alone
from orchestrator.run.trial import Attempt
from orchestrator.run.trial_spec import Assignment

pytestmark = pytest.mark.slow

SHORT = {"compared_steps": 2, "min_passes": 2, "max_passes": 2, "min_window_s": 0.0, "cpu_window_s": 0.0}


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """A fork server that has torch, for all attempts."""
    with closing(Servers(imports_workload=False)) as made:
        yield made


def test_a_process_that_ends_before_it_has_a_log_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with closing(ForkServer(Setup(workload=None, python_path="", use_gpu=False), os.environ)) as server:
        for folder in (tmp_path / "file" / "work", tmp_path):
            order = {"assignment": {}, "marker": "test", "environment": {}, "folder": str(tmp_path), "work_folder": str(folder)}
            server.start(Order(**order))
            returncode = server.wait(60.0)
            assert returncode is not None
            ended = how_it_ended(server, returncode)
            assert ended.startswith("it ended with exit code 1: NotADirectoryError: ") == (folder != tmp_path), ended


def tried(
    folder: Path, workload: str, servers: Servers | None, spelled: str = "scope=eager", deadline_s: float = 120.0, **own: bool
) -> tuple[Assignment, Attempt, list[str]]:
    """Returns one attempt, and the phases that it reported."""
    plan = plan_alone(
        folder, workload, "only", 0, use_gpu=False, compile_deadline_s=deadline_s, trial_deadline_s=deadline_s, protocol=SHORT,
        **own,
    )  # fmt: skip
    assignment = Assignment(plan=plan, trial_id="7", settings=CompileSettings.parse(spelled))
    phases: list[str] = []
    own_servers = closing(Servers(imports_workload=False)) if servers is None else nullcontext(servers)
    with patch.dict(os.environ), own_servers as used:
        del os.environ["PYTEST_CURRENT_TEST"]  # it differs by test, and a fork server is for one environment
        return assignment, attempt_alone(assignment, lambda elapsed_s, phase: phases.append(phase), used), phases


def test_a_setting_is_measured_without_ray_and_leaves_its_log(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, phases = tried(tmp_path, "toy_workloads:CountsFrozenObjects", servers)
    assert attempt.figures is not None, attempt.death
    assert attempt.figures["samples_per_s"] > 0
    assert attempt.verdict(assignment).label is None
    assert phases[-1] == "done"
    log = assignment.log_file(0).read_text()
    assert "worker 0 of 1 is up" in log
    frozen = re.search(r"^frozen objects: (\d+)$", log, re.MULTILINE)
    assert frozen is not None
    assert int(frozen[1]) > 100_000, "the garbage collections of a measurement scan everything that was imported"
    assert attempt.progress is not None
    assert attempt.progress.early_figures["samples_per_s"] > 0


def test_a_trial_also_finds_the_largest_batch_and_records_the_memory_of_each(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, "toy_workloads:Sized", servers, largest_batch=True)
    verdict = attempt.verdict(assignment)
    assert verdict.label is None, verdict
    append(tmp_path, assignment.record(verdict, phase="done", started_at="", wall_s=9.0, figures=attempt.figures))
    (record,) = read(tmp_path)
    peaks = record.batch_peak_bytes
    assert sorted(peaks, key=int) == ["3", "6", "9", "10", "11", "12"]
    assert [size for size, peak in peaks.items() if peak is None] == ["12"]
    assert min(peak for peak in peaks.values() if peak is not None) > 2**20
    assert record.peak_memory_bytes is not None


@pytest.mark.parametrize(
    ("workload", "words"),
    [("faulty_workloads:Halts", "_Halt: no message"), ("faulty_workloads:Silent", "_Silent: no message")],
)
def test_whatever_a_workload_raises_is_an_exception(workload: str, words: str, servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, workload, servers)
    verdict = attempt.verdict(assignment)
    assert (verdict.label, words in str(verdict.reason)) == (Label.EXCEPTION, True), verdict


def test_a_measurement_is_kept_where_the_workload_took_the_output_away(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, "faulty_workloads:TakesOutputAway", servers)
    assert attempt.figures is not None, attempt.death
    assert attempt.verdict(assignment).label is None


def test_a_workload_that_empties_the_folder_for_temporary_files_harms_nobody(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, "faulty_workloads:EmptiesTemporaryFolder", servers, deadline_s=300.0)
    assert attempt.figures is not None, attempt.death
    log = assignment.log_file(0).read_text()
    headers = cpp_header_folder()  # no trial builds these itself
    assert f"headers here: {headers}\nheaders of a child: {headers.resolve()}\nemptied" in log
    assert any(headers.iterdir())


def test_a_workload_that_writes_into_the_files_of_its_trial_harms_nobody(servers: Servers, tmp_path: Path) -> None:
    _, attempt, phases = tried(tmp_path, "misbehaving_workloads:writes_to_open_files", servers)
    assert attempt.figures is not None, attempt.death
    assert phases[-1] == "done"


def test_a_process_that_is_killed_says_by_what(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, "faulty_workloads:Faulty", servers, "scope=eager,padding=longest,pad_multiple=4")
    verdict = attempt.verdict(assignment)
    assert verdict.label is Label.WORKER_DIED
    assert "signal SIGKILL" in str(verdict.reason)


def test_a_process_that_dies_before_its_first_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is not ours')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assignment, attempt, _ = tried(tmp_path, "toy_workloads:Toy", None)
    verdict = attempt.verdict(assignment)
    assert "this numpy is not ours" in str(verdict.reason)


def test_a_process_that_did_not_start_in_time_is_no_fault_of_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runner, "GRACE_S", 0.0)
    assignment, attempt, _ = tried(tmp_path, "toy_workloads:Toy", None, deadline_s=0.01)
    verdict = attempt.verdict(assignment)
    assert verdict.label is Label.NOT_STARTED
    assert "no worker had started" in str(verdict.reason)


def test_a_process_is_ended_at_its_deadline_and_nothing_of_it_is_left(servers: Servers, tmp_path: Path) -> None:
    assignment, attempt, _ = tried(tmp_path, "faulty_workloads:Sleeps", servers, deadline_s=6.0)
    assert attempt.verdict(assignment).label is Label.TRIAL_DEADLINE
    assert not [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid() and f"{ATTEMPT_MARKER}=7-" in _environment(entry)
    ]


def _environment(process: Path) -> str:
    try:
        return (process / "environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
