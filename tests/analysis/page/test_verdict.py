"""The verdict says no more than was measured."""

from __future__ import annotations

import math

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.load import SweepInfo
from analysis.page.verdict import cautions, tiles, verdict
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord


def judge(make_sweep: MakeSweep, records: list[TrialRecord] | None = None) -> str:
    df = analysis.load(make_sweep(records))
    return " ".join(verdict(df, analysis.summary(df)))


def test_the_best_setting_its_gain_and_its_cost_come_first(make_sweep: MakeSweep) -> None:
    words = judge(make_sweep)
    assert words.startswith("The fastest setting is “full, default, buckets of 32, compiled optimizer”, at 1,046 samples/s")
    assert "1.50× the best eager setting" in words
    assert "In turn with eager steps on the same batches it is 1.74× as fast (95 %: 1.73–1.75)." in words
    assert "440 s of cold compiling; that is paid back after about 22 min" in words
    assert "The knee of the front is “regional, default, auto”" in words


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "No trial has finished yet"),
        ([trial("scope=full", status=Status.FAILED, label="oom")], "of 1, 0 infeasible and 1 failed. The most"),
        (
            [trial("scope=full", status=Status.STOPPED, label="dominated"), trial("scope=regional", status=Status.FAILED)],
            "No trial is usable: of 2, 0 infeasible, 1 failed and 1 stopped early. The most frequent label is dominated.",
        ),
        ([trial("scope=full", 700, 50)], "nothing to compare it with"),
        ([trial("scope=full", 700, 50), trial("scope=regional", 650, 9)], "no eager trial is usable"),
        ([trial("scope=eager", 700, 0), trial("scope=full", 650, 50)], "No compiled setting beats eager"),
        ([trial("scope=eager", 700, 0), trial("scope=eager,padding=longest", 650, 0)], "None of the compiled settings"),
        ([trial("scope=eager", 700, 0), trial("scope=full", 705, 50)], "may be noise"),
    ],
)  # fmt: skip
def test_less_is_said_where_less_is_known(make_sweep: MakeSweep, records: list[TrialRecord], said: str) -> None:
    assert said in judge(make_sweep, records)


def test_what_speaks_against_the_figures_is_said(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=full", 700, 50, environment_key="a"),
        trial("scope=eager", 700, 50, environment_key="b", caches=Caches.WARM, num_workers=2),
    ]
    df = analysis.load(make_sweep(records))
    sweep = SweepInfo(planned=("x",), environment={"gpu": None}, config={"max_concurrent": 4})
    notes = " ".join(cautions(df, sweep))
    for expected in (
        "1 of 1 planned",
        "2 different environments",
        "numbers of workers",
        "processor",
        "4 trials",
        "warm",
    ):
        assert expected in notes
    assert cautions(df[:1], SweepInfo()) == []


def test_what_happened_while_the_front_was_measured_is_said(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 600, 0),
        trial("scope=regional", 700, 9, contended=True, outliers=1),
        trial("scope=full", 900, 50, outliers=2, clock_drift=0.034, step_ms_ci95=(70.0, 72.0)),
        trial("scope=modular", 600, 50, contended=True, outliers=7),  # not on the front
    ]
    contended, outliers, drift = cautions(analysis.load(make_sweep(records)), SweepInfo())
    assert "held up the compile of “regional, default, static”, not measured again alone" in contended
    assert "3 in “regional, default, static”, “full, default, static”" in outliers
    assert "up to 3.4 %" in drift
    assert "(more than 2.0 % in 1 of 3)" in drift


def test_a_store_that_could_not_be_used_is_said(make_sweep: MakeSweep) -> None:
    fault = "restoring from s3://bucket failed: CacheError: no answer"
    records = [
        trial("scope=eager", 500, 0),
        trial("scope=full", 700, 50, cache_faults=[fault, "published nothing"], cache_refused=0),
        trial("scope=regional", 650, 9, cache_refused=3),
    ]
    first, second = analysis.cache_faults(analysis.load(make_sweep(records)))
    assert first == f"1 of 3 trials could not use the store of compile artifacts: {fault}."
    assert second.startswith("1 of 3 trials refused 3 artifacts and manifests of the store: not signed with this key")
    assert analysis.cache_faults(analysis.load(make_sweep([trial("scope=full", 700, 50)], name="other"))) == []


