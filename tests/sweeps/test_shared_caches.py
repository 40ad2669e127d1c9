"""Whole sweeps that share compiled code: cold ones publish it, shared ones restore it, auto ones repeat the front cold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from samples import REPOSITORY, TESTS

import analysis
from tests.sweeps.conftest import SweepHere

pytestmark = pytest.mark.slow

SETTINGS = ("--workload", "toy_workloads:Paying", "--settings", "scope=eager", "scope=full")
KEY = ("COMPILE_SWEEP_CACHE_KEY", "ab" * 32)

Sweep = Callable[..., str]
"""Runs a sweep into the folder that `--output` names; returns its output."""


def sweep(runner: str, *words: str) -> str:
    """Runs a sweep as a person would; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.sweep", "--runner", runner, *words],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **dict([KEY])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records_of(output: Path, log: str = "trials.jsonl") -> list[dict[str, Any]]:
    path = output / log
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def front(output: Path) -> list[str]:
    return list(analysis.expected_front(analysis.load(output))["settings_key"])


def test_what_a_cold_sweep_compiled_serves_shared_ones_and_no_cold_figure(
    tmp_path: Path, sweep_here: SweepHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*KEY)
    cold_and_shared(tmp_path, sweep_here)


@pytest.mark.nightly("compares compile times, and continues two sweeps with a third; test_stages.py covers what is repeated cold")
@pytest.mark.parametrize("runner", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_what_was_measured_warm_is_quick_and_measured_again_cold_if_it_is_on_the_front(runner: str, tmp_path: Path) -> None:
    full, warm, start = cold_and_shared(tmp_path, partial(sweep, runner))
    assert start["first_step_s"] < 0.7 * full["first_step_s"]
    assert warm["compile_s"] < 0.7 * full["compile_s"]
    assert warm["cold_equivalent_s"] == pytest.approx(full["compile_s"], rel=0.5)
    shared = str(tmp_path / "shared")
    printed = sweep(runner, "--starts", "auto", "--resume", "--output", shared)
    _, _, cold = records_of(tmp_path / "shared")
    assert (cold["status"], cold["caches"], cold["settings_key"]) == ("ok", "cold", full["settings_key"])
    assert cold["compile_s"] > warm["compile_s"]
    assert cold["cache_hits"] == 0
    assert "measuring 1 member of the front again, cold" in printed
    frame = analysis.load(tmp_path / "shared")
    assert list(analysis.pareto_front(frame)["settings_key"]) == front(tmp_path / "cold")
    best = analysis.summary(frame).best
    assert best is not None
    assert best["compile_s"] == pytest.approx(cold["compile_s"])
    (start,) = records_of(tmp_path / "shared", "warm_starts.jsonl")  # the postponed one
    assert (start["status"], start["settings_key"]) == ("ok", full["settings_key"])
    assert "warm start: full, default, static" in printed

    sweep(runner, "--starts", "auto", "--resume", "--output", shared)
    assert len(records_of(tmp_path / "shared")) == 3  # nothing is left
    assert records_of(tmp_path / "shared", "warm_starts.jsonl") == [start]


def cold_and_shared(tmp_path: Path, sweep: Sweep) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Runs sweeps into `cold`, then into `shared`; returns the compiled setting's record of each, and of its warm start."""
    printed = sweep("--output", str(tmp_path / "cold"), *SETTINGS)
    eager, full = records_of(tmp_path / "cold")
    assert [(r["status"], r["caches"]) for r in (eager, full)] == [("ok", "cold")] * 2, (eager, full)
    assert (eager["cache_made"], eager["cache_misses"]) == (None, None)
    assert full["cache_made"] > 0
    assert full["cache_made_bytes"] == full["cache_new_bytes"] > 0
    assert full["cache_misses"] > 0
    assert (full["restore_s"], full["cold_equivalent_s"]) == (None, None)
    assert list((tmp_path / "cache" / "manifests").iterdir())
    (start,) = records_of(tmp_path / "cold", "warm_starts.jsonl")
    assert (start["status"], start["settings_key"]) == ("ok", full["settings_key"]), start
    assert start["cache_hits"] > 0
    assert start["warm_start_s"] == pytest.approx(start["restore_s"] + start["load_s"] + start["warmup_s"])
    assert start["warmup_steps"] == full["warmup_steps"]
    assert "starting 1 member of the front in a fresh process each, from its own artifacts: full, default" in printed
    assert "warm start: full, default, static" in printed

    printed = sweep("--output", str(tmp_path / "shared"), *SETTINGS, "--starts", "shared", "--no-warm-start")
    eager, warm = records_of(tmp_path / "shared")
    assert [(r["status"], r["caches"]) for r in (eager, warm)] == [("ok", "cold"), ("ok", "warm")], (eager, warm)
    assert warm["cache_restored"] == full["cache_made"]
    assert warm["cache_refused"] == 0
    assert warm["cache_hits"] > 0
    assert warm["cold_equivalent_s"] == pytest.approx(warm["compile_s"] + warm["cache_saved_s"])
    assert warm["cache_new_bytes"] < full["cache_new_bytes"]
    assert records_of(tmp_path / "shared", "warm_starts.jsonl") == []
    assert "warm compile" in printed
    assert "≈" in printed
    assert front(tmp_path / "shared") == front(tmp_path / "cold") == [eager["settings_key"], full["settings_key"]]
    known = analysis.pareto_front(analysis.load(tmp_path / "shared"))
    assert list(known["settings_key"]) == [eager["settings_key"]]  # an estimate is not a cold figure
    return full, warm, start
