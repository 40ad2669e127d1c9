"""The front, its knee, and speedups, compared with plain definitions."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.pareto import assured
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches

FIGURES = st.one_of(st.none(), st.floats(), st.integers(0, 4).map(float))
TRIALS = st.lists(st.tuples(FIGURES, FIGURES, st.sampled_from([str(status) for status in Status])), max_size=12)


def frame(rows: list[tuple[float | None, float | None, str]]) -> pd.DataFrame:
    columns = {
        "samples_per_s": pd.Series([row[0] for row in rows], dtype="Float64"),
        "compile_s": pd.Series([row[1] for row in rows], dtype="Float64"),
        "status": pd.Series([row[2] for row in rows], dtype=analysis.COLUMNS["status"].dtype),
    }
    return pd.DataFrame(columns)


def on_front(index: int, rows: list[tuple[float | None, float | None, str]]) -> bool:
    """The definition, written out."""

    def usable(row: tuple[float | None, float | None, str]) -> bool:
        return row[2] == "ok" and all(value is not None and math.isfinite(value) for value in row[:2])

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] >= other[0] and one[1] <= other[1] and one != other

    pairs = [(row[0], row[1]) if usable(row) else None for row in rows]
    mine = pairs[index]
    return mine is not None and not any(pair is not None and beats(pair, mine) for pair in pairs)  # type: ignore[arg-type]


@settings(deadline=None)  # a busy machine takes its time
@given(TRIALS)
def test_the_front_is_what_its_definition_says(rows: list[tuple[float | None, float | None, str]]) -> None:
    front = analysis.pareto_front(frame(rows))
    assert set(front.index) == {index for index in range(len(rows)) if on_front(index, rows)}
    assert front["compile_s"].is_monotonic_increasing
    assert front["samples_per_s"].is_monotonic_increasing


def test_a_noisy_trial_takes_part_with_the_worse_ends_of_its_intervals(make_sweep: MakeSweep) -> None:
    ends = {"stable": False, "samples_per_s_ci95": (700.0, 1000.0), "step_ms_ci95": (64.0, 91.0)}
    df = analysis.load(make_sweep([trial("scope=full", 800, 50), trial("scope=regional", 850, 60, **ends)]))
    assert analysis.pareto_front(df)["scope"].tolist() == ["full"]
    assert analysis.pareto_front(df.assign(stable=True))["scope"].tolist() == ["full", "regional"]
    assert assured(df, "samples_per_s", at_most=False).tolist() == [800, 700]
    assert assured(df, "tokens_per_s", at_most=False).tolist() == [pytest.approx(23.1 * 800), pytest.approx(23.1 * 700)]
    assert assured(df, "step_ms_median", at_most=True).tolist() == [80, 91]
    assert assured(df, "compile_s", at_most=True).tolist() == [50, 60]
    assert assured(df.drop(columns="stable"), "samples_per_s", at_most=False).tolist() == [800, 850]


def test_a_noisy_trial_counts_with_its_lower_end_where_nothing_bounds_it_upwards(make_sweep: MakeSweep) -> None:
    """Three passes of 1, 1 and 3.2 s: between 204.5 samples/s and infinity."""
    ends = {"stable": False, "samples_per_s_ci95": (204.5, math.inf), "step_ms_ci95": (0.0, math.inf)}
    records = [trial("scope=eager", 500, 1), trial("scope=regional", 560, 10), trial("scope=full", 577, 9, **ends)]
    df = analysis.load(make_sweep(records))
    assert assured(df, "samples_per_s", at_most=False).tolist() == [500, 560, 204.5]
    assert assured(df, "step_ms_median", at_most=True)[2] == math.inf
    assert analysis.pareto_front(df)["scope"].tolist() == ["eager", "regional"]
    by_steps = {"step_ms_median": "min", "peak_memory_bytes": "min"}
    least = df.assign(peak_memory_bytes=df["peak_memory_bytes"].where(df["scope"] != "full", 1))
    assert "full" not in set(analysis.pareto_front(least, by_steps)["scope"])
    found = analysis.uncertain_front(least, by_steps).trials
    assert "full" not in set(found[found["on_front"]]["scope"])


def test_equal_trials_all_stay_on_the_front() -> None:
    assert len(analysis.pareto_front(frame([(5, 1, "ok"), (5, 1, "ok"), (5, 2, "ok")]))) == 2


def test_a_trial_that_is_not_ok_is_never_on_the_front(make_sweep: MakeSweep) -> None:
    front = analysis.pareto_front(analysis.load(make_sweep()))
    assert list(front["trial_id"]) == ["eager-max", "eager-longest", "regional", "regional-auto", "buckets"]


def test_other_objectives_make_another_front(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    front = analysis.pareto_front(df, {"samples_per_s": "max", "peak_memory_bytes": "min"})
    assert list(front["trial_id"]) == ["buckets"]


@pytest.mark.parametrize("objectives", [{}, {"speed": "max"}, {"samples_per_s": "most"}])
def test_objectives_that_make_no_sense_are_refused(objectives: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"use|give"):
        analysis.pareto_front(frame([(1, 1, "ok")]), objectives)


def test_the_knee_is_where_more_compiling_stops_paying(make_sweep: MakeSweep) -> None:
    knee = analysis.knee(analysis.pareto_front(analysis.load(make_sweep())))
    assert knee is not None
    assert knee["trial_id"] == "regional-auto"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(5, 1, "ok")],
        [(5, 1, "ok"), (9, 10, "ok")],
        [(5, 1, "ok"), (5, 1, "ok"), (5, 1, "ok")],
        [(1, 1, "ok"), (2, 2, "ok"), (3, 3, "ok")],  # a straight line
        [(1, 1, "ok"), (1.1, 50, "ok"), (3, 100, "ok")],  # under the chord
    ],
)
def test_a_front_without_a_bend_has_no_knee(rows: list[tuple[float | None, float | None, str]]) -> None:
    assert analysis.knee(analysis.pareto_front(frame(rows))) is None


def test_the_knee_does_not_hang_on_how_near_to_zero_eager_came() -> None:
    compiled: list[tuple[float | None, float | None, str]] = [(8, 10, "ok"), (9, 100, "ok")]
    for eager in (-0.02, 0.0, 1e-9, 0.05):
        knee = analysis.knee(analysis.pareto_front(frame([(5, eager, "ok"), *compiled])))
        assert knee is not None
        assert knee["compile_s"] == 10


def test_speedups_compare_with_the_best_eager_and_with_eager_that_pads_alike(make_sweep: MakeSweep) -> None:
    df = analysis.speedup_over_eager(analysis.load(make_sweep())).set_index("trial_id")
    assert df.loc["full", "speedup_best_eager"] == pytest.approx(766 / 696)
    assert df.loc["full", "speedup_same_padding"] == pytest.approx(766 / 586)
    assert df.loc["regional-auto", "speedup_same_padding"] == pytest.approx(902 / 696)
    assert df.loc["buckets", "speedup_same_padding"] is pd.NA  # no eager was measured in multiples of 32
    assert df.loc["autotune", "speedup_best_eager"] is pd.NA


def test_buckets_pad_alike_with_eager_in_multiples_of_their_size(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager,padding=longest,pad_multiple=32", 500, 0),
        trial("scope=full,dynamic=buckets", 800, 9),
    ]
    df = analysis.speedup_over_eager(analysis.load(make_sweep(records)))
    assert df["speedup_same_padding"].tolist() == [1.0, 1.6]


def test_eager_pads_to_no_list_of_buckets_and_to_no_lower_bound(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager,padding=longest", 500, 0),
        trial("scope=full,dynamic=buckets,buckets=32/64/256", 800, 9),
        trial("scope=full,dynamic=mark,dynamic_min=64", 800, 9),
        trial("scope=full,dynamic=mark,dynamic_min=8", 800, 9),  # lengths are multiples of 8 anyway
    ]
    df = analysis.speedup_over_eager(analysis.load(make_sweep(records)))
    assert df["speedup_same_padding"].tolist() == [1.0, pd.NA, pd.NA, 1.6]
    assert df["speedup_best_eager"].tolist() == [1.0, 1.6, 1.6, 1.6]
    assert df["speedup_eager"].notna().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    "setting", ["group_window=100", "autocast=fp16", "attention=flex", "matmul_precision=high", "workload.batch_size=4"]
)
def test_eager_that_computes_something_else_pads_not_alike(make_sweep: MakeSweep, setting: str) -> None:
    records = [
        trial("scope=eager", 500, 0),
        trial(f"scope=full,{setting}", 900, 9),
        trial(f"scope=eager,{setting}", 600, 0),
        trial("scope=full", 800, 9),
    ]
    folder = make_sweep(records)
    df = analysis.speedup_over_eager(analysis.load(folder))
    assert df["speedup_same_padding"].tolist() == [1.0, 1.5, 1.0, 1.6]
    (folder / "trials.jsonl").write_text("".join(record.to_json() + "\n" for record in records[:2]))
    assert analysis.speedup_over_eager(analysis.load(folder))["speedup_same_padding"].tolist() == [1.0, pd.NA]


def test_trials_with_another_input_pipeline_are_not_compared(make_sweep: MakeSweep) -> None:
    records = [trial("scope=eager", 500, 0), trial("scope=full", 400, 9, pipeline="real")]
    df = analysis.speedup_over_eager(analysis.load(make_sweep(records)))
    assert df["speedup_best_eager"].tolist() == [1.0, pd.NA]


def test_an_eager_trial_of_another_environment_or_size_of_group_is_no_baseline(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 0, environment_key="a"),
        trial("scope=full", 800, 9, environment_key="b"),
        trial("scope=full,optimizer=fused", 800, 9, environment_key="a", num_workers=2),
        trial("scope=regional", 800, 9, environment_key="a"),
    ]
    df = analysis.speedup_over_eager(analysis.load(make_sweep(records)))
    assert df["speedup_best_eager"].tolist() == [1.0, pd.NA, pd.NA, 1.6]


def test_the_summary_names_the_trials_a_person_asks_for(make_sweep: MakeSweep) -> None:
    found = analysis.summary(analysis.load(make_sweep()))
    chosen = [found.best, found.knee]
    assert [c["trial_id"] for c in chosen if c is not None] == ["buckets", "regional-auto"]
    assert found.counts == {Status.OK: 6, Status.INFEASIBLE: 2, Status.FAILED: 1, Status.STOPPED: 0}


def test_without_a_usable_eager_trial_no_speedup_is_claimed(make_sweep: MakeSweep) -> None:
    df = analysis.speedup_over_eager(analysis.load(make_sweep([trial("scope=full", 700, 50)])))
    assert df["speedup_best_eager"].isna().all()


def test_what_is_only_estimated_is_on_the_expected_front_and_not_on_the_known_one(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 0.1, trial_id="eager"),
        trial("scope=regional", 700, 2, caches=Caches.WARM, cold_equivalent_s=12.0, trial_id="regional"),
        trial("scope=full", 690, 1, caches=Caches.WARM, cold_equivalent_s=60.0, trial_id="full"),
        trial("scope=modular", 900, 70, trial_id="modular"),
        trial("scope=full,dynamic=mark", 950, 3, caches=Caches.WARM, trial_id="no estimate"),
    ]
    df = analysis.load(make_sweep(records))
    assert list(analysis.expected_front(df)["trial_id"]) == ["eager", "regional", "modular"]
    assert list(analysis.expected_front(df)["expected_compile_s"]) == [0.1, 12.0, 70.0]
    assert list(analysis.pareto_front(df)["trial_id"]) == ["eager", "modular"]


def test_a_cold_measurement_that_the_machines_ended_takes_no_warm_trials_place(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 950, 3, caches=Caches.WARM, cold_equivalent_s=40.0, trial_id="warm"),
        trial("scope=full", status=Status.FAILED, label="disk-full", trial_id="lost"),
    ]
    df = analysis.load(make_sweep(records))
    assert list(analysis.expected_front(df)["trial_id"]) == ["warm"]


def test_where_a_setting_was_measured_cold_its_warm_trial_does_not_count(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 950, 3, caches=Caches.WARM, cold_equivalent_s=40.0, trial_id="warm"),
        trial("scope=full", 900, 50, trial_id="cold"),
        trial("scope=regional", 980, 2, caches=Caches.WARM, cold_equivalent_s=9.0, trial_id="regional"),
    ]
    df = analysis.load(make_sweep(records))
    assert list(analysis.expected_front(df)["trial_id"]) == ["regional"]
    found = analysis.summary(df)
    assert found.best is not None
    assert found.best["trial_id"] == "regional"
    assert found.counts[Status.OK] == 2
