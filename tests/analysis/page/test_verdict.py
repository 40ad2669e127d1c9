"""Reasons not to trust figures are reported."""

from __future__ import annotations

import math

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.load import SweepInfo
from analysis.page.verdict import cautions, none_usable, remarks, unused_gains
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "No trial has finished yet"),
        ([trial("scope=full", status=Status.FAILED, label="oom")], "of 1, 0 infeasible and 1 failed. Why: oom."),
        (
            [trial("scope=full", status=Status.STOPPED, label="dominated"), trial("scope=regional", status=Status.FAILED)],
            "No trial is usable: of 2, 0 infeasible, 1 failed and 1 stopped early. Why: dominated.",
        ),
        (
            [
                trial("scope=full", status=Status.FAILED, label="exception"),
                trial("scope=regional", status=Status.INFEASIBLE, label="nan"),
                trial("scope=modular", status=Status.FAILED, label="exception"),
            ],
            "of 3, 1 infeasible and 2 failed. Why: exception (2 times), nan.",
        ),
    ],
)
def test_without_a_usable_trial_that_is_said(make_sweep: MakeSweep, records: list[TrialRecord], said: str) -> None:
    df = analysis.load(make_sweep(records))
    assert said in none_usable(df, analysis.summary(df))


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
        "on a CPU",
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
    assert "slowed the compile of “A2 regional, static” on the front, and it was not measured again alone" in contended
    assert "3 in “A2 regional, static” and “A3 full, static”" in outliers
    assert "up to 3.4%" in drift
    assert "(more than 2.0% in 1 of 3)" in drift


def test_an_eager_trial_that_took_long_to_warm_up_was_disturbed(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 600, 81, graphs=0),
        trial("scope=eager,optimizer=compiled", 600, 40, graphs=1),
        trial("scope=eager,padding=longest", 600, 2, graphs=0),
    ]
    said = [[remark.text for remark in remarks(row)] for _, row in analysis.load(make_sweep(records)).iterrows()]
    assert ["machine disturbed" in texts for texts in said] == [True, False, False]


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
    assert note.startswith("“A3 regional, static” (700 to 900 samples/s) is on the front although noisy, judged by the low end")
    assert "“A5 modular, static” (880 to 1,100 samples/s) and “A4 regional, auto” (500 to 1,400 samples/s) would" in note
    best = analysis.summary(df).best
    assert best is not None
    assert best["settings_label"] == "full, default, static"


def test_an_interval_that_nothing_bounds_upwards_is_said_so(make_sweep: MakeSweep) -> None:
    ends = {"stable": False, "samples_per_s_ci95": (204.6, math.inf)}
    df = analysis.load(make_sweep([trial("scope=eager", 500, 0), trial("scope=full", 577, 9, **ends)]))
    (note,) = cautions(df, SweepInfo())
    assert note.startswith("“A2 full, static” (205 samples/s or more) would be on the front by the measured figure")


def test_a_setting_that_is_not_usable_cold_is_none_to_name_and_the_reason_is_said(make_sweep: MakeSweep) -> None:
    refuted = [
        trial("scope=full", 900, 6, caches=Caches.WARM, trial_id="warm"),
        trial("scope=full", 950, 50, status=Status.INFEASIBLE, label="diverges", trial_id="cold"),
    ]
    records = [trial("scope=eager", 800, 0.5), trial("scope=regional", 700, 9), *refuted]
    words = " ".join(cautions(analysis.load(make_sweep(records)), SweepInfo()))
    assert words.endswith(
        "“A3 full, static” reached 900 samples/s with warm caches, but does not count: measured cold, it is "
        "infeasible (diverges)."
    )


def test_where_the_only_compiled_setting_is_not_usable_cold_the_reason_is_said(make_sweep: MakeSweep) -> None:
    warm = trial("scope=full", 500, 6, caches=Caches.WARM, trial_id="warm")
    cold = trial("scope=full", status=Status.FAILED, label="worker-died", trial_id="cold")
    eager = [trial("scope=eager", 800, 0.5), trial("scope=eager,padding=longest", 700, 0.5)]
    words = " ".join(cautions(analysis.load(make_sweep([*eager, warm, cold])), SweepInfo()))
    assert words.endswith("measured cold, it is failed (worker-died).")