def test_a_host_that_drifts_under_the_eager_reference_alone_is_not_mentioned(make_sweep: MakeSweep) -> None:
    steady = trial("scope=full", 900, 50, clock_drift=0.755, step_ms_ci95=(71.09, 71.13))
    assert cautions(analysis.load(make_sweep([steady])), SweepInfo()) == []


def noisy(settings: str, rate: float, low: float, compile_s: float) -> TrialRecord:
    ends = (low, 2 * rate - low)
    return trial(settings, rate, compile_s, stable=False, samples_per_s_ci95=ends)


def test_noisy_settings_are_on_the_front_by_the_low_end_of_their_interval_and_are_named(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 600, 0),
        trial("scope=full", 900, 50),
        noisy("scope=regional", 800, 700, 9),
        noisy("scope=regional,dynamic=auto", 950, 500, 20),  # at its low end slower than eager
        noisy("scope=modular", 990, 880, 60),  # at its low end behind full
    ]
    df = analysis.load(make_sweep(records))
    assert set(analysis.pareto_front(df)["settings_label"]) == {
        "eager", "regional, default, static", "full, default, static",
    }  # fmt: skip
    (note,) = cautions(df, SweepInfo())
    assert note.startswith("“regional, default, static” (700 to 900 samples/s) is on the front though noisy, by the low end")
    assert "“modular, default, static” (880 to 1,100 samples/s), “regional, default, auto” (500 to 1,400 samples/s) would" in note
    best = analysis.summary(df).best
    assert best is not None
    assert best.trial["settings_label"] == "full, default, static"


def test_an_interval_that_nothing_bounds_upwards_is_said_so(make_sweep: MakeSweep) -> None:
    ends = {"stable": False, "samples_per_s_ci95": (204.6, math.inf)}
    df = analysis.load(make_sweep([trial("scope=eager", 500, 0), trial("scope=full", 577, 9, **ends)]))
    (note,) = cautions(df, SweepInfo())
    assert note.startswith("“full, default, static” (205 samples/s or more) would be on the front by the figure")


def test_gain_and_name_of_the_best_eager_setting_are_of_one_trial(make_sweep: MakeSweep) -> None:
    """The eager trial with the larger figure is not the best one by what is sure."""
    records = [
        noisy("scope=eager,padding=max", 1000, 700, 0.5),
        trial("scope=eager,padding=longest", 900, 0.5),
        trial("scope=full", 1800, 50),
    ]
    words = judge(make_sweep, records)
    assert "at 1,800 samples/s: 2.00× the best eager setting (“eager, pad to longest ×8”, 900 samples/s)" in words


def test_the_gain_is_over_the_best_eager_setting_of_the_same_environment(make_sweep: MakeSweep) -> None:
    """As in a sweep that went on elsewhere: the fastest eager trial of all ran on a host twice as fast."""
    records = [
        trial("scope=eager", 900, 0.5, environment_key="quick", peak_memory_bytes=30 * 2**30),
        trial("scope=eager,padding=longest", 500, 0.5, environment_key="slow", peak_memory_bytes=20 * 2**30),
        trial("scope=full", 1000, 50, environment_key="slow", peak_memory_bytes=19 * 2**30),
    ]
    df = analysis.load(make_sweep(records))
    found = analysis.summary(df)
    first, second, *_ = verdict(df, found)
    assert first == (
        "The fastest setting is “full, default, static”, at 1,000 samples/s: 2.00× the best eager setting of the same "
        "environment, workers and pipeline (“eager, pad to longest ×8”, 500 samples/s)."
    )
    assert "paid back after about 100 s" in second  # 1000 (t - 50) = 500 (t - 0.5) at 99.5 s
    shown = {tile.caption: tile for tile in tiles(found.best, analysis.uncertain_front(df).trials)}
    assert shown["Gain"].figure == "2.00×"
    assert "paid back after about 100 s" in shown["Cost"].under
    assert shown["Memory"].under == "−1.0 GiB against the best eager setting"


