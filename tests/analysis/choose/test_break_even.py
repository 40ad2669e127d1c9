"""What jobs take under each setting, and from which length on another setting is better."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import MakeSweep, trial, warm_start

import analysis
from analysis.choose.break_even import Job, Starts, costs, reigns, samples_per_step
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, append

EAGER, FULL, REGIONAL = "scope=eager,padding=max", "scope=full", "scope=regional"


def frame(make_sweep: MakeSweep, records: Sequence[TrialRecord]) -> pd.DataFrame:
    return analysis.load(make_sweep(records))


def three(make_sweep: MakeSweep) -> pd.DataFrame:
    """64 samples a step: 0.128, 0.1 and 0.08 s."""
    return frame(make_sweep, [trial(EAGER, 500, 0.5), trial(REGIONAL, 640, 20), trial(FULL, 800, 119.99)])


def test_a_job_takes_its_starts_and_its_steps(make_sweep: MakeSweep) -> None:
    table = costs(three(make_sweep), Job(steps=1000, restarts=3)).table.set_index("scope")
    assert table.loc["full", "total_s"] == pytest.approx(4 * 119.99 + 1000 * 64 / 800)
    assert table.loc["eager", "total_s"] == pytest.approx(4 * 0.5 + 1000 * 64 / 500)
    for scope in ("eager", "regional", "full"):
        assert table.loc[scope, "total_s_low"] < table.loc[scope, "total_s"] < table.loc[scope, "total_s_high"]


def test_the_shortest_comes_first_with_its_probability(make_sweep: MakeSweep) -> None:
    table = costs(three(make_sweep), Job(steps=1_000_000)).table
    assert list(table["scope"]) == ["full", "regional", "eager"]
    assert list(table["best_probability"]) == [1, 0, 0]


def test_of_two_equals_each_is_as_probably_the_shortest(make_sweep: MakeSweep) -> None:
    table = costs(frame(make_sweep, [trial(FULL, 800, 60), trial(REGIONAL, 800, 60)]), Job(steps=100_000)).table
    assert table["best_probability"].tolist() == pytest.approx([0.5, 0.5], abs=0.1)


def test_every_gpu_is_paid_for_while_it_compiles(make_sweep: MakeSweep) -> None:
    job = Job(steps=1000, nodes=4, gpus_per_node=8, price_per_gpu_hour=2.5)
    row = costs(three(make_sweep), job).table.set_index("scope").loc["full"]
    assert row["gpu_hours"] == pytest.approx((119.99 + 80) * 32 / 3600)
    assert row["cost"] == pytest.approx(2.5 * row["gpu_hours"])


def test_without_a_price_nothing_costs_money(make_sweep: MakeSweep) -> None:
    assert costs(three(make_sweep), Job(steps=1000)).table["cost"].isna().all()


def test_an_overhead_is_paid_at_every_start_and_changes_no_order(make_sweep: MakeSweep) -> None:
    df = three(make_sweep)
    plain, slow = (costs(df, Job(steps=2000, restarts=2, start_overhead_s=s)).table for s in (0.0, 100.0))
    assert list(plain["settings_key"]) == list(slow["settings_key"])
    assert (slow["total_s"] - plain["total_s"]).tolist() == pytest.approx([300] * 3)


def test_several_workers_share_the_samples_of_a_step(make_sweep: MakeSweep) -> None:
    """Four workers with 800 samples per second in all: a step of 4 × 64 samples takes 0.32 s."""
    df = frame(make_sweep, [trial(FULL, 800, 60, num_workers=4, step_ms=[320.0] * 4)])
    assert samples_per_step(df) == 64
    row = costs(df, Job(steps=1000)).table.iloc[0]
    assert row["step_s"] == pytest.approx(0.32)
    assert row["gpu_hours"] == pytest.approx((60 + 320) * 4 / 3600)


def test_of_several_numbers_of_workers_the_most_measured_is_compared(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [trial(EAGER, 500, 1), trial(FULL, 800, 60), trial(FULL, 3000, 70, num_workers=4)])
    assert set(costs(df, Job(steps=10)).table["num_workers"]) == {1}


def test_trials_of_another_environment_are_left_out_and_counted(make_sweep: MakeSweep) -> None:
    far = [trial(setting, 5000, 9, environment_key="far") for setting in ("scope=eager,autocast=off", "scope=modular")]
    df = frame(make_sweep, [trial(EAGER, 500, 1), trial(FULL, 800, 60), trial("scope=regional", 700, 9), *far])
    found = costs(df, Job(steps=10))
    assert sorted(found.table["samples_per_s"]) == [500, 700, 800]
    assert found.left_out == 2


def test_a_step_has_as_many_samples_as_a_trial_had(make_sweep: MakeSweep) -> None:
    of_one = [trial(FULL, 100, 9, step_ms=[10.0]), trial("scope=regional", 50, 0, step_ms=[20.0])]
    of_64 = [trial(f"scope=full,optimizer={kind}", 640, 9, step_ms=[100.0]) for kind in ("fused", "compiled")]
    assert samples_per_step(frame(make_sweep, [*of_one, *of_64])) == 64  # not 32, between the two


def test_a_job_of_several_batch_sizes_has_the_steps_of_what_is_run_today(make_sweep: MakeSweep) -> None:
    larger = trial(f"{FULL},batch_size=64", 1600, 9, step_ms=[40.0])  # a slower step, and more samples a second
    df = frame(make_sweep, [trial(EAGER, 800, 0, step_ms=[10.0]), trial(f"{EAGER},batch_size=64", 900, 0), larger])
    table = costs(df, Job(steps=1000)).table.set_index("settings_key")
    assert samples_per_step(df) == 8
    assert table["step_s"].min() == table.at[larger.settings_key, "step_s"] == pytest.approx(8 / 1600)


def test_unusable_trials_and_those_without_a_figure_take_no_part(make_sweep: MakeSweep) -> None:
    bad = trial(FULL, 5000, 1, status=Status.INFEASIBLE, label="nan", reason="NaN")
    df = frame(make_sweep, [trial(EAGER, 500, 1), bad])
    assert list(costs(df, Job(steps=10)).table["scope"]) == ["eager"]
    with pytest.raises(ConfigError, match="no trial is usable"):
        costs(df[df["scope"] == "full"], Job(steps=10))


def test_warm_starts_count_what_they_take_beyond_their_steps(make_sweep: MakeSweep) -> None:
    """A start takes 14 s, 2 of them for restoring; its warm-up of 9 s contains 0.8 s of steps."""
    folder = make_sweep([trial(FULL, 800, 60), trial(REGIONAL, 640, 20), trial(EAGER, 500, 0.5)])
    append(folder, warm_start(FULL, 14.0, load_s=3.0, warmup_s=9.0))
    df = analysis.load(folder)
    warm = costs(df, Job(steps=1000, restarts=2, starts=Starts.WARM)).table.set_index("scope")
    assert warm.loc["full", "first_s"] == pytest.approx(2 + 9 - 0.8)
    assert warm.loc["full", "fixed_s"] == pytest.approx(3 * 10.2)
    first_cold = costs(df, Job(steps=1000, restarts=2, starts=Starts.FIRST_COLD)).table.set_index("scope")
    assert first_cold.loc["full", "fixed_s"] == pytest.approx(60 + 2 * 10.2)
    assert warm["starts_known"].to_dict() == {"full": True, "eager": True, "regional": False}
    assert warm.loc["regional", "first_s"] == 20, "what is not known is taken as cold"


def test_a_warm_trial_stands_for_a_warm_start_and_its_estimate_for_a_cold_one(make_sweep: MakeSweep) -> None:
    warm: dict[str, Any] = {"caches": Caches.WARM, "restore_s": 1.5, "cold_equivalent_s": 55.0}
    df = frame(make_sweep, [trial(FULL, 800, 60), trial(FULL, 800, 6, **warm), trial(REGIONAL, 640, 4, **warm)])
    cold = costs(df, Job(steps=10)).table.set_index("scope")
    assert list(cold.loc[["full", "regional"], "first_s"]) == [60, 55]
    assert list(cold.loc[["full", "regional"], "starts_known"]) == [True, False]
    warmed = costs(df, Job(steps=10, starts=Starts.WARM)).table.set_index("scope")
    assert list(warmed.loc[["full", "regional"], "first_s"]) == [7.5, 5.5]


def test_longer_jobs_flip_to_settings_that_compile_longer(make_sweep: MakeSweep) -> None:
    found = reigns(costs(three(make_sweep), Job(steps=1)).table)
    assert [reign.trial["scope"] for reign in found] == ["eager", "regional", "full"]
    assert [reign.from_steps for reign in found] == [1, 697, 5000]
    assert [reign.to_steps for reign in found] == [696, 4999, None]
    assert found[1].from_s == pytest.approx(20 + 697 * 0.1)


def test_restarts_put_a_flip_off(make_sweep: MakeSweep) -> None:
    df = three(make_sweep)
    once, often = (reigns(costs(df, Job(steps=1, restarts=restarts)).table)[-1].from_steps for restarts in (0, 9))
    assert often == pytest.approx(10 * once, rel=0.001)


LINES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), min_size=1, max_size=8)


@settings(deadline=None)  # a busy machine takes its time
@given(LINES)
def test_whoever_reigns_is_the_shortest_at_every_length(lines: list[tuple[int, int]]) -> None:
    table = pd.DataFrame({"fixed_s": pd.Series([line[0] for line in lines], dtype="Float64")})
    table["step_s"] = pd.Series([line[1] for line in lines], dtype="Float64")
    found = reigns(table)
    assert found[0].from_steps == 1
    assert found[-1].to_steps is None
    for reign in found:
        for steps in {reign.from_steps, reign.to_steps or 10_000}:
            mine = reign.trial["fixed_s"] + steps * reign.trial["step_s"]
            assert mine == min(fixed + steps * step for fixed, step in lines)
    assert all(before.to_steps == after.from_steps - 1 for before, after in pairwise(found))


def test_the_largest_numbers_of_a_job_give_its_figures(make_sweep: MakeSweep) -> None:
    most = 10**12
    job = Job(
        steps=most, restarts=most, nodes=most, gpus_per_node=most, start_overhead_s=float(most), price_per_gpu_hour=float(most)
    )
    table = costs(frame(make_sweep, [trial(FULL, 800, 60), trial(EAGER, 500, 1)]), job).table
    assert np.isfinite(table[["total_s_low", "total_s_high", "cost"]].to_numpy(dtype=float)).all()
    assert [reign.from_steps for reign in reigns(table)] == sorted(reign.from_steps for reign in reigns(table))


def test_the_interval_of_the_longest_job_holds_its_total(make_sweep: MakeSweep) -> None:
    table = costs(three(make_sweep), Job(steps=10**12)).table
    assert (table["total_s_low"] < table["total_s"]).all()
    assert (table["total_s"] < table["total_s_high"]).all()


def test_where_starts_cost_most_flips_are_beyond_whole_numbers_of_64_bits(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [trial(FULL, 800.0000001, 600), trial(EAGER, 800, 1)])
    first, second = reigns(costs(df, Job(steps=1, restarts=10**12)).table)
    assert (first.trial["scope"], second.trial["scope"]) == ("eager", "full")
    assert second.from_steps > 2**63


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"steps": 0}, "steps=0 is too few"),
        ({"steps": 10**20}, r"steps=1e\+20 is too many for a job; use 1,000,000,000,000 or fewer"),
        ({"steps": 1, "restarts": 10**13}, "restarts=1e"),
        ({"steps": 1, "start_overhead_s": 1e300}, "start_overhead_s=1e"),
        ({"steps": 1, "restarts": -1}, "restarts=-1"),
        ({"steps": 1, "nodes": 0}, "nodes=0"),
        ({"steps": 1, "gpus_per_node": 0}, "gpus_per_node=0"),
        ({"steps": 1, "price_per_gpu_hour": -2.0}, "price_per_gpu_hour=-2.0"),
        ({"steps": 1, "start_overhead_s": float("nan")}, "start_overhead_s=nan"),
    ],
)
def test_what_no_job_has_is_refused(words: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Job(**words)


def test_without_step_times_nobody_knows_how_long_a_step_is(make_sweep: MakeSweep) -> None:
    with pytest.raises(ConfigError, match="step times"):
        samples_per_step(frame(make_sweep, [trial(FULL, 800, 60, step_ms=[])]))
