"""Whole sweeps through the command line, on a real local Ray, with tiny workloads."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from samples import REPOSITORY, TESTS, wait_until

import analysis

pytestmark = pytest.mark.slow

RUN = "SWEEPS_END_TO_END"
"""Environment variable that distinguishes this test run's processes from those of another on the same host."""

EAGER_SIX = [
    "scope=eager,padding=max",
    "scope=eager,padding=longest,pad_multiple=1",
    "scope=eager,padding=longest,pad_multiple=2",
    "scope=eager,padding=longest,pad_multiple=4",
    "scope=eager,padding=longest,pad_multiple=8",
    "scope=eager,padding=longest,pad_multiple=16",
]


def command(output: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.sweep", "--output", str(output), *words]


def sweep(output: Path, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    done = start(output, *words)
    printed, complaints = done.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(done.args, done.returncode, printed, complaints)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), RUN: str(os.getpid())}


def records_of(output: Path) -> list[dict[str, Any]]:
    path = output / "trials.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def was_measured(record: dict[str, Any]) -> bool:
    """Tells whether there is a measurement and nothing speaks against it."""
    return record["status"] == "ok"


def processes_of_sweeps() -> list[str]:
    """Returns commands of processes that only a sweep of this test run starts."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environ, words = process.info["environ"] or {}, process.info["cmdline"] or []
        if environ.get(RUN) != str(os.getpid()):
            continue
        if "COMPILE_SWEEP_ATTEMPT" in environ or "orchestrator.guard.watchdog" in words or words[:2] == ["sleep", "600"]:
            found.append(" ".join(words))
    return found


@pytest.mark.ray
@pytest.mark.nightly("seven trials, one of which waits out a deadline; test_faults_of_trials.py covers the same faults")
def test_an_exception_a_killed_worker_and_a_hang_do_not_keep_the_others_from_finishing(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    settings = [*EAGER_SIX, "scope=eager,optimizer=fused"]
    done = sweep(output, "--workload", "faulty_workloads:Faulty", "--settings", *settings, "--compile-deadline-s", "6")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    by_multiple = {record["settings"]["pad_multiple"]: record for record in records_of(output)}
    assert len(records_of(output)) == 7
    measured = [record for record in records_of(output) if was_measured(record)]
    assert [record["settings"]["pad_multiple"] for record in measured] == [None, 1, 16, None]
    raised, killed, hung = (by_multiple[multiple] for multiple in (2, 4, 8))
    assert (raised["status"], raised["label"], raised["phase"]) == ("failed", "exception", "building")
    assert "does not like multiples of 2" in raised["reason"]
    assert (killed["status"], killed["label"], killed["phase"]) == ("failed", "worker-died", "building")
    assert (hung["status"], hung["label"], hung["phase"]) == ("infeasible", "compile-deadline", "warming-up")
    assert "Timeout" in (output / "logs" / hung["trial_id"] / "worker-0.log").read_text()
    assert "multiples of 2" in (output / "logs" / raised["trial_id"] / "worker-0.log").read_text()
    wait_until(lambda: not processes_of_sweeps(), 10)
    frame = analysis.load(output)
    assert set(analysis.pareto_front(frame)["status"]) <= {"ok"}
    assert (output / "report.html").stat().st_size > 1_000_000


@pytest.mark.ray
@pytest.mark.nightly("one more sweep with Ray; `make test` kills a local sweep's driver the same way")
def test_after_its_driver_was_killed_a_sweep_repeats_only_what_was_in_flight(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    running = start(output, "--workload", "toy_workloads:Slow", "--settings", *EAGER_SIX[:3])
    wait_until(lambda: len(records_of(output)) == 1, 120)
    wait_until(lambda: len(list((output / "logs").iterdir())) == 2, 240)
    running.kill()
    running.communicate(timeout=30)
    wait_until(lambda: not processes_of_sweeps(), 30)
    done = sweep(output, "--resume", "--runner", "local", timeout_s=400)
    assert done.returncode == 0, done.stderr
    records = records_of(output)
    assert list(map(was_measured, records)) == [True] * 3
    assert len({record["settings_key"] for record in records}) == len({record["trial_id"] for record in records}) == 3
    assert len(list((output / "logs").iterdir())) == 4  # one attempt was repeated


@pytest.mark.parametrize(
    "runner",
    [
        "local",
        pytest.param(
            "ray", marks=[pytest.mark.ray, pytest.mark.nightly("repeats the local case with Ray; the sweep ends the same way")]
        ),
    ],
)
def test_a_closed_terminal_asks_a_second_signal_stops_at_once_and_neither_it_nor_a_killed_driver_leaves_a_process(
    runner: str, tmp_path: Path
) -> None:
    output = tmp_path / "sweep"
    # This one hangs.
    first = start(output, "--runner", runner, "--workload", "faulty_workloads:Faulty", "--settings", EAGER_SIX[4])
    wait_until(lambda: "warming-up" in log_of_first_trial(output), 240)
    assert processes_of_sweeps()
    first.send_signal(signal.SIGHUP)
    time.sleep(3)  # two signals within a second are one
    assert first.poll() is None
    began = time.monotonic()
    first.send_signal(signal.SIGINT)
    try:
        printed, complaints = first.communicate(timeout=25)
    except subprocess.TimeoutExpired:  # on a busy machine it may have seen both signals at once, and took them for one
        first.send_signal(signal.SIGINT)
        printed, complaints = first.communicate(timeout=90)
    assert time.monotonic() - began < 60  # the trial would take ten times as long
    assert first.returncode == 130, complaints
    assert "Traceback" not in printed + complaints
    wait_until(lambda: not processes_of_sweeps(), 60, processes_of_sweeps)

    second = start(output, "--resume", "--runner", "local")
    wait_until(lambda: len(list((output / "logs").iterdir())) == 2 and bool(processes_of_sweeps()), 240)
    second.kill()
    second.communicate(timeout=60)
    wait_until(lambda: not processes_of_sweeps(), 60, processes_of_sweeps)
    assert records_of(output) == []


@pytest.mark.ray
@pytest.mark.nightly("one more sweep; Ctrl-C stops a sweep the same way")
def test_a_signal_to_the_whole_group_as_timeout_sends_it_finishes_the_trial_in_flight(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    running = start(output, "--workload", "toy_workloads:Slow", "--settings", *EAGER_SIX[:2])
    wait_until(lambda: (output / "logs").exists() and any((output / "logs").iterdir()), 240)
    running.send_signal(signal.SIGTERM)
    os.killpg(running.pid, signal.SIGTERM)
    printed, complaints = running.communicate(timeout=90)
    assert running.returncode == 130, complaints
    assert f"--resume --output {output}" in printed
    assert list(map(was_measured, records_of(output))) == [True]
    assert (output / "report.html").stat().st_size > 1_000_000
    wait_until(lambda: not processes_of_sweeps(), 10)


@pytest.mark.ray
@pytest.mark.nightly("one more sweep with Ray; test_on_ray.py measures with two workers, as each trial of a sweep does")
def test_two_workers_train_together_and_compiled_settings_are_measured_cold(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    words = ("--workload", "toy_workloads:Brief", "--workers-per-trial", "2", "--settings", "scope=full,backend=aot_eager")
    done = sweep(output, *words)
    assert done.returncode == 0, done.stderr
    (full,) = records_of(output)
    assert (was_measured(full), full["num_workers"], full["caches"]) == (True, 2, "cold"), full
    assert full["graphs"] >= 1
    assert full["compile_s"] > 0
    assert "saves % (95%)" in done.stdout
    assert "next:\n" in done.stdout
    assert "1/1 ok: A1 full, backend aot_eager, static" in done.stdout
    described = json.loads((output / "sweep.json").read_text())
    assert described["config"]["workers_per_trial"] == 2
    assert described["environment_key"] == full["environment_key"]


@pytest.mark.ray
@pytest.mark.nightly("three sweeps of trials that disturb each other; test_confirmation.py covers what is run again")
def test_members_of_the_front_that_met_contention_are_measured_again_alone(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    words = ("--workload", "toy_workloads:Crowded", "--max-concurrent", "2", "--settings", *EAGER_SIX[:2], "--no-confirm")
    done = sweep(output, *words)
    assert done.returncode == 0, done.stderr
    contended = records_of(output)
    assert [(r["status"], r["contended"]) for r in contended] == [("ok", True)] * 2, contended
    share = len(os.sched_getaffinity(0)) / 2
    assert all(int(share) <= r["cores"] <= share + 1 for r in contended)
    assert all(0.05 < r["cpu_pressure"] <= 1 for r in contended)
    front = set(analysis.pareto_front(analysis.load(output))["settings_key"])

    no_time = sweep(output, "--resume", "--time-budget-s", "1")
    assert len(records_of(output)) == 2
    assert f"{len(front)} of the front were disturbed by other trials and did not run again alone; go on with:" in no_time.stdout

    confirmed = sweep(output, "--resume", "--max-concurrent", "2")
    assert confirmed.returncode == 0, confirmed.stderr
    assert "of the front again, alone, because other trials disturbed the first measurement: eager" in confirmed.stdout
    again = records_of(output)[2:]
    assert front <= {r["settings_key"] for r in again}
    assert [(r["status"], r["contended"]) for r in again] == [("ok", False)] * len(again)
    assert {r["cores"] for r in again} <= {r["cores"] for r in contended}
    frame = analysis.load(output)
    latest = {r["settings_key"]: r["trial_id"] for r in records_of(output)}
    assert {latest[key] for key in analysis.pareto_front(frame)["settings_key"]} <= {r["trial_id"] for r in again}
    assert re.search(rf"{2 + len(again)}/{2 + len(again)} ok: A\d eager, pad to", confirmed.stdout)


def start(output: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(output, *words),
        cwd=TESTS,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def log_of_first_trial(output: Path) -> str:
    logs = sorted(output.glob("logs/*/worker-0.log"))
    return logs[0].read_text() if logs else ""
