"""The benchmark of two workers on one GPU: its report of a case that works, one that fails, and bad settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.trials import workers_on_one_gpu
from orchestrator.environment import fingerprint

CASE = ["--device", "cpu", "--workload", "layers", "--size", "tiny"]


@pytest.mark.nightly("compiles in a benchmark's two workers; test_distributed.py measures with two workers")
@pytest.mark.slow
def test_two_workers_tell_what_was_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "told.json"
    words = ["--settings", "scope=full,backend=aot_eager,ddp.optimize_ddp=python_reducer"]
    assert workers_on_one_gpu.main(["--output", str(output), *CASE, *words]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["graphs"], row["numerics"]) == (2, "ok")  # one graph of the model, one of its backward pass
    (reason,) = row["graph_break_reasons"]
    assert "backward" in reason
    assert reason.split()[0] in capsys.readouterr().out


def test_a_worker_that_fails_costs_its_case_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    output = tmp_path / "told.json"
    assert workers_on_one_gpu.main(["--output", str(output), *CASE, "--settings", "scope=full", "scope=regional"]) == 0
    assert [row["error"] for row in json.loads(output.read_text())["rows"]] == ["exit code 1"] * 2
    assert "exit code 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [([*CASE, "--settings", "scope=all"], "scope"), (["--settings", "scope=full"], "needs a GPU")],
)
def test_what_it_cannot_work_with_is_a_sentence(
    words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if named == "needs a GPU" and fingerprint().num_gpus:
        pytest.skip("there is a GPU")
    assert workers_on_one_gpu.main(["--output", str(tmp_path / "told.json"), *words]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "told.json").exists()
