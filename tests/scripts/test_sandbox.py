"""A trial reads a person's folder and writes to its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_sweep.script import sandbox
from compile_sweep.script.job import ScriptJob


@pytest.fixture
def person(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / "project"
    (folder / "out").mkdir(parents=True)
    (tmp_path / "code" / "data").mkdir()
    (tmp_path / "code" / "data" / "x.txt").write_text("data")
    (folder / "train.py").write_text("print()")
    (folder / "out" / "log.txt").write_text("before")
    (folder / "large.bin").write_bytes(bytes(sandbox.COPIED_BYTES + 1))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_written_stays_with_the_trial(person: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, base = contents(person), tmp_path / "trial"
    base.mkdir()
    place = sandbox.prepare(ScriptJob.of("train.py", folder=str(person)), base)
    monkeypatch.chdir(place.folder)
    with sandbox.keeping_writes(base):
        assert Path("../data/x.txt").read_text() == "data"
        assert os.path.getsize("large.bin") == sandbox.COPIED_BYTES + 1
        with open("out/log.txt", "a") as log:
            log.write(" after")
        with open("large.bin", "r+b") as large:
            large.write(b"changed")
        torch.save({"a": 1}, "large.bin")
        os.makedirs("../data/new")
        Path("../data/x.txt").write_text("other")
        Path("made.txt").write_text("made")
    assert Path("out/log.txt").read_text() == "before after"
    assert torch.load("large.bin") == {"a": 1}
    assert contents(person) == before
    assert contents(person.parent / "data") == {"x.txt": b"data"}
    assert place.environment["WANDB_MODE"] == "offline"


def test_levels_above_are_read_and_what_is_written_there_stays_with_the_trial(
    person: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, base = person / "examples" / "basics", tmp_path / "trial"
    deep.mkdir(parents=True)
    (deep / "train.py").write_text("print()")
    before = contents(tmp_path)
    place = sandbox.prepare(ScriptJob.of("train.py", folder=str(deep)), base)
    monkeypatch.chdir(place.folder)
    with sandbox.keeping_writes(base):
        assert [Path(up, "x.txt").read_text() for up in ("../../../data", "../../../../code/data")] == ["data", "data"]
        Path("../../out/log.txt").write_text("other")
        Path("../../../../made.txt").write_text("made")
    assert Path("../../out/log.txt").read_text() == "other"
    assert {name: text for name, text in contents(tmp_path).items() if not name.startswith("trial/")} == before


def test_a_script_elsewhere_has_its_own_folder_beside_it(person: Path, tmp_path: Path) -> None:
    elsewhere, base = tmp_path / "run", tmp_path / "trial"
    elsewhere.mkdir()
    base.mkdir()
    place = sandbox.prepare(ScriptJob.of(str(person / "train.py"), folder=str(elsewhere)), base)
    assert Path(place.script).resolve().is_relative_to(base)
    assert (Path(place.script).parent / "out" / "log.txt").read_text() == "before"


def test_a_script_elsewhere_reads_what_lies_above_its_own_folder_and_writes_nothing_there(person: Path, tmp_path: Path) -> None:
    elsewhere, base, deep = tmp_path / "run", tmp_path / "trial", person / "examples" / "basics"
    deep.mkdir(parents=True)
    (deep / "train.py").write_text("print()")
    elsewhere.mkdir()
    before = contents(tmp_path)
    place = sandbox.prepare(ScriptJob.of(str(deep / "train.py"), folder=str(elsewhere)), base)
    root = Path(place.script).resolve().parent.parent.parent
    assert root.is_relative_to(base)
    with sandbox.keeping_writes(base):
        assert (root.parent / "data" / "x.txt").read_text() == (root.parents[1] / "code" / "data" / "x.txt").read_text() == "data"
        (root / "out" / "log.txt").write_text("other")
    assert (root / "out" / "log.txt").read_text() == "other"
    assert {name: text for name, text in contents(tmp_path).items() if not name.startswith("trial/")} == before


@pytest.mark.slow
def test_mlflow_logs_to_a_folder_of_the_trial(person: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    base, before = tmp_path / "trial", contents(person)
    place = sandbox.prepare(ScriptJob.of("train.py", folder=str(person)), base)
    logs = "import mlflow; mlflow.set_experiment('mine'); mlflow.start_run(); mlflow.log_metric('loss', 0.5); mlflow.end_run()"
    subprocess.run([sys.executable, "-c", logs], check=True, cwd=place.folder, env={**os.environ, **place.environment})
    assert [path.read_text().split()[1] for path in (base / "mlruns").rglob("metrics/loss")] == ["0.5"]
    assert contents(person) == before


@pytest.mark.parametrize("scratch", ["tmp/compile-sweep-001-a/script-0/files", "tmp/files"])
def test_a_folder_for_temporary_files_within_the_persons_is_not_recreated_in_itself(person: Path, scratch: str) -> None:
    (person / "tmp" / "compile-sweep-000-b").mkdir(parents=True)
    (person / "tmp" / "mine").mkdir()
    base = person / scratch
    place = sandbox.prepare(ScriptJob.of("train.py", folder=str(person)), base)
    assert Path(place.script).is_file()
    assert [path.name for path in (Path(place.folder) / "tmp").iterdir()] == ["mine"]


def test_in_place_is_the_folder_itself(person: Path, tmp_path: Path) -> None:
    place = sandbox.prepare(ScriptJob.of("train.py", folder=str(person), in_place=True), tmp_path)
    assert (place.script, place.folder) == (str(person / "train.py"), str(person))


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta"])
def test_an_environment_of_packages_is_one_link_whatever_its_folder_is_called(person: Path, tmp_path: Path, mark: str) -> None:
    (person / "env-3.11" / "lib" / "package").mkdir(parents=True)
    (person / "env-3.11" / mark).mkdir() if mark == "conda-meta" else (person / "env-3.11" / mark).write_text("home = /usr/bin")
    base = tmp_path / "trial"
    base.mkdir()
    place = Path(sandbox.prepare(ScriptJob.of("train.py", folder=str(person)), base).folder)
    assert (place / "env-3.11").is_symlink()
    assert (place / "env-3.11" / "lib" / "package").is_dir()
    assert not (place / "out").is_symlink()
