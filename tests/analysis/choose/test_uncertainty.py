"""Probabilities of being on the front, and what cannot be told apart."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.uncertainty import USUAL, deviations, drawn, front_probability, noise, uncertain_front
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord

EAGER = "scope=eager,padding=max"
FULL, REGIONAL, MODULAR = "scope=full", "scope=regional", "scope=modular"


def wide(settings: str, samples_per_s: float, compile_s: float, half: float) -> TrialRecord:
    """A trial whose throughput is known to within a fraction `half` of it."""
    interval = ((1 - half) * samples_per_s, (1 + half) * samples_per_s)
    return trial(settings, samples_per_s, compile_s, samples_per_s_ci95=interval)


def frame(make_sweep: MakeSweep, records: Sequence[TrialRecord], *, all_attempts: bool = False) -> pd.DataFrame:
    return analysis.load(make_sweep(records), all_attempts=all_attempts)


def test_what_is_far_ahead_is_certain_and_what_is_far_behind_is_out(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [wide(EAGER, 500, 0.1, 0.01), wide(FULL, 900, 60, 0.01), wide(REGIONAL, 400, 300, 0.01)])
    chances = front_probability(df)
    assert chances[0] == 1
    assert chances[1] == 1
    assert chances[2] == 0
    assert list(uncertain_front(df).trials["settings_key"]) == list(df["settings_key"][:2])


def test_a_near_tie_off_the_front_stays_with_its_probability_and_its_equal(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [wide(FULL, 900, 60, 0.02), wide(REGIONAL, 898, 61, 0.02), wide(EAGER, 500, 0.1, 0.02)])
    front = uncertain_front(df).trials.set_index("scope")
    assert not front.loc["regional", "on_front"]
    assert 0.6 < front.loc["regional", "front_probability"] < 0.8, "a dominated one is worse in both"
    assert front.loc["regional", "equal_to"] == front.loc["full", "settings_key"]
    assert list(front.loc[["regional", "full", "eager"], "ties"]) == [2, 2, 1]


def test_the_number_of_workers_may_be_an_objective(make_sweep: MakeSweep) -> None:
    records = [
        trial(FULL, 900, 60, num_workers=1),
        trial(REGIONAL, 890, 60, num_workers=2),
        trial(MODULAR, 1700, 60, num_workers=2),
    ]
    df = frame(make_sweep, records)
    assert list(front_probability(df, {"samples_per_s": "max", "num_workers": "min"})) == [1, 0, 1]


def test_equals_of_one_trial_do_not_chain_to_what_it_differs_from(make_sweep: MakeSweep) -> None:
    """Each equals its neighbor; the ends differ by ten deviations."""
    rates = [900 * 1.02**step for step in range(6)]
    names = [f"scope=full,inductor.epilogue_fusion={step}" for step in range(6)]
    df = frame(
        make_sweep, [wide(name, rate, 60 + step, 0.02) for step, (name, rate) in enumerate(zip(names, rates, strict=True))]
    )
    front = uncertain_front(df).trials
    for key, group in front.groupby("equal_to"):
        leader = front.set_index("settings_key").loc[key, "samples_per_s"]
        assert (abs(np.log(group["samples_per_s"].astype(float) / leader)) < 0.045).all()
    assert front["equal_to"].nunique() > 1


def test_probability_is_what_two_normal_figures_give(make_sweep: MakeSweep) -> None:
    """With equal compile times only one figure decides, so the normal distribution gives the probability."""
    df = frame(make_sweep, [wide(FULL, 1000, 50, 0.0196), wide(REGIONAL, 1010, 50, 0.0196)])
    chances = front_probability(df, {"samples_per_s": "max"}, count=20_000)
    between = USUAL["samples_per_s"].relative
    apart = np.log(1010 / 1000) / np.sqrt(2 * (0.01**2 + between**2))
    expected = 0.5 * (1 + pd.Series([apart / np.sqrt(2)]).map(_erf)[0])
    assert chances[1] == pytest.approx(expected, abs=0.02)
    assert chances[0] + chances[1] == pytest.approx(1)


def _erf(x: float) -> float:
    from math import erf

    return erf(x)


def test_two_objectives_and_three_agree_where_the_third_is_always_equal(make_sweep: MakeSweep) -> None:
    """Two objectives are sorted; with three, every pair is compared."""
    chance = np.random.default_rng(3)
    names = [f"scope=full,inductor.epilogue_fusion={step}" for step in range(12)]
    df = frame(make_sweep, [wide(name, *chance.uniform((900, 50), (1000, 60)), 0.03) for name in names])
    two = front_probability(df, {"samples_per_s": "max", "compile_s": "min"})
    three = front_probability(df, {"samples_per_s": "max", "compile_s": "min", "peak_memory_bytes": "min"})
    assert (two == three).all()
    exact = front_probability(df, {"peak_memory_bytes": "min", "graphs": "max"})
    assert (exact == 1).all(), "all are equal in both"


def test_trials_that_are_not_ok_have_no_probability(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    chances = front_probability(df)
    assert (chances.isna() == (df["status"] != Status.OK)).all()


def test_three_objectives_keep_what_two_would_not(make_sweep: MakeSweep) -> None:
    small = trial(REGIONAL, 700, 80, peak_memory_bytes=8 * 2**30)
    df = frame(make_sweep, [wide(EAGER, 500, 0.1, 0.01), wide(FULL, 900, 60, 0.01), small])
    assert front_probability(df)[2] == 0
    assert front_probability(df, {"samples_per_s": "max", "compile_s": "min", "peak_memory_bytes": "min"})[2] == 1


def test_noise_between_runs_is_the_usual_one_until_settings_are_repeated(make_sweep: MakeSweep) -> None:
    once = frame(make_sweep, [wide(FULL, 900, 60, 0.01), wide(REGIONAL, 800, 20, 0.01)])
    assert noise(once, "compile_s") == USUAL["compile_s"]
    assert "as usual" in noise(once, "compile_s").origin
    assert noise(once, "peak_memory_bytes").relative == 0


def test_noise_between_runs_is_found_from_repeated_settings(make_sweep: MakeSweep) -> None:
    chance = np.random.default_rng(1)
    records = [
        trial(settings, 900, float(seconds * np.exp(0.1 * chance.standard_normal())))
        for settings, seconds in ((FULL, 60), (REGIONAL, 20), (MODULAR, 90))
        for _ in range(40)
    ]
    found = noise(frame(make_sweep, records, all_attempts=True), "compile_s")
    assert found.repeats == 3 * 39
    assert found.relative == pytest.approx(0.1, rel=0.2)
    assert "117 repeated measurements" in found.origin


def test_what_other_trials_disturbed_is_no_repeat(make_sweep: MakeSweep) -> None:
    records = [trial(FULL, 900, 60.0 + 40 * at, contended=at % 2 == 1) for at in range(12)]
    attempts = frame(make_sweep, records, all_attempts=True)
    assert noise(attempts, "compile_s").repeats == 5


def test_compile_times_near_zero_scatter_by_seconds_and_never_below_zero(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [wide(EAGER, 500, 0.0, 0.01), wide("scope=eager,padding=longest", 600, 0.3, 0.01)])
    draws = drawn(df, ("compile_s",))
    assert (draws >= 0).all()
    assert draws.std(axis=0).min() > 0.2
    assert set(uncertain_front(df).trials["ties"]) == {1}, "their throughput differs"


@pytest.mark.parametrize(
    ("ends", "deviation"),
    [
        ((800.0, np.inf), np.log(900 / 800) / 1.96),
        ((0.0, 1200.0), np.log(1200 / 900) / 1.96),
        ((0.0, np.inf), np.log(10)),
        (None, 0.005),
    ],
)
def test_an_end_of_an_interval_that_says_nothing_leaves_the_other(
    make_sweep: MakeSweep, ends: tuple[float, float] | None, deviation: float
) -> None:
    """JSON has no infinity, so a record has null there; a lower end of 0 is infinitely far away in logarithms."""
    df = frame(make_sweep, [trial(FULL, 900, 60, samples_per_s_ci95=ends)])
    off = deviations(df, "samples_per_s", USUAL["samples_per_s"])
    assert off[0] == pytest.approx(deviation, rel=0.01)


@pytest.mark.parametrize("name", ["tokens_per_s", "samples_per_s_per_worker"])
@pytest.mark.parametrize("ends", [(855.0, 950.0), (0.0, 1200.0), (800.0, np.inf), (0.0, np.inf)])
def test_a_multiple_of_the_throughput_is_known_no_better_than_it(
    make_sweep: MakeSweep, name: str, ends: tuple[float, float]
) -> None:
    """Tokens are samples times a constant, and the number of workers is a constant, so their relative errors are equal."""
    df = frame(make_sweep, [trial(FULL, 900, 60, samples_per_s_ci95=ends, samples_per_s_per_worker=450, num_workers=2)])
    off, of_samples = (deviations(df, one, noise(df, one))[0] for one in (name, "samples_per_s"))
    assert off == of_samples > 0.025


def test_near_ties_by_samples_are_near_ties_by_tokens(make_sweep: MakeSweep) -> None:
    df = frame(make_sweep, [wide(FULL, 900, 60, 0.1), wide(REGIONAL, 880, 61, 0.1)])
    by_tokens = uncertain_front(df, {"tokens_per_s": "max", "compile_s": "min"}).trials
    assert list(by_tokens["ties"]) == [2, 2]


def test_draws_are_the_same_in_every_call(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    assert (front_probability(df).dropna() == front_probability(df).dropna()).all()


def test_no_trial_is_no_front(make_sweep: MakeSweep) -> None:
    front = uncertain_front(analysis.load(make_sweep([])))
    assert front.trials.empty
    assert {"on_front", "front_probability", "equal_to", "ties"} <= set(front.trials.columns)


def test_thousands_of_trials_take_seconds(make_sweep: MakeSweep) -> None:
    chance = np.random.default_rng(0)
    one = analysis.load(make_sweep([trial(FULL, 900, 60)]))
    many = one.loc[np.zeros(10_000, dtype=int)].reset_index(drop=True)
    rates = chance.uniform(500, 1500, len(many))
    many["settings_key"] = [f"setting {at}" for at in range(len(many))]
    for name, share in (("samples_per_s", 1.0), ("samples_per_s_low", 0.99), ("samples_per_s_high", 1.01)):
        many[name] = share * rates
    many["compile_s"] = chance.uniform(1, 500, len(many))
    began = time.perf_counter()
    front = uncertain_front(many).trials
    assert time.perf_counter() - began < 20
    assert 3 < len(front) < 200
