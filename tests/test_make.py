"""The sentences of `make` when something is missing: one sentence that says what, and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


class Machine:
    """A machine with only the given commands."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.repository = repository
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.venv = folder / "venv"
        for name in ("make", "sh"):
            (self.bin / name).symlink_to(shutil.which(name) or name)

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def add_python(self, name: str = "python3", *, without: str = "\n") -> None:
        """Adds this interpreter, for which code that mentions `without` fails."""
        self.add(name, f'case "$2" in *"{without}"*) exit 1;; esac; exec {sys.executable} "$@"')

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/")}
        return subprocess.run(
            ["make", "--no-print-directory", f"VENV={self.venv}", *arguments],
            cwd=self.repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def machine(repository: Path, tmp_path: Path) -> Machine:
    return Machine(repository, tmp_path)


def only_sentence(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 2
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sweep", "test", "lint", "install"])
def test_without_a_compiler_nothing_is_made(machine: Machine, target: str) -> None:
    machine.add_python()
    sentence = only_sentence(machine.make(target))
    assert "needs the C++ compiler g++" in sentence
    assert "apt-get install g++" in sentence
    assert not machine.venv.exists()


def test_without_python_it_says_where_to_get_one(machine: Machine) -> None:
    machine.add("g++", "true")
    assert "needs Python 3.11 to 3.13" in only_sentence(machine.make("sweep"))


def test_a_python_that_is_too_new_is_named(machine: Machine) -> None:
    machine.add("g++", "true")
    machine.add("python3.14", "exit 1")
    sentence = only_sentence(machine.make("sweep", "PYTHON=python3.14"))
    assert "which python3.14 is not" in sentence
    assert "PYTHON=python3.12" in sentence


def test_another_python_is_taken_where_python3_will_not_do(machine: Machine) -> None:
    machine.add("g++", "true")
    machine.add("python3", "exit 1")
    machine.add_python("python3.12")
    run = machine.make("check")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("mention", "lacks", "package"),
    [("ensurepip", "Python's venv module", "-venv"), ("Python.h", "Python's header files", "-dev")],
)
def test_a_half_of_python_that_debian_keeps_apart_is_named(machine: Machine, mention: str, lacks: str, package: str) -> None:
    machine.add("g++", "true")
    machine.add_python(without=mention)
    sentence = only_sentence(machine.make("sweep"))
    assert lacks in sentence
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}{package}" in sentence


def test_all_that_is_missing_stands_in_one_sentence(machine: Machine) -> None:
    machine.add_python(without="ensurepip")
    sentence = only_sentence(machine.make("sweep"))
    assert "Python's venv module and the C++ compiler g++" in sentence


def test_another_compiler_will_do(machine: Machine) -> None:
    machine.add_python()
    machine.add("my-c++", "true")
    assert machine.make("check", "CXX=my-c++").returncode == 0


def test_another_torch_has_an_environment_of_its_own_with_every_other_pin(machine: Machine) -> None:
    machine.add("g++", "true")
    for name in ("sed", "touch"):
        (machine.bin / name).symlink_to(shutil.which(name) or name)
    (machine.venv / "bin").mkdir(parents=True)
    python = machine.venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in pip) exit 0;; esac; exec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    run = machine.make(str(machine.venv / ".torch"), "TORCH=9.8.7")
    assert (run.returncode, run.stderr) == (0, "")
    pins = (machine.venv / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [pin for pin in pins if pin.startswith(("torch==", "triton==", "nvidia-cu", "cuda-"))] == ["torch==9.8.7"]
    kept = (machine.repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert len(kept) - 30 < len(pins) < len(kept)
    assert any(pin.startswith("torchmetrics==") for pin in pins)
