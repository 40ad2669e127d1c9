"""A whole trial of a script, in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_sweep.schema.phases import Phase
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.trial import RunFailed, ScriptTrial
from tests.scripts.conftest import SHORT

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_a_trial_measures_judges_and_leaves_the_persons_folder_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    phases: list[Phase] = []
    trial = ScriptTrial(
        job=ScriptJob.of("plain_loop.py", ["--width", "32"], folder=str(folder)),
        settings=CompileSettings.parse("scope=full,dynamic=auto,backend=aot_eager"),
        base=tmp_path / "trial",
        references=tmp_path / "references",
        protocol=SHORT,
        environment=ENVIRONMENT,
        on_phase=phases.append,
    )
    trial.base.mkdir()
    found = trial.run()
    assert found["numerics"]["status"] == "ok"
    assert found["pipeline"] == "script"
    assert found["findings"][0].startswith("module model: Net")
    assert phases == [Phase.BUILDING, Phase.WARMING_UP, Phase.STEADY, Phase.CHECKING, Phase.DONE]
    assert sorted(path.name for path in trial.references.iterdir()) == ["again-0", "eager-0", "lock", "perturbed-0"]
    assert list(trial.base.iterdir()) == []
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_script_that_fails_says_why(folder: Path, tmp_path: Path) -> None:
    trial = ScriptTrial(
        job=ScriptJob.of("plain_loop.py", ["--wrong"], folder=str(folder)),
        settings=CompileSettings(scope="eager"),  # type: ignore[arg-type]
        base=tmp_path,
        references=tmp_path / "references",
        environment=ENVIRONMENT,
    )
    with pytest.raises(RunFailed, match="exit code 2 after 0 steps"):
        trial.run()
