"""`python -m analysis.recommend`: the setting for a job, its gains, and messages about bad input."""

from __future__ import annotations

import pandas as pd
import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.break_even import Job, Starts, is_plain
from analysis.recommend import main, recommend, sentences, verdict
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Constraint
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import CompileSettings

EAGER, PLAIN = "scope=eager,padding=max", "scope=full"
QUICK, FAST = "scope=regional", "scope=full,mode=max-autotune,optimizer=compiled"
RECORDS = [
    trial(EAGER, 500, 0.5), trial(PLAIN, 800, 120), trial(QUICK, 640, 20),
    trial(FAST, 1000, 600, peak_memory_bytes=60 * 2**30),
]  # fmt: skip


def test_the_longer_the_job_the_more_compiling_it_is_worth(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep(RECORDS))
    chosen = [recommend(df, Job(steps=steps)).trial["compile_s"] for steps in (100, 3000, 20_000, 1_000_000)]
    assert chosen == [0.5, 20, 120, 600]


def test_a_saving_is_the_difference_of_totals_of_the_same_job(make_sweep: MakeSweep) -> None:
    saving = recommend(analysis.load(make_sweep(RECORDS)), Job(steps=1_000_000)).decision.saving
    assert saving is not None
    saved = (0.5 + 64e6 / 500) - (600 + 64e6 / 1000)
    assert saving.saved_s == pytest.approx(saved)
    assert saving.low_s < saved < saving.high_s
    assert saving.share == pytest.approx(saved / (0.5 + 64e6 / 500))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("scope=full", True),
        ("scope=full,dynamic=auto", True),
        ("scope=full,dynamic=auto,pad_multiple=1", True),
        ("scope=full,mode=reduce-overhead", False),
        ("scope=full,dynamic=true", False),
        ("scope=full,optimizer=compiled", False),
        ("scope=full,attention=unmasked", False),
        ("scope=regional", False),
    ],
)
def test_what_torch_compile_does_as_it_comes(settings: str, expected: bool) -> None:
    assert is_plain(CompileSettings.parse(settings).key) == expected


@pytest.mark.parametrize(
    ("eager", "baseline"),
    [
        (["scope=eager,optimizer=fused", "scope=eager", "scope=eager,as_written=on"], "the script as it is"),
        (["scope=eager,optimizer=fused,attention=unmasked", "scope=eager,optimizer=fused"], "A2 (eager, fused optimizer)"),
        (["scope=eager,optimizer=fused", "scope=eager,padding=max"], "A2 (eager)"),
    ],
)
def test_what_is_run_today_is_the_script_as_it_is_or_the_plainest_eager_setting(
    make_sweep: MakeSweep, eager: list[str], baseline: str
) -> None:
    records = [trial(settings, 500 - 50 * place, 0.5) for place, settings in enumerate(eager)]
    found = recommend(analysis.load(make_sweep([*records, trial(PLAIN, 2000, 50)])), Job(steps=100_000))
    assert f"against {baseline}; " in verdict(found)[1]


@pytest.mark.parametrize(
    ("setting", "samples", "said"),
    [
        ("scope=full,batch_size=128", 128, "It trains on batches of 128 samples instead of 64, which changes the training"),
        ("scope=full,accumulate=4", 64, "It splits each batch into 4 parts, so a step still trains on 64 samples."),
        ("scope=full,mode=max-autotune", 64, None),
    ],
)
def test_a_winner_says_what_it_does_to_the_batches(make_sweep: MakeSweep, setting: str, samples: int, said: str | None) -> None:
    fastest = trial(setting, 2000, 30, step_ms=[1e3 * samples / 2000])
    found = recommend(analysis.load(make_sweep([*RECORDS, fastest])), Job(steps=1_000_000))
    assert found.trial["settings_key"] == fastest.settings_key
    told = [one for one in sentences(found) if "samples instead" in one or "parts" in one]
    assert [one[: len(said or "")] for one in told] == ([] if said is None else [said])


def test_a_noisy_setting_is_recommended_by_its_figure_and_told_as_such(make_sweep: MakeSweep) -> None:
    noisy = trial("scope=regional,dynamic=mark", 1500, 15, stable=False, samples_per_s_ci95=(1400.0, 1600.0))
    found = recommend(analysis.load(make_sweep([*RECORDS, noisy])), Job(steps=20_000))
    assert found.trial["settings_label"] == "regional, default, mark"
    assert "Its steps were noisy: its throughput may be 1,400 to 1,600 samples/s." in sentences(found)


def test_a_constraint_leaves_settings_out_but_not_what_they_are_compared_with(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep(RECORDS))
    bounds = [Constraint.parse("compile_s<=60"), Constraint.parse("compile_s>=5")]
    found = recommend(df, Job(steps=1_000_000), constraints=bounds)
    assert found.trial["scope"] == "regional"
    assert "against A1 (eager);" in verdict(found)[1]
    assert found.excluded == {"compile_s<=60": 2, "compile_s>=5": 1}


def test_a_setting_that_loses_is_used_where_what_is_run_today_breaks_a_constraint(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep(RECORDS))
    found = recommend(df, Job(steps=100), constraints=[Constraint.parse("samples_per_s>=600")])
    assert verdict(found) == [
        "Use “A3 regional, static”.",
        "It is the fastest setting that meets the constraints; A1 (eager) does not meet them.",
    ]


def test_a_figure_that_was_not_measured_keeps_no_constraint(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([*RECORDS, trial("scope=modular", 9000, 1, peak_memory_bytes=None)]))
    found = recommend(df, Job(steps=1000), constraints=[Constraint.parse("peak_memory_bytes<=40GiB")])
    assert found.trial["scope"] != "modular"


