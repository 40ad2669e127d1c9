"""What a workload's name stands for, and what is said of one that stands for nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from compile_sweep.contract.workload_names import find_workload, import_named
from compile_sweep.schema.errors import WorkloadError

CASE = "from {}side_file import SIZE\n\n\nclass Case:\n    size = SIZE\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "side_file.py").write_text("SIZE = 7\n")
    (tmp_path / "cases" / "own_case.py").write_text(CASE.format(""))
    package = tmp_path / "lib" / "of_cases" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "side_file.py").write_text("SIZE = 8\n")
    (package / "packed_case.py").write_text(CASE.format("."))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "module", "size"),
    [
        ("cases/own_case.py:Case", "own_case", 7),
        ("./cases/own_case.py:Case", "own_case", 7),
        ("lib/of_cases/inner/packed_case.py:Case", "of_cases.inner.packed_case", 8),
    ],
)
def test_a_file_is_imported_as_its_own_imports_need(here: Path, name: str, module: str, size: int) -> None:
    assert find_workload(name) == (module, "Case")
    assert import_named(name).size == size
    assert import_named(f"{here / name.partition(':')[0]}:Case").size == size
    for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] in ("own_case", "side_file", "of_cases")]:
        del sys.modules[loaded]


def test_a_worker_finds_a_relative_path_from_the_users_folder(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("worker"))
    sys.path.insert(0, str(here))
    assert find_workload("cases/own_case.py:Case") == ("own_case", "Case")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("cases/own_case.py", "add the class in that file: cases/own_case.py:Class"),
        ("cases/own_case.py", "name a training script by its option, --script cases/own_case.py; for a workload, add"),
        ("cases/workload_case.py", "called 'cases/workload_case.py'; add the class in that file: cases/workload_case.py:Class"),
        ("cases/model_case.py", "called 'cases/model_case.py'; add the class in that file: cases/model_case.py:Class"),
        ("cases/none.py:Case", "there is no file {here}/cases/none.py"),
        ("cases/own case.py:Case", "own case:Case is no name that Python imports"),
        ("cases/own_case.py:Ca se", "own_case:Ca se is no name that Python imports"),
        ("own-case:Case", "write package.module:Class or path/to/file.py:Class"),
        ("own_case", "or package.module:Class or path/to/file.py:Class"),
    ],
)
def test_a_name_that_stands_for_nothing_is_told_what_would(here: Path, name: str, complaint: str) -> None:
    (here / "cases" / "own case.py").touch()
    (here / "cases" / "workload_case.py").write_text("class Case(compile_sweep.ModelWorkload):\n    pass\n")
    (here / "cases" / "model_case.py").write_text("Case = WorkloadFromModel(Net, batch, loss)\n")
    with pytest.raises(WorkloadError) as refused:
        find_workload(name)
    assert complaint.format(here=here) in str(refused.value)
    assert "\n" not in str(refused.value)
