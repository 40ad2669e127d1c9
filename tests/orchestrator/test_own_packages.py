"""In a repository with packages called `analysis` or `workloads`, the sweep finds its own and a script finds the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from analysis import WIDTH

model = torch.nn.Linear(4, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    for package in ("analysis", "workloads", "utils"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("WIDTH = 3\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, repository: Path, *words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a module in a folder of the user's, where this project is installed rather than the current folder."""
    environment = os.environ | {"PYTHONPATH": str(repository), "NO_COLOR": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def test_a_plan_is_made_in_a_repository_with_an_analysis_of_its_own(theirs: Path, repository: Path) -> None:
    planned = run(theirs, repository, "orchestrator.sweep", "--script", "train.py", "--dry-run", timeout_s=120)
    assert planned.returncode == 0, planned.stderr
    assert "as the script has it" in planned.stdout


@pytest.mark.slow
@pytest.mark.ray
def test_a_script_is_swept_in_a_repository_with_packages_of_the_same_names(theirs: Path, repository: Path) -> None:
    settings = ["--settings", "scope=eager,as_written=on", "scope=full,dynamic=auto,backend=aot_eager"]
    words = ["--script", "train.py", "--no-warm-start", "--no-confirm", "--output", "swept", *settings]
    swept = run(theirs, repository, "orchestrator.sweep", *words, timeout_s=400)
    assert swept.returncode == 0, swept.stderr
    assert "trials: 2 ok" in swept.stdout
    assert (theirs / "swept" / "report.html").is_file()
