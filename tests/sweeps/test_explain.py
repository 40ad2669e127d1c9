"""`--explain` through the command line: the command runs in this process, and what it measures in a process of its own."""

from __future__ import annotations

import sys

import pytest
from samples import TESTS

from orchestrator.sweep import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _in_the_workloads_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(TESTS)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working folder


def explained(capsys: pytest.CaptureFixture[str], workload: str, spelled: str) -> tuple[int, str, str]:
    """Returns the command's exit code, output and errors."""
    code = main(["--workload", workload, "--explain", spelled])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def section(printed: str, title: str) -> list[str]:
    """Returns the lines below a heading."""
    lines = printed.splitlines()
    start = lines.index(title) + 1
    return lines[start : next((i for i in range(start, len(lines)) if not lines[i].startswith("  ")), len(lines))]


def test_a_setting_is_explained_in_words_a_person_can_act_on(capsys: pytest.CaptureFixture[str]) -> None:
    spelled = "scope=full,dynamic=auto,pad_multiple=4,backend=aot_eager"
    code, printed, complaint = explained(capsys, "faulty_workloads:BreaksItsGraph", spelled)
    assert code == 0, complaint
    assert section(printed, "verdict")[0].strip().startswith("ok")
    graphs = 2 + 1  # the part before the break for two lengths, and the part after it
    assert section(printed, "compiled") == [f"  {graphs} graphs of the model and its loss as one"]
    breaks = "\n".join(section(printed, "graph breaks"))
    assert "faulty_workloads.py:" in breaks
    assert "    code: torch._dynamo.graph_break()" in breaks
    assert "→ the code asks for this break: remove the call" in breaks
    recompiles = "\n".join(section(printed, "recompiles"))
    assert "→ the sequence length changed from 8 to 16 (dimension 1 of ids): dynamic=auto compiles" in recompiles
    assert section(printed, "recompile limits hit") == ["  none"]
    assert section(printed, "runs eagerly") == ["  none"]
    assert any("dynamo" in line for line in section(printed, "compile time"))
    assert "peak in use while training" in section(printed, "memory")[0]
    assert "10 steps beside eager" in section(printed, "numerics")[0]
    assert section(printed, "source") == ["  the setting as Python: the same command with --source in place of --explain"]


def test_a_setting_that_cannot_be_measured_says_what_ended_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, complaint = explained(capsys, "faulty_workloads:Faulty", "scope=eager,padding=longest,pad_multiple=2")
    assert code == 1, complaint
    assert "failed (exception): RuntimeError: this workload does not like multiples of 2" in printed


def test_a_setting_that_does_not_exist_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, complaint = explained(capsys, "toy_workloads:Toy", "scope=ful")
    assert (code, printed) == (2, "")
    assert "did you mean full?" in complaint