def test_constraints_nobody_keeps_are_refused_with_what_comes_nearest(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep(RECORDS))
    with pytest.raises(ConfigError, match=r"compile_s<=0\.1; the nearest has 0\.5"):
        recommend(df, Job(steps=1), constraints=[Constraint.parse("compile_s<=0.1")])
    both = [Constraint.parse("compile_s<=60"), Constraint.parse("samples_per_s>=900")]
    with pytest.raises(ConfigError, match="all constraints at once"):
        recommend(df, Job(steps=1), constraints=both)


def test_settings_that_cannot_be_told_apart_are_named(make_sweep: MakeSweep) -> None:
    close = [trial(PLAIN, 800, 60), trial("scope=full,optimizer=fused", 801, 60), trial(EAGER, 500, 1)]
    found = recommend(analysis.load(make_sweep(close)), Job(steps=1_000_000))
    assert len(found.equals) == 1
    assert any("cannot be told apart from" in sentence for sentence in sentences(found))


def test_what_is_not_known_is_said(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([trial(QUICK, 640, 20), trial(EAGER, 500, 1, status=Status.FAILED, label="gpu-shared")]))
    words = " ".join(sentences(recommend(df, Job(steps=1000, starts=Starts.WARM))))
    assert words.startswith("Cannot tell what “A1 regional, static” gains. No eager trial is usable;")
    assert "warm start was not measured" in words


def test_the_command_prints_a_recommendation_for_each_length_and_the_flips(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(make_sweep(RECORDS)), "--steps", "100", "1M", "--restarts", "2", "--price-per-gpu-hour", "4"]) == 0
    out = capsys.readouterr().out
    assert "Stay with A1 (eager).\n  For 100 steps of 64 samples a worker, 2 restarts, with cold compile caches, it takes " in out
    assert "For 1,000,000 steps" in out
    assert "at 4.00 a GPU-hour" in out
    assert f"--settings '{RECORDS[3].settings_key}'" in out
    flips = out.partition("Fastest setting by length")[2]
    assert (flips.count("up to "), flips.count("from ")) == (1, 3)


def test_without_a_length_four_are_answered(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_sweep(RECORDS))]) == 0
    assert capsys.readouterr().out.count("steps of 64 samples") == 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "many"], "'many' is not a count"),
        (["--steps", "0"], "steps=0 is too few"),
        (["--steps", "1e20"], "steps=1e+20 is too many for a job; use 1,000,000,000,000 or fewer"),
        (["--steps", "1e18"], "steps=1e+18 is too many"),
        (["--steps", "1.5"], "'1.5' is not a count"),
        (["--price-per-gpu-hour", "-1"], "'-1' is not an amount"),
        (["--constraint", "compile<=3"], "no numeric field of a record is called 'compile'"),
        (["--constraint", "compile_s<=0"], "no usable setting meets the constraint"),
        (["--starts", "hot"], "--starts"),
        (["--stps", "3"], "no option or argument '--stps'; did you mean --steps?"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main([str(make_sweep(RECORDS)), *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_sweep_without_a_usable_trial_is_said_so(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_sweep([trial(PLAIN, status=Status.FAILED, label="worker-died")]))]) == 2
    assert "no trial is usable" in capsys.readouterr().err


def test_what_cannot_be_compared_is_said_to_be_left_out(make_sweep: MakeSweep) -> None:
    records = [
        trial("scope=eager", 500, 1),
        trial("scope=full", 800, 60),
        trial("scope=regional", 5000, 9, environment_key="far"),
    ]
    found = recommend(analysis.load(make_sweep(records)), Job(steps=10**6))
    assert found.trial["samples_per_s"] == 800
    assert sentences(found)[-1].startswith("1 usable trial is left out, because the environment, number of workers")
    alone = recommend(analysis.load(make_sweep(records[:2], name="alone")), Job(steps=10**6))
    assert not any("left out" in sentence for sentence in sentences(alone))


def test_where_every_batch_came_from_a_loader_that_is_the_reason(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(make_sweep([trial(PLAIN, 800, 60, pipeline="real"), trial(EAGER, 500, 1, pipeline="real")]))]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: every usable trial took its batches from the workload's own loader")
    assert "--pipeline resident" in said
    assert "has both" not in said


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("compile_s<=120", "1 usable setting does not meet compile_s<=120."),
        ("compile_s<=60", "2 usable settings do not meet compile_s<=60."),
    ],
)
def test_how_many_settings_do_not_keep_a_constraint_is_said(make_sweep: MakeSweep, bound: str, said: str) -> None:
    found = recommend(analysis.load(make_sweep(RECORDS)), Job(steps=1000), constraints=[Constraint.parse(bound)])
    assert sentences(found)[-1] == said


def test_repeated_settings_widen_or_narrow_the_interval(make_sweep: MakeSweep) -> None:
    """Compile times are between 40 and 80 s, so a job with many restarts is that uncertain."""
    records = [trial(PLAIN, 800, seconds) for seconds in (40, 80, 45, 75, 50, 70, 60)]
    folder = make_sweep(records)
    job = Job(steps=10, restarts=100)

    def width(attempts: pd.DataFrame | None) -> float:
        row = recommend(analysis.load(folder), job, attempts=attempts).trial
        return float(row["total_s_high"] - row["total_s_low"])

    assert width(analysis.load(folder, all_attempts=True)) > 3 * width(None)
