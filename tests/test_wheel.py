"""A wheel in an environment of its own: reading needs neither torch nor Ray, and a command that measures names its extra."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from orchestrator import cli

SWEEP = "docs/results/h100-resnet"

WITHOUT = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing}:
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Missing())
from orchestrator.cli import main
sys.exit(main(sys.argv[1:]))
"""


def names_of(extra: str, repository: Path) -> set[str]:
    """Returns the distributions of an extra or, for an empty name, the required ones."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return {Requirement(line).name for line in lines}


def test_what_is_always_installed_is_neither_torch_nor_ray_nor_a_model_library(repository: Path) -> None:
    assert not names_of("", repository) & names_of("run", repository)
    assert {"torch", "ray", "transformers"} <= names_of("run", repository)
    assert "compile-sweep" in names_of("dev", repository)


@pytest.mark.slow
def test_reading_a_sweep_imports_nothing_of_what_measuring_needs(repository: Path, tmp_path: Path) -> None:
    missing = ["torch", "ray", "transformers", "rich", "optuna", "pynvml", "triton"]
    code = WITHOUT.format(missing=missing)
    sweep = shutil.copytree(repository / SWEEP, tmp_path / "sweep")
    for words in (["report", str(sweep)], ["recommend", str(sweep)], ["table", str(sweep)]):
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=repository, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert (sweep / "report.html").stat().st_size > 100_000


@pytest.mark.parametrize("name", [*cli.NEEDS])
def test_a_command_that_measures_names_the_extra_it_needs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda module: None)
    assert cli.main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: compile-sweep {name} needs torch")
    assert "pip install 'compile-sweep[run]'" in error
    assert error.count("\n") == 1


MODULE_WITHOUT_EXTRA = """
import runpy, sys

sys.modules.update(dict.fromkeys(("torch", "ray", "rich", "pynvml")))  # None: as if they were not there
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "check", "cache"])
def test_a_module_that_measures_names_the_extra_it_needs(name: str, repository: Path) -> None:
    words = [sys.executable, "-c", MODULE_WITHOUT_EXTRA, f"orchestrator.{name}", "--list"]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: python -m orchestrator.{name} needs torch, ray, rich, pynvml, which are not installed")
    assert done.stderr.count("\n") == 1


@pytest.mark.nightly("installs pandas, plotly and others into a fresh environment")
def test_an_installed_wheel_reads_a_sweep_and_says_what_a_sweep_needs(repository: Path, tmp_path: Path) -> None:
    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(word) for word in words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )

    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, repository)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    commands = tmp_path / "venv" / "bin"
    installed = run(commands / "pip", "install", "-q", "-c", repository / "constraints.txt", wheel)
    if "No matching distribution" in installed.stderr:
        pytest.skip("no package index")
    assert installed.returncode == 0, installed.stderr
    listed = {package["name"].lower() for package in json.loads(run(commands / "pip", "list", "--format", "json").stdout)}
    assert not listed & {"torch", "ray", "transformers", "triton"}

    sweep = shutil.copytree(repository / SWEEP, tmp_path / "sweep")
    reported = run(commands / "compile-sweep", "report", sweep)
    assert (reported.returncode, reported.stderr) == (0, "")
    assert run(commands / "python", "-c", "import analysis").returncode == 0
    swept = run(commands / "compile-sweep", "sweep")
    assert swept.returncode == 2
    assert "pip install 'compile-sweep[run]'" in swept.stderr
    assert swept.stderr.count("\n") == 1


def test_the_citation_names_the_version(repository: Path) -> None:
    from compile_sweep import __version__

    assert f"version: {__version__}\n" in (repository / "CITATION.cff").read_text(encoding="utf-8")
