"""One of two workers fails in a real sweep: the record says what happened to it, not what that did to the other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = Path(__file__).resolve().parent


@pytest.mark.nightly("a sweep of four trials with two workers each; test_faults_of_trials.py kills single workers")
def test_a_trial_is_labelled_by_the_worker_that_failed_and_others_go_on(tmp_path: Path) -> None:
    settings = [f"scope=eager,padding=longest,pad_multiple={multiple}" for multiple in (4, 8, 2, 16)]
    output = tmp_path / "sweep"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "orchestrator.sweep",
            "--output",
            str(output),
            "--workload",
            "faulty_peers:FaultyPeers",
            "--workers-per-trial",
            "2",
            "--no-warm-start",
            "--cache-store",
            "none",
            "--settings",
            *settings,
        ],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])},
        text=True,
        capture_output=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = {r["settings"]["pad_multiple"]: r for r in map(json.loads, (output / "trials.jsonl").read_text().splitlines())}
    raised, full, killed, sound = (records[multiple] for multiple in (4, 8, 2, 16))
    assert (raised["status"], raised["label"]) == ("failed", "exception"), raised["reason"]
    assert "worker 1 does not like multiples of 4" in raised["reason"]
    assert (full["status"], full["label"]) == ("infeasible", "out-of-memory"), full["reason"]
    assert killed["label"] == "worker-died", killed["reason"]
    assert {record["phase"] for record in (raised, full, killed)} == {"warming-up"}
    assert sound["phase"] == "done", sound["reason"]
    assert (sound["num_workers"], len(sound["compile_s_by_rank"]), len(sound["peak_memory_bytes_by_rank"])) == (2, 2, 2)
    assert sound["samples_per_s_per_worker"] == pytest.approx(sound["samples_per_s"] / 2)
