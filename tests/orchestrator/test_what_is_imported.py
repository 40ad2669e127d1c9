"""Only user code named on the command line is imported: not other files of the folder, nor what records name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.run import sweep_folder

MARKS = "open({mark!r}, 'a').write(__name__ + ' ')\n"
NAMES = ("captioning", "gpt2", "plotly", "pyarrow", "redis", "optuna", "boto3", "sitecustomize_", "mine", "unasked")
EAGER = CompileSettings.parse("scope=eager")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of modules that report when they are imported, some with names that the project may import."""
    made = tmp_path / "here"
    made.mkdir()
    for name in NAMES:
        (made / f"{name}.py").write_text(MARKS.format(mark=str(tmp_path / "marks")))
    (made / "mine.py").write_text((made / "mine.py").read_text() + "from toy_workloads import Toy as Mine\n")
    return made


def imported(here: Path, program: str, repository: Path) -> list[str]:
    """Returns the planted modules that a program imported, run in their folder like an installed command."""
    path = os.pathsep.join((str(repository), str(repository / "tests")))
    subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=here,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
        check=True,
        capture_output=True,
    )
    marks = here.parent / "marks"
    return marks.read_text().split() if marks.exists() else []


@pytest.mark.slow
def test_a_plan_and_a_check_of_a_built_in_workload_import_nothing_of_the_folder(here: Path, repository: Path) -> None:
    program = (
        "import os, sys; from orchestrator.sweep import main as sweep; from orchestrator.check import main as check; "
        "assert sweep(['--dry-run', '--size', 'tiny']) == 0; assert check(['captioning', '--size', 'x']) == 2; "
        "assert os.getcwd() not in sys.path"
    )
    assert imported(here, program, repository) == []


@pytest.mark.slow
def test_a_workload_of_ones_own_imports_its_module_and_no_other(here: Path, repository: Path) -> None:
    program = "from orchestrator.sweep import main; assert main(['--dry-run', '--workload', 'mine:Mine']) == 0"
    assert imported(here, program, repository) == ["mine"]


@pytest.mark.slow
def test_reading_a_folder_imports_nothing_that_it_names(here: Path, repository: Path) -> None:
    config = SweepConfig(recipe="given", workload="mine:Mine", size="only", settings=(EAGER,))
    sweep_folder.begin(here / "sweep", config, fingerprint(), None)
    record = TrialRecord(trial_id="1", settings=EAGER.to_dict(), settings_key=EAGER.key, status=Status.OK, workload="mine:Mine",
                         source="import unasked", samples_per_s=5.0, environment_key=fingerprint().key)  # fmt: skip
    append(here / "sweep", record)
    program = (
        "from analysis import compare, recommend, report, table; "
        "assert report.main(['sweep']) == 0; assert compare.main(['sweep', 'sweep']) in (0, 1); recommend.main(['sweep']); "
        "from orchestrator.sweep import main; assert main(['--dry-run', '--workload', 'toy_workloads:Toy', '--output', 'new', "
        "'--searcher', 'gain', '--learn-from', 'sweep', '--learn-anyway']) == 0"
    )
    assert imported(here, program, repository) == []
