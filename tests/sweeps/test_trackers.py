"""A whole sweep that logs its trials to two trackers while it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import REPOSITORY, TESTS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    # SQLAlchemy of MLflow's SQLite store; can go when that no longer uses `noload`
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
]


@pytest.mark.nightly("a whole sweep that logs to two trackers; test_tracking.py logs the same records to real stores")
def test_trials_that_end_well_and_badly_reach_both_trackers_with_the_report(tmp_path: Path) -> None:
    output, store, events = tmp_path / "sweep", tmp_path / "store", tmp_path / "events"
    command = [sys.executable, "-m", "orchestrator.sweep", "--output", str(output)]
    command += ["--workload", "faulty_workloads:NanWhenCompiled"]
    places = ["--log-to", f"mlflow:{store}", f"tensorboard:{events}"]
    done = subprocess.run(
        [*command, "--settings", "scope=eager", "scope=full", "--cache-store", "none", *places],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
    eager, full = (json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines())
    assert (eager["status"], full["label"]) == ("ok", "nan")
    assert {path.name for path in (events / "sweep").iterdir()} == {eager["trial_id"], full["trial_id"]}

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{store / 'mlflow.db'}")
    runs = {run.data.tags["kind"] + run.data.tags.get("label", ""): run for run in client.search_runs(["1"])}
    assert runs.keys() == {"sweep", "trial", "trialnan"}
    assert runs["trial"].data.metrics["samples_per_s"] == pytest.approx(eager["samples_per_s"])
    assert runs["trialnan"].info.status == "FAILED"
    assert [one.path for one in client.list_artifacts(runs["sweep"].info.run_id)] == ["report.html"]