def test_the_cost_of_what_was_measured_warm_is_an_estimate_and_said_to_be_one(make_sweep: MakeSweep) -> None:
    warm = {"caches": Caches.WARM, "cold_equivalent_s": 40.0, "peak_memory_bytes": 2**30}
    df = analysis.load(
        make_sweep([trial("scope=eager", 500, 0.0, peak_memory_bytes=2**30 + 9), trial("scope=full", 1000, 5, **warm)])
    )
    shown = {tile.caption: tile for tile in tiles(analysis.summary(df).best, analysis.uncertain_front(df).trials)}
    assert shown["Cost"].figure == "≈ 40.0 s"
    assert "paid back after about 80" in shown["Cost"].under  # 1000 (t - 40) = 500 t
    assert "measured with warm caches only" in shown["Confidence"].under
    assert shown["Memory"].under == "+0.0 GiB against the best eager setting"


def test_an_eager_setting_of_a_quicker_host_does_not_beat_what_was_compiled_elsewhere(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 900, 0.5, environment_key="quick"),
        trial("scope=eager,padding=longest", 400, 0.5, environment_key="slow"),
        trial("scope=full", 600, 50, environment_key="slow"),
    ]
    assert judge(make_sweep, records) == (
        "The fastest setting is an eager one, “eager”, at 900 samples/s. The best compiled one, “full, default, "
        "static”, reaches 600 samples/s: 1.50× the best eager setting of the same environment, workers and pipeline (“eager, pad "
        "to longest ×8”, 400 samples/s)."
    )


def test_without_an_eager_trial_of_its_environment_a_gain_is_not_known(make_sweep: MakeSweep) -> None:
    records = [trial("scope=eager", 900, 0.5, environment_key="a"), trial("scope=full", 1000, 50, environment_key="b")]
    df = analysis.load(make_sweep(records))
    found = analysis.summary(df)
    assert "no eager trial is comparable with it" in verdict(df, found)[0]
    shown = {tile.caption: tile for tile in tiles(found.best, analysis.uncertain_front(df).trials)}
    assert "eager on the same batches in turn" in shown["Gain"].under
    assert shown["Cost"].under == "of cold compiling"
    assert shown["Memory"].under == ""


def test_a_setting_behind_by_the_low_end_of_its_interval_is_said_so(make_sweep: MakeSweep) -> None:
    words = judge(
        make_sweep, [trial("scope=eager", 1000, 0.5), noisy("scope=full", 1500, 900, 50), trial("scope=regional", 890, 9)]
    )
    assert words.startswith("No compiled setting beats eager: the fastest is “eager”, at 1,000 samples/s.")
    assert "“full, default, static”, reaches 1,500 samples/s, but by the low end of its interval 900 samples/s." in words


def test_the_best_compiled_setting_beside_eager_is_so_by_what_is_sure(make_sweep: MakeSweep) -> None:
    words = judge(
        make_sweep, [trial("scope=eager", 1000, 0.5), noisy("scope=full", 950, 500, 50), trial("scope=regional", 800, 9)]
    )
    assert words.endswith("The best compiled one, “regional, default, static”, reaches 800 samples/s.")


def test_an_eager_setting_behind_by_the_low_end_of_its_interval_is_said_so(make_sweep: MakeSweep) -> None:
    words = judge(make_sweep, [noisy("scope=eager", 1000, 900, 0.5), trial("scope=full", 950, 50)])
    assert words.startswith(
        "The fastest setting is “full, default, static”, at 950 samples/s. The best eager one, “eager”, reaches "
        "1,000 samples/s, but by the low end of its interval 900 samples/s. It costs 50.0 s"
    )


def test_a_setting_that_is_not_usable_cold_is_none_to_name_and_the_reason_is_said(make_sweep: MakeSweep) -> None:
    refuted = [
        trial("scope=full", 900, 6, caches=Caches.WARM, trial_id="warm"),
        trial("scope=full", 950, 50, status=Status.INFEASIBLE, label="diverges", trial_id="cold"),
    ]
    words = judge(make_sweep, [trial("scope=eager", 800, 0.5), trial("scope=regional", 700, 9), *refuted])
    assert "The best compiled one, “regional, default, static”, reaches 700 samples/s." in words
    assert words.endswith(
        "“full, default, static” reached 900 samples/s when it began with warm caches, but does not count: measured cold it is "
        "infeasible (diverges)."
    )