def test_a_slower_setting_that_is_not_usable_cold_is_not_worth_a_word(make_sweep: MakeSweep) -> None:
    warm = trial("scope=regional", 500, 6, caches=Caches.WARM, trial_id="warm")
    cold = trial("scope=regional", status=Status.INFEASIBLE, label="diverges", trial_id="cold")
    records = [trial("scope=eager", 800, 0.5), trial("scope=full", 900, 50), warm, cold]
    assert "measured cold it" not in " ".join(cautions(analysis.load(make_sweep(records)), SweepInfo()))


def test_the_fastest_setting_whose_numbers_are_right_but_that_does_not_count_is_named_with_what_helps(
    make_sweep: MakeSweep,
) -> None:
    reason = "torch did not compile all that it should: …; what would help: remove the hook"
    left = trial("scope=full", 2400, 50, status=Status.INFEASIBLE, label="silent-fallback", reason=reason)
    wrong = trial("scope=full,optimizer=fused", 9000, 50, status=Status.INFEASIBLE, label="diverges", reason="other losses")
    eager = trial("scope=eager", 800, 0.5)

    slower = trial("scope=regional", 2350, 9)
    df = analysis.load(make_sweep([eager, left, wrong, slower]))
    (note,) = unused_gains(df[:3])
    gain = "at least 3 times as fast as any that counts, with numbers like eager's"
    assert note == f"“A2 full, static” (2,400 samples/s) is {gain}, but is silent-fallback: {reason}"
    assert note.replace(reason, "see the unusable trials") in cautions(df[:3], SweepInfo())
    assert unused_gains(df) == unused_gains(df[:1]) == unused_gains(df[1:3]) == []


def test_a_noisy_setting_that_is_ahead_at_its_low_end_is_the_best(make_sweep: MakeSweep) -> None:
    df = analysis.load(
        make_sweep([trial("scope=eager", 600, 0), trial("scope=full", 900, 50), noisy("scope=regional", 1281, 1257, 80)])
    )
    found = analysis.summary(df)
    assert found.best is not None
    assert found.best["settings_label"] == "regional, default, static"
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
    assert "what “A2 regional, static” gained over the same eager steps in another trial" in note  # 1.53× there, 1.02× here
    assert "Trust the latter" in note


def test_what_an_optimizer_or_an_attention_gains_is_no_contradiction(make_sweep: MakeSweep) -> None:
    fused = "optimizer=fused,attention=eager"
    wide = {"speedup_eager": 1.2, "speedup_eager_ci95": (0.9, 1.6)}
    records = [
        trial("scope=eager", 400, 0),
        trial(f"scope=eager,{fused}", 600, 0, speedup_eager=1.5, speedup_eager_ci95=(1.49, 1.51)),
        trial(f"scope=full,{fused}", 900, 50, speedup_eager=2.25, speedup_eager_ci95=(2.24, 2.26)),
        trial("scope=regional", 600, 9, **wide),  # the trial's own interval allows it
    ]
    assert cautions(analysis.load(make_sweep(records)), SweepInfo()) == []


@pytest.mark.parametrize(("pipelines", "said"), [(("real", "real"), "All trials"), (("real", "resident"), "1 of 2 trials")])
def test_waits_for_data_in_the_throughput_are_said(make_sweep: MakeSweep, pipelines: tuple[str, str], said: str) -> None:
    records = [trial("scope=eager", 600, 0, pipeline=pipelines[0]), trial("scope=full", 900, 50, pipeline=pipelines[1])]
    (note,) = cautions(analysis.load(make_sweep(records)), SweepInfo())
    assert note.startswith(said)
    assert "throughput includes waiting for data" in note
