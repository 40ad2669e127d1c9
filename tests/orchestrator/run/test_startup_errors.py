"""A worker that dies before its first line: the record's reason quotes Ray's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile_sweep.schema.outcome import Death, Label, judge_death, judge_trial_death
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run.train_errors import last_error

LOG = """\
[2026-11-25 14:53:56] (raylet) Started.
Traceback (most recent call last):
  File "worker.py", line 1, in <module>
    import first
ModuleNotFoundError: No module named 'first'
Traceback (most recent call last):
  File "worker.py", line 2, in <module>
    import second
ModuleNotFoundError: No module named 'second'
[2026-11-25 14:53:58] (raylet) A worker ended.
"""

BREAKS = f"""
import os, sys
if {ATTEMPT_MARKER!r} in os.environ and "default_worker" in " ".join(sys.orig_argv):
    raise SystemExit("there is no module called broken")
"""


def test_the_error_of_the_last_traceback_counts(tmp_path: Path) -> None:
    log = tmp_path / "raylet.err"
    log.write_text(LOG)
    assert last_error(log, time.time() - 60) == "ModuleNotFoundError: No module named 'second'"
    os.utime(log, (0, 0))
    assert last_error(log, time.time() - 60) == ""
    log.write_text("no traceback at all\n")
    assert last_error(log, 0) == ""
    assert last_error(tmp_path / "nowhere", 0) == ""


def test_reasons_end_with_it() -> None:
    said = "; a worker died before its first line: ModuleNotFoundError: No module named 'second'"
    error = "ModuleNotFoundError: No module named 'second'"
    facts = {"phase": "starting", "in_phase_s": 1.0, "compile_deadline_s": 5.0, "trial_deadline_s": 9.0, "startup_error": error}
    died, late = (
        judge_death(Death(elapsed_s=elapsed_s, has_started=False, **facts))  # type: ignore[arg-type]
        for elapsed_s in (2.0, 10.0)
    )
    killed = judge_trial_death(10.0, 9.0, "", error, has_started=False)
    assert (died.label, late.label, killed.label) == (Label.WORKER_DIED, Label.NOT_STARTED, Label.NOT_STARTED)
    for verdict in (died, late, killed):
        assert str(verdict.reason).endswith(said)


@pytest.mark.slow
@pytest.mark.nightly("waits for a trial's deadline")
def test_a_sweep_whose_workers_fail_at_an_import_says_so(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    path = os.pathsep.join((str(tmp_path), str(repository), str(repository / "tests")))
    words = [
        "--workload",
        "toy_workloads:Toy",
        "--settings",
        "scope=eager",
        "--cache-store",
        "none",
        "--compile-deadline-s",
        "15",
    ]
    words += ["--trial-deadline-s", "20", "--no-warm-start", "--no-confirm", "--output", "swept"]
    subprocess.run(
        [sys.executable, "-m", "orchestrator.sweep", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        timeout=400,
        capture_output=True,
        check=False,
    )
    (line,) = (tmp_path / "swept" / "trials.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"].endswith(
        "a worker died before its first line: SystemExit: there is no module called broken"
    )
