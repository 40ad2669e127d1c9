"""Whole searches through the command line: proposals, their end, and trials stopped early."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

import analysis
from tests.sweeps.conftest import SweepHere

pytestmark = pytest.mark.slow

RUN = "SEARCHES_END_TO_END"
"""Environment variable that distinguishes this test run's processes from those of another on the same host."""

EAGER = ("scope=eager,padding=max", *(f"scope=eager,padding=longest,pad_multiple={multiple}" for multiple in (1, 2, 4)))


def records_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]


def still_running(output: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN) == str(output):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.nightly("three more sweeps with Ray; `make test` runs auto in one, and test_stages.py covers what is left")
def test_a_search_tries_as_many_as_it_may_and_goes_on_when_resumed(tmp_path: Path, sweep_here: SweepHere) -> None:
    output = tmp_path / "search"
    words = ["--workload", "toy_workloads:Brief", "--cache-store", "none", "--settings", *EAGER]
    words += ["--searcher", "random", "--objective", "samples_per_s:max"]
    printed = sweep_here("--output", str(output), *words, "--num-trials", "1")
    (first,) = records_of(output)
    assert "the search ended after 1 trial of 4 settings: 1 trial was asked for" in printed
    config = json.loads((output / "sweep.json").read_text())
    assert (config["config"]["search"]["searcher"], config["planned"]) == ("random", [])
    sweep_here("--resume", "--output", str(output), "--num-trials", "2")
    _, second = records_of(output)
    left_s = 0.5 * second["wall_s"]  # not what the first took, which started what the others find started
    budget = ("--num-trials", "4", "--gpu-budget-s", str(first["wall_s"] + second["wall_s"] + left_s))
    printed = sweep_here("--resume", "--output", str(output), *budget)
    keys = [record["settings_key"] for record in records_of(output)]
    assert len(set(keys)) == len(keys) < 4
    assert "no setting fits in what is left of the budget" in printed or "GPU-seconds is spent" in printed
    assert "go on with: python -m orchestrator.sweep --resume" in printed


def test_auto_begins_with_what_runs_today_and_ends_by_saying_what_is_left(tmp_path: Path, sweep_here: SweepHere) -> None:
    output = tmp_path / "auto"
    # The third trial would be the first that compiles.
    words = ("--workload", "toy_workloads:Brief", "--cache-store", "none", "--no-warm-start", "--num-trials", "2")
    printed = sweep_here("--output", str(output), *words)
    keys = [record["settings_key"] for record in records_of(output)]
    assert keys[0] == "scope=eager,padding=max,optimizer=foreach"
    assert len(set(keys)) == 2
    config = json.loads((output / "sweep.json").read_text())["config"]
    assert (config["recipe"], config["search"]["searcher"], config["time_budget_s"]) == ("auto", "levers", None)
    assert re.search(
        r"the search ended after 2 trials of \d+ settings: 2 trials were asked for; \d+ were not tried, and another hour", printed
    )


@pytest.mark.nightly(
    "waits 45 s for a bound; test_pruning.py and test_stopped_trials.py test the same decisions on given figures"
)
def test_trials_that_cannot_keep_a_constraint_any_more_are_stopped_and_leave_nothing_running(
    tmp_path: Path, sweep_here: SweepHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "pruned"
    monkeypatch.setenv(RUN, str(output))
    printed = sweep_here(
        *("--output", str(output), "--workload", "faulty_workloads:Faulty", "--cache-store", "none"),
        *("--settings", "scope=eager", "scope=full,dynamic=mark,pad_multiple=16", "scope=full,dynamic=mark,pad_multiple=8"),
        *("--constraint", "samples_per_s>=1000000", "--constraint", "compile_s<=45"),
    )
    eager, slow, endless = records_of(output)
    assert eager["label"] is None, eager  # eager ones are not stopped
    assert eager["samples_per_s"] > 0

    assert (slow["status"], slow["label"]) == ("stopped", "dominated"), slow
    assert slow["phase"] in ("steady", "checking")  # a window of this size may end before the request arrives
    assert "stopped after the first timed pass: it cannot keep samples_per_s>=1e+06 any more" in slow["reason"]
    assert 0 < slow["bounds"]["samples_per_s"] < 1e6
    assert slow["bounds"]["compile_s"] > 0
    assert slow["samples_per_s"] is None

    assert (endless["status"], endless["label"], endless["phase"]) == ("stopped", "dominated", "warming-up"), endless
    assert "it cannot keep compile_s<=45 any more" in endless["reason"]
    assert 45 < endless["bounds"]["compile_s"] < endless["bounds"]["warmup_s"] < endless["wall_s"] < 120
    log = output / "logs" / endless["trial_id"] / "worker-0.log"
    assert "it cannot keep compile_s<=45 any more" in log.read_text()

    assert "2 stopped" in printed
    assert "no setting meets the constraint samples_per_s>=1e+06" in printed or "there is no front" in printed
    assert still_running(output) == []
    assert list(analysis.load(output)["status"])[1:] == ["stopped", "stopped"]
    assert (output / "report.html").exists()
