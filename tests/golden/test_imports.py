"""Modules that each kind of process loads, ours and heavy third-party ones: shows what makes a start slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from golden import REPOSITORY, check
from loaded_modules import loaded

DRY_RUN = """
import contextlib, io
from orchestrator.sweep import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main([{words}, "--size", "tiny", "--dry-run"]) == 0
"""

PROCESSES = {
    "analysis": "import analysis",
    "report": "import analysis.report",
    "dry_run": DRY_RUN.format(words='"quickstart"'),
    "dry_run_without_transformers": DRY_RUN.format(words='"modes", "--workload", "layers"'),
    "trial": "import orchestrator.run.worker_group",
    "worker": "import orchestrator.run.worker",
    "local": "import orchestrator.run.local_runner",
}
"""First statements of each kind of process. `sweeps/` tests what a worker has loaded when it measures."""


@pytest.mark.parametrize("name", PROCESSES)
def test_what_a_process_loads(name: str) -> None:
    code = f"{PROCESSES[name]}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    check(f"imports/{name}.json", loaded(json.loads(run.stdout)))
