"""`python -m orchestrator.check`: what it prints about a workload before any sweep, on real runs in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

import pytest
from samples import TESTS

from compile_sweep.schema.settings import CompileSettings
from orchestrator import check
from orchestrator.environment import fingerprint


def checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """Returns the command's exit code, output and errors. It runs in this process; measuring has a process of its own."""
    monkeypatch.chdir(TESTS)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working folder
    code = check.main([*words, "--device", "cpu", "--backend", "aot_eager"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.slow
def test_a_sound_workload_is_described_run_and_priced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, complaint = checked(capsys, monkeypatch, "toy_workloads:Toy", "--scopes", "eager", "regional")
    assert code == 0, complaint + printed
    assert "batches: 4 of 3 samples, of length at most 16" in printed
    assert "repeated blocks: body.blocks.0, body.blocks.1, body.blocks.2 of class Block" in printed
    assert "parts: body, loss" in printed
    assert "dynamic dimensions of the model: ids 1, labels 1" in printed
    assert "dynamic dimensions of body.blocks.0: hidden 1" in printed
    assert printed.count("\n  works\n") == 2
    assert "graphs: 1" in printed
    assert "quickstart: 5 settings, about" in printed


def test_what_works_under_no_strategy_for_lengths_is_said_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverges(settings: CompileSettings, *arguments: object) -> check.Tried:
        return check.Tried(settings=settings, wall_s=1.0, verdict="diverges: off by 50%", measurement=None)

    monkeypatch.setattr(check, "_try", diverges)
    code, printed, complaint = checked(capsys, monkeypatch, "toy_workloads:Toy", "--scopes", "full")
    assert code == 1, complaint + printed
    assert printed.count("does not work: diverges: off by 50%") == 3
    assert "scope=full: works with none of dynamic=mark and auto and static" in printed


@pytest.mark.nightly("compiles in up to three processes; test_no_silent_winners.py labels wrong numbers, test_explain.py breaks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "exit_code", "said"),
    [
        ("faulty_workloads:WrongWhenCompiled", 1, "do not use: diverges"),
        ("faulty_workloads:BreaksItsGraph", 0, "graph break: "),  # a break costs time, but is not a fault
    ],
)
def test_what_is_wrong_with_a_compiled_setting_is_said(
    workload: str, exit_code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, complaint = checked(capsys, monkeypatch, workload, "--scopes", "full")
    assert code == exit_code, complaint + printed
    assert said in printed


def test_temporary_files_where_nothing_compiles_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/a b")
    monkeypatch.setattr(check, "measured_alone", lambda *arguments, **own: pytest.fail("something ran"))
    assert check.main(["captioning", "--device", "cpu", "--size", "tiny"]) == 2
    assert "set TMPDIR to another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["toy_workloads:Toyy"], "workload 'toy_workloads:Toyy': toy_workloads has no class Toyy; use Toy\n"),
        (["samples:Toy"], "samples has no class Toy; it has no workload at all"),
        (["toy_workloads:Block"], "Block in toy_workloads is not a subclass of compile_sweep.Workload"),
        (["captoning"], "did you mean captioning?"),
        (["--workload", "captoning"], "did you mean captioning?"),
        (["--workload=captoning"], "did you mean captioning?"),
        (["toy_workloads:Toy", "--size", "huge"], "has no size 'huge'"),
        (["toy_workloads:Toy", "--backend", "inductr"], "no backend 'inductr'"),
        (["toy_workloads:Toy", "--device", "cuda"], "needs a GPU"),
        (["toy_workloads:Toy", "--scopes", "fulll"], "--scopes"),
        (["toy_workloads:Toy", "--seed", "-1"], "--seed -1 is not a seed; use a whole number from 0 to 4294967295"),
        (["captioning", "--seed", "9" * 30], f"--seed {'9' * 30} is not a seed"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without = replace(fingerprint(), gpu=None, num_gpus=0)
    monkeypatch.setattr(check, "fingerprint", lambda: without)
    monkeypatch.setattr(check, "measured_alone", lambda *arguments, **own: pytest.fail("something ran"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert check.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert len(captured.err.splitlines()) == 1
