"""The sources' tables from recorded sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recipes.source_tables import main
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append
from compile_sweep.schema.settings import CompileSettings


def recorded(folder: Path, workload: str, spelled: str, **figures: Any) -> None:
    settings = CompileSettings.parse(spelled)
    values = {"settings": settings.to_dict(), "settings_key": settings.key, "status": Status.OK, "workload": workload}
    folder.mkdir(exist_ok=True)
    append(folder, TrialRecord(trial_id=spelled, **{"samples_per_s": 5.0, **values, **figures}))  # type: ignore[arg-type]


def rows(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]


def test_modes_stand_beside_each_other_for_training_and_inference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, infer = tmp_path / "train", tmp_path / "infer"
    recorded(train, "gpt2", "scope=eager", first_step_s=1.04, peak_memory_bytes=3675 * 2**20, step_ms_median=57.0)
    recorded(train, "gpt2", "scope=full", first_step_s=29.0, peak_memory_bytes=3277 * 2**20, step_ms_median=34.0)
    recorded(infer, "gpt2-inference", "scope=eager", step_ms_median=18.0, stable=False, step_ms_ci95=(16.0, 20.5))
    assert main([str(train), str(infer)]) == 0
    assert rows(capsys.readouterr().out) == [
        ["eager", "1.0", "3,675", "57.0", "18.0 ± 2.2"],
        ["full default", "29.0", "3,277", "34.0", "–"],
    ]


def test_a_step_that_nothing_bounds_upwards_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, "gpt2", "scope=eager", step_ms_median=18.0, stable=False, step_ms_ci95=(0.0, math.inf))
    assert main([str(tmp_path), str(tmp_path)]) == 0
    assert "18.0 ± ∞" in capsys.readouterr().out


def test_inference_beside_training_is_that_under_the_same_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, infer = tmp_path / "train", tmp_path / "infer"
    recorded(train, "gpt2", "scope=eager", first_step_s=1.0, peak_memory_bytes=2**20, step_ms_median=57.0)
    for spelled, step_ms in (("scope=eager", 18.0), ("scope=eager,workload.cast_cache=kept", 12.0)):
        recorded(infer, "gpt2-inference", spelled, step_ms_median=step_ms)
    assert main([str(train), str(infer)]) == 0
    assert rows(capsys.readouterr().out) == [["eager", "1.0", "1", "57.0", "18.0"]]


def test_options_have_a_row_each_and_a_column_for_scope_and_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = "scope=full,mode=reduce-overhead"
    for spelled, step_ms, mib in (
        ("scope=eager", 18.0, 700),
        (graphs, 3.0, 900),
        ("scope=eager,workload.weights=bf16", 17.0, 400),
        (f"{graphs},workload.weights=bf16", 2.0, 600),
        (f"{graphs},workload.weights=bf16,workload.batch_size=1", 1.0, 500),
    ):
        recorded(tmp_path, "gpt2-inference", spelled, step_ms_median=step_ms, peak_memory_bytes=mib * 2**20)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    times, memory = printed.split("\n\n")
    assert times.splitlines()[0] == "| ms/iter | eager | full reduce-overhead |"
    assert rows(times) == [["–", "18.0", "3.00"], ["weights=bf16", "17.0", "2.00"], ["batch_size=1, weights=bf16", "–", "1.00"]]
    assert memory.splitlines()[0] == "| MiB | eager | full reduce-overhead |"
    assert rows(memory) == [["–", "700", "900"], ["weights=bf16", "400", "600"], ["batch_size=1, weights=bf16", "–", "500"]]


def test_full_stands_against_regional(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for spelled, compile_s in (("scope=eager", 0.0), ("scope=full", 29.71), ("scope=regional", 1.75)):
        recorded(tmp_path, "layers-inference", spelled, compile_s=compile_s, first_step_s=compile_s)
    assert main([str(tmp_path)]) == 0
    assert rows(capsys.readouterr().out) == [
        ["full default", "29.71", "17.0", "29.71"],
        ["regional default", "1.75", "1.0", "1.75"],
    ]


@pytest.mark.parametrize(("folders", "said"), [([], "give a sweep's folder"), (["nowhere"], "nowhere holds no good trial")])
def test_bad_input_is_one_sentence(
    folders: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 2
    assert said in capsys.readouterr().err