def test_where_the_only_compiled_setting_is_not_usable_cold_the_reason_is_said(make_sweep: MakeSweep) -> None:
    warm = trial("scope=full", 500, 6, caches=Caches.WARM, trial_id="warm")
    cold = trial("scope=full", status=Status.FAILED, label="worker-died", trial_id="cold")
    eager = [trial("scope=eager", 800, 0.5), trial("scope=eager,padding=longest", 700, 0.5)]
    words = judge(make_sweep, [*eager, warm, cold])
    assert "None of the compiled settings is usable." in words
    assert words.endswith("measured cold it is failed (worker-died).")


def test_a_slower_setting_that_is_not_usable_cold_is_not_worth_a_word(make_sweep: MakeSweep) -> None:
    warm = trial("scope=regional", 500, 6, caches=Caches.WARM, trial_id="warm")
    cold = trial("scope=regional", status=Status.INFEASIBLE, label="diverges", trial_id="cold")
    assert "measured cold" not in judge(make_sweep, [trial("scope=eager", 800, 0.5), trial("scope=full", 900, 50), warm, cold])


def test_a_noisy_setting_that_is_ahead_at_its_low_end_is_the_best(make_sweep: MakeSweep) -> None:
    df = analysis.load(
        make_sweep([trial("scope=eager", 600, 0), trial("scope=full", 900, 50), noisy("scope=regional", 1281, 1257, 80)])
    )
    found = analysis.summary(df)
    assert found.best is not None
    assert found.best.trial["settings_label"] == "regional, default, static"
    assert found.counts[Status.OK] == 3
    assert found.knee is None  # 300 samples/s for the first 50 s, 357 for the 30 s after it


def test_a_member_of_the_front_that_was_confirmed_alone_is_not_mentioned(make_sweep: MakeSweep) -> None:
    records = [trial("scope=regional", 700, 19, contended=True), trial("scope=regional", 700, 9)]
    assert cautions(analysis.load(make_sweep(records)), SweepInfo()) == []


def test_of_many_settings_only_their_number_is_said(make_sweep: MakeSweep) -> None:
    records = [trial(f"scope=full,dynamic=mark,pad_multiple={n}", 500 + n, n, contended=True) for n in range(1, 6)]
    (note,) = cautions(analysis.load(make_sweep(records)), SweepInfo())
    assert "the compile of 5 settings" in note


def test_speedups_that_contradict_each_other_are_said(make_sweep: MakeSweep) -> None:
    records = [trial("scope=eager", 400, 0), trial("scope=regional", 610, 9), trial("scope=full", 900, 50, speedup_eager=2.2)]
    (note,) = cautions(analysis.load(make_sweep(records)), SweepInfo())
    assert "what “regional, default, static” gained over the same eager steps in another trial" in note  # 1.53× there, 1.02× here
    assert "Trust the latter" in note


def test_what_an_optimizer_or_an_attention_gains_is_no_contradiction(make_sweep: MakeSweep) -> None:
    fused = "optimizer=fused,attention=eager"
    wide = {"speedup_eager": 1.2, "speedup_eager_ci95": (0.9, 1.6)}
    records = [
        trial("scope=eager", 400, 0),
        trial(f"scope=eager,{fused}", 600, 0, speedup_eager=1.5, speedup_eager_ci95=(1.49, 1.51)),
        trial(f"scope=full,{fused}", 900, 50, speedup_eager=2.25, speedup_eager_ci95=(2.24, 2.26)),
        trial("scope=regional", 600, 9, **wide),  # which its own interval allows
    ]
    assert cautions(analysis.load(make_sweep(records)), SweepInfo()) == []


@pytest.mark.parametrize(("pipelines", "said"), [(("real", "real"), "All trials"), (("real", "resident"), "1 of 2 trials")])
def test_waits_for_data_in_the_throughput_are_said(make_sweep: MakeSweep, pipelines: tuple[str, str], said: str) -> None:
    records = [trial("scope=eager", 600, 0, pipeline=pipelines[0]), trial("scope=full", 900, 50, pipeline=pipelines[1])]
    (note,) = cautions(analysis.load(make_sweep(records)), SweepInfo())
    assert note.startswith(said)
    assert "throughput holds its waits" in note
