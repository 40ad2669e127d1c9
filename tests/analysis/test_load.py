"""A sweep's folder becomes a typed frame, or one sentence that says what is wrong."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
from sweep_folders import MakeSweep, trial, warm_start

import analysis
from analysis.columns import COMPILE_PHASES
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, append, standing
from compile_sweep.schema.settings import CompileSettings


def test_columns_are_those_documented_with_their_dtypes(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    assert list(df.columns) == list(analysis.COLUMNS)
    assert {name: str(df[name].dtype) for name in df} == {
        name: str(pd.Series([], dtype=column.dtype).dtype) for name, column in analysis.COLUMNS.items()
    }


def test_every_field_of_a_record_has_a_column() -> None:
    flattened = {"settings", "step_ms_ci95", "samples_per_s_ci95", "speedup_eager_ci95", "compile_phases_s"}
    assert {f.name for f in fields(TrialRecord)} - flattened <= set(analysis.COLUMNS)


def test_every_column_says_what_it_means() -> None:
    assert [name for name, column in analysis.COLUMNS.items() if len(column.meaning) < 8] == []


def test_every_setting_has_a_column_that_fits_its_type(make_sweep: MakeSweep) -> None:
    assert {f.name for f in fields(CompileSettings)} <= set(analysis.COLUMNS)
    df = analysis.load(make_sweep([]))
    dtypes = {
        "category": ("scope", "mode", "optimizer", "matmul_precision", "autocast", "attention"),
        "boolean": ("cudagraphs", "fullgraph", "shape_padding", "static_gradients"),
        "Int64": ("pad_multiple", "dynamic_min", "dynamic_max", "recompile_limit", "group_window"),
        "string": ("backend",),
        "object": ("parts", "buckets", "options"),
    }
    for dtype, names in dtypes.items():
        assert {name: str(df[name].dtype) for name in names} == dict.fromkeys(names, dtype)


def test_settings_that_hold_several_values_stay_whole(make_sweep: MakeSweep) -> None:
    settings = (
        "scope=modular,dynamic=buckets,buckets=32/64/256,group_window=100,attention=flex,"
        "parts.encoder.mode=max-autotune,inductor.epilogue_fusion=off"
    )
    row = analysis.load(make_sweep([trial(settings, 700, 50), trial("scope=eager", 500, 0)])).iloc[0]
    assert (row["buckets"], row["group_window"], row["attention"]) == ([32, 64, 256], 100, "flex")
    assert row["parts"] == {"encoder": {"mode": "max-autotune"}}
    assert row["options"] == {"epilogue_fusion": False}
    assert row["bucket_size"] is pd.NA


def test_settings_intervals_and_numerics_are_flattened(make_sweep: MakeSweep) -> None:
    row = analysis.load(make_sweep()).set_index("trial_id").loc["buckets"]
    assert (row["scope"], row["dynamic"], row["bucket_size"], row["optimizer"]) == ("full", "buckets", 32, "compiled")
    assert row["settings_label"] == "full, default, buckets of 32, compiled optimizer"
    assert row["pad_multiple"] is pd.NA
    assert row["samples_per_s_low"] < row["samples_per_s"] < row["samples_per_s_high"]
    assert row["numerics_status"] == "ok"
    assert row["speedup_eager_low"] < row["speedup_eager"] < row["speedup_eager_high"]
    assert row["numerics_worst"].startswith("updates of encoder")
    assert row["numerics_worst_ratio"] == pytest.approx(0.3)
    assert row["numerics"]["loss"]["gap"] == 0.001


def test_how_near_numerics_came_is_not_known_if_a_gap_is_not_finite(make_sweep: MakeSweep) -> None:
    numerics = {"status": "nan", "loss": {"gap": None, "tolerance": 0.1}, "gradients": {"x": {"gap": 0.1, "tolerance": 0.2}}}
    df = analysis.load(make_sweep([trial("scope=full", 700, 50, numerics=numerics), trial("scope=eager", 1, 0, numerics={})]))
    assert df["numerics_worst_ratio"].isna().all()
    assert df["numerics_status"].tolist() == ["nan", pd.NA]


@pytest.mark.parametrize("records", [[], [trial("scope=full", status=Status.FAILED, label="worker-died")]])
def test_without_any_figure_the_frame_has_the_same_types(
    make_sweep: MakeSweep, records: list[TrialRecord], tmp_path: Path
) -> None:
    df = analysis.load(make_sweep(records))
    assert len(df) == len(records)
    assert [str(df[name].dtype) for name in ("samples_per_s", "graphs", "status")] == ["Float64", "Int64", "category"]
    assert analysis.pareto_front(df).empty
    assert analysis.summary(df).best is None


def test_the_latest_attempt_at_a_setting_counts(make_sweep: MakeSweep) -> None:
    folder = make_sweep(
        [
            trial("scope=full", status=Status.FAILED, trial_id="first", label="worker-died"),
            trial("scope=eager", 500, 0.0, trial_id="other"),
            trial("scope=full", 700, 50, trial_id="second"),
        ]
    )
    df = analysis.load(folder)
    assert list(df["trial_id"]) == ["other", "second"]
    assert list(df["attempt"]) == [1, 2]
    assert list(analysis.load(folder, all_attempts=True)["attempt"]) == [1, 1, 2]


def test_an_attempt_that_the_machines_ended_takes_no_earlier_ones_place(make_sweep: MakeSweep) -> None:
    folder = make_sweep(
        [
            trial("scope=eager", status=Status.FAILED, trial_id="lost", label="node-lost"),
            trial("scope=full", 700, 50, trial_id="good"),
            trial("scope=full", status=Status.FAILED, trial_id="lost later", label="node-lost"),
        ]
    )
    df = analysis.load(folder)
    assert list(df["trial_id"]) == ["lost", "good"]
    assert list(analysis.pareto_front(df)["trial_id"]) == ["good"]


def test_a_script_that_ended_early_when_measured_again_keeps_its_first_figure(make_sweep: MakeSweep) -> None:
    early = {"label": "exception", "reason": "ScriptError: the script ended after 60 steps"}
    unchanged = "scope=eager,as_written=on"
    good, late = trial(unchanged, 500, trial_id="good"), trial(unchanged, status=Status.FAILED, trial_id="late", **early)
    folder = make_sweep([good, late])
    assert list(analysis.load(folder)["trial_id"]) == ["good"]
    assert [one.trial_id for one in standing(records.read(folder)).values()] == ["good"]


def test_cold_and_warm_times_never_share_a_column(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([trial("scope=full", 700, 50), trial("scope=full", 701, 6, caches=Caches.WARM)]))
    assert df["compile_s"].tolist() == [50, pd.NA]
    assert df["warm_compile_s"].tolist() == [pd.NA, 6]
    phases = df[[phase.column for phase in COMPILE_PHASES.values()]]
    assert phases.sum(axis=1).tolist() == [pytest.approx(50), 0]
    assert phases.loc[1].isna().all()
    assert df["attempt"].tolist() == [1, 1]
    assert len(analysis.pareto_front(df)) == 1


def test_a_warm_start_stands_in_columns_of_its_own_and_is_no_measurement(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial("scope=full", 700, 50), trial("scope=full", 701, 6, num_workers=2), trial("scope=eager", 500)])
    for start in (
        warm_start("scope=full", 14.0),
        warm_start("scope=full", 7.0),
        warm_start("scope=full", None, status=Status.FAILED, label="not-warm"),
        warm_start("scope=full", 21.0, num_workers=3),
    ):
        append(folder, start)
    df = analysis.load(folder)
    assert df["warm_start_s"].tolist() == [7.0, pd.NA, pd.NA]  # the latest that succeeded, with as many workers
    assert df["warm_start_restore_s"].tolist() == [1.0, pd.NA, pd.NA]
    assert df["warm_start_first_step_s"].tolist() == [3.5, pd.NA, pd.NA]
    assert df["compile_s"].tolist() == [50, 6, pd.NA]
    assert df["restore_s"].isna().all()
    assert len(df) == 3


def test_damaged_warm_starts_are_named(make_sweep: MakeSweep) -> None:
    folder = make_sweep()
    (folder / "warm_starts.jsonl").write_text("garbage\n")
    with pytest.raises(RecordsError, match=r"warm_starts\.jsonl line 1 is not a warm-start record"):
        analysis.load(folder)


def test_start_times_are_read_with_their_offset(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([trial("scope=full", started_at="2026-11-21T10:00:00+02:00"), trial("scope=eager")]))
    assert df["started_at"][0] == pd.Timestamp("2026-11-21T08:00:00Z")
    assert df["started_at"][1] is pd.NaT


def test_sweep_info_tells_what_the_file_says(make_sweep: MakeSweep) -> None:
    info = analysis.load_sweep(make_sweep())
    assert info.config["workload"] == "captioning"
    assert info.environment["gpu"] == "NVIDIA H200"
    assert len(info.planned) == 9


def test_parts_of_sweep_json_that_are_missing_or_odd_are_empty(make_sweep: MakeSweep) -> None:
    info = analysis.load_sweep(make_sweep(config=[1], environment=None, planned="x", started_at=None))
    assert (info.config, info.environment, info.planned, info.started_at) == ({}, {}, (), "")


def moved_apart(path: Path) -> Path:
    path.rename(path.with_suffix(".apart"))
    return path


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "trials.jsonl").unlink(), "holds no trials.jsonl"),
        (lambda folder: (folder / "trials.jsonl").write_text('{"trial_id":\n'), "line 1"),
        (
            lambda folder: moved_apart(folder / "trials.jsonl").mkdir(),
            "trials.jsonl is a folder; give a folder that a sweep wrote",
        ),
        (lambda folder: os.mkfifo(moved_apart(folder / "trials.jsonl")), "trials.jsonl is not a regular file"),
        (
            lambda folder: moved_apart(folder / "trials.jsonl").symlink_to("../gone.jsonl"),
            r"trials.jsonl is a link to \.\./gone.jsonl, which is not there; bring that along, or copy the folder with cp -rL",
        ),
        (lambda folder: (folder / "warm_starts.jsonl").mkdir(), "warm_starts.jsonl cannot be read \\(Is a directory\\)"),
        (lambda folder: (folder / "sweep.json").unlink(), "holds no sweep.json"),
        (lambda folder: (folder / "sweep.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "sweep.json").write_text("[]"), "is not a JSON object"),
    ],
)
def test_a_damaged_folder_is_refused_with_a_sentence(make_sweep: MakeSweep, damage, said: str) -> None:  # type: ignore[no-untyped-def]
    folder = make_sweep()
    damage(folder)
    with pytest.raises(RecordsError, match=said) as caught:
        (analysis.load(folder), analysis.load_sweep(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_and_a_file_in_its_place_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for read in (analysis.load, analysis.load_sweep):
        with pytest.raises(RecordsError, match="there is no folder"):
            read(tmp_path / "nowhere")
        with pytest.raises(RecordsError, match="is a file"):
            read(tmp_path / "file")
        with pytest.raises(RecordsError, match="cannot be read \\(File name too long\\); give a folder"):
            read(tmp_path / ("x" * 300))


def test_a_figure_of_a_wrong_kind_is_refused_by_name(make_sweep: MakeSweep) -> None:
    folder = make_sweep([])
    line = trial("scope=full", 700, 50).to_json().replace('"compile_s":50', '"compile_s":"soon"')
    (folder / "trials.jsonl").write_text(line + "\n")
    with pytest.raises(RecordsError, match="compile_s"):
        analysis.load(folder)


def test_a_compile_phase_that_is_not_known_is_refused_rather_than_lost(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial("scope=full", 700, 50, compile_phases_s={"linking": 3.0, "other": 47.0})])
    with pytest.raises(RecordsError, match=r"'linking'.*dynamo"):
        analysis.load(folder)
