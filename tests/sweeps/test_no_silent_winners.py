"""Invalid fast results stay off the front with a label, and noisy ones count at their worst, in real sweeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from samples import REPOSITORY, TESTS

import analysis
from tests.sweeps.conftest import SweepHere

pytestmark = pytest.mark.slow

SOUND = "scope=eager,padding=max"
JUMPS = "scope=eager,padding=longest,pad_multiple=16"
FAULTS = {
    "diverges": "scope=full,dynamic=mark,pad_multiple=2,backend=aot_eager",
    "recompile-limit": "scope=full,dynamic=mark,pad_multiple=4,backend=aot_eager,recompile_limit=2",
    "silent-fallback": "scope=full,dynamic=mark,pad_multiple=8,backend=toy_refuses",
}
"""The label of each fault, and the setting for which `faulty_workloads:Deceptive` has it."""


def records_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]


def front_of(output: Path) -> set[str]:
    """Returns settings keys on the front of the sweep's folder."""
    return set(analysis.pareto_front(analysis.load(output))["settings_key"])


def test_wrong_numbers_a_recompile_limit_and_a_silent_fallback_are_no_winners_and_what_jumps_counts_at_its_worst(
    tmp_path: Path, sweep_here: SweepHere
) -> None:
    output = tmp_path / "sweep"
    words = ("--workload", "faulty_workloads:Deceptive", "--cache-store", "none", "--settings", SOUND, JUMPS, *FAULTS.values())
    sweep_here("--output", str(output), *words)
    records = records_of(output)
    sound, jumps, *faulty = records
    by_label = {record["label"]: record for record in faulty}
    assert set(by_label) == set(FAULTS), [(record["settings_key"], record["label"], record["reason"]) for record in records]
    for label, record in by_label.items():
        assert record["settings_key"].startswith(FAULTS[label].split(",")[0])
        assert record["samples_per_s"] > 0  # it was measured: only the label keeps it from winning
        assert record["status"] == "infeasible"
    assert "hit recompile_limit" in by_label["recompile-limit"]["reason"]
    assert "this back-end compiles nothing" in by_label["silent-fallback"]["reason"]
    assert "toy_workloads.py:" in by_label["silent-fallback"]["fallbacks"][0]
    assert sound["status"] == jumps["status"] == "ok"
    assert jumps["stable"] is False
    front = front_of(output)
    assert front <= {sound["settings_key"], jumps["settings_key"]}
    least = [one["samples_per_s_ci95"][0] if one["stable"] is False else one["samples_per_s"] for one in (sound, jumps)]
    ahead = least[1] > least[0] or jumps["compile_s"] < sound["compile_s"]
    assert (jumps["settings_key"] in front) is ahead


@pytest.mark.nightly("runs a whole sweep; test_pipeline.py measures the wait, and test_labels.py labels it")
def test_a_figure_that_is_the_input_pipelines_is_no_winner(tmp_path: Path, sweep_here: SweepHere) -> None:
    output = tmp_path / "sweep"
    words = ("--workload", "faulty_workloads:Deceptive", "--pipeline", "real", "--settings", SOUND)
    sweep_here("--output", str(output), *words)
    (record,) = records_of(output)
    assert (record["status"], record["label"]) == ("infeasible", "input-bound"), record["reason"]
    assert record["data_wait_share"] > 0.05
    assert record["samples_per_s"] > 0
    assert front_of(output) == set()


@pytest.mark.ray
@pytest.mark.gpu
def test_cuda_graphs_that_were_claimed_and_skipped_are_no_winner(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    settings = ("scope=full,mode=default", "scope=full,mode=reduce-overhead")
    words = (
        "--output",
        str(output),
        "--device",
        "cuda",
        "--workload",
        "faulty_workloads:CountsItsSteps",
        "--settings",
        *settings,
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    command = [sys.executable, "-m", "orchestrator.sweep", "--runner", "ray", *words]
    subprocess.run(command, cwd=TESTS, env=environment, timeout=400, check=True)
    latest = {
        record["settings"]["mode"]: record for record in records_of(output)
    }  # a noisy one is measured again if there are several GPUs
    plain, graphed = latest["default"], latest["reduce-overhead"]
    # Without CUDA graphs it is valid; its message says what earlier tests left on the GPU.
    assert plain["label"] in (None, "gpu-shared")
    assert (graphed["status"], graphed["label"]) == ("infeasible", "cudagraphs-skipped"), graphed["reason"]
    assert "mutated inputs" in graphed["reason"]
    assert graphed["cudagraph_skips"] > 0
    assert graphed["samples_per_s"] > 0
    assert graphed["settings_key"] not in front_of(output)
