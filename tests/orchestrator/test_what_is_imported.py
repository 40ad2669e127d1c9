"""Only user code named on the command line is imported: not other files of the folder, nor what records name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
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


def imported(here: Path, programs: Sequence[str], repository: Path) -> list[list[str]]:
    """Returns the planted modules that each program imported, all run one after the other in one process.

    The process runs in their folder like an installed command.
    """
    marks = here.parent / "marks"
    counted = f"; print('imported', *(open({str(marks)!r}).read().split() if os.path.exists({str(marks)!r}) else []))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(["import os, sys", *(program + counted for program in programs)])],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(repository), str(repository / "tests")))},
        timeout=300,
        check=True,
        capture_output=True,
        text=True,
    )
    return [line.split()[1:] for line in done.stdout.splitlines() if line.split()[:1] == ["imported"]]


@pytest.mark.slow
def test_a_plan_a_check_and_reading_a_folder_import_nothing_of_the_folder_but_a_workload_of_ones_own(
    here: Path, repository: Path
) -> None:
    config = SweepConfig(recipe="given", workload="unasked:Mine", size="only", settings=(EAGER,))
    sweep_folder.begin(here / "sweep", config, fingerprint(), None)
    settings = {"settings": EAGER.to_dict(), "settings_key": EAGER.key, "workload": config.workload, "source": "import unasked"}
    record = TrialRecord(trial_id="1", status=Status.OK, samples_per_s=5.0, environment_key=fingerprint().key, **settings)
    append(here / "sweep", record)
    reads_a_folder = (
        "from analysis import compare, recommend, report, table; "
        "assert report.main(['sweep']) == 0; assert compare.main(['sweep', 'sweep']) in (0, 1); recommend.main(['sweep'])"
    )
    plans_and_checks = (
        "from orchestrator.sweep import main as sweep; from orchestrator.check import main as check; "
        "assert sweep(['--dry-run', '--size', 'tiny']) == 0; assert check(['captioning', '--seed', '-1']) == 2; "
        "assert os.getcwd() not in sys.path"
    )
    plans_ones_own = (
        "assert sweep(['--dry-run', '--workload', 'mine:Mine', '--output', 'new', '--searcher', 'gain', '--learn-from', 'sweep', "
        "'--learn-anyway']) == 0"
    )
    assert imported(here, (reads_a_folder, plans_and_checks, plans_ones_own), repository) == [[], [], ["mine"]]
