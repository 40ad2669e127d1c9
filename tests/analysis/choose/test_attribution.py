"""What fields are worth: matched pairs, prices of regions."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.attribution import effects, region_prices
from analysis.load import load_for_analysis
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord


def grid() -> list[TrialRecord]:
    """Throughput depends on the optimizer (× 1.2) and slightly on grouping (× 1.02), compile time only on the scope."""
    return [
        trial(
            f"scope={scope},optimizer={optimizer}{window}",
            500 * (1.2 if optimizer == "fused" else 1) * (1.02 if window else 1),
            60 if scope == "full" else 15,
        )
        for scope, optimizer, window in product(("full", "regional", "modular"), ("foreach", "fused"), ("", ",group_window=100"))
    ]


def test_an_effect_is_the_mean_over_pairs_that_differ_in_one_field_only(make_sweep: MakeSweep) -> None:
    found = {(one.name, one.before, one.after): one for one in effects(analysis.load(make_sweep(grid())))}
    fused = found["optimizer", "foreach", "fused"]
    assert fused.pairs == 6
    assert fused.rate.value == pytest.approx(0.2)
    assert fused.rate.low < 0.2 < fused.rate.high
    assert fused.compile_s is not None
    assert fused.compile_s.value == pytest.approx(0)
    assert found["scope", "full", "regional"].compile_s.value == pytest.approx(-45)  # type: ignore[union-attr]
    assert found["group_window", "—", "100"].rate.value == pytest.approx(0.02)
    steps = found["optimizer", "foreach", "fused"].step_ms
    assert steps is not None
    assert steps.value == pytest.approx((64_000 / 600 - 128 + 64_000 / 612 - 64_000 / 510) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [2, 3])
def test_the_interval_of_an_effect_covers_the_true_one_about_as_often_as_it_says(make_sweep: MakeSweep, pairs: int) -> None:
    """Pairs disagree by more than each one's error, as if a field's effect depended on other fields."""
    source, covered = np.random.default_rng(3), 0
    setting = "scope={},dynamic=mark,pad_multiple={}"
    df, _ = load_for_analysis(
        make_sweep(trial(setting.format(scope, 8 * (at + 1)), 500, 20) for at in range(pairs) for scope in ("full", "regional"))
    )
    is_regional = (df["scope"] == "regional").to_numpy()
    for _ in range(100):
        rates = np.full(len(df), 500.0)
        rates[is_regional] *= 1.2 * np.exp(0.1 * source.standard_normal(pairs))
        ends = {"samples_per_s_low": 0.999 * rates, "samples_per_s_high": 1.001 * rates}
        (effect,) = [one for one in effects(df.assign(samples_per_s=rates, **ends)) if one.name == "scope"]
        assert effect.pairs == pairs
        covered += effect.rate.low <= 0.2 <= effect.rate.high
    assert covered >= 90


def test_a_change_of_two_fields_is_no_effect(make_sweep: MakeSweep) -> None:
    records = [trial("scope=full", 500, 60), trial("scope=regional,optimizer=fused", 600, 15)]
    assert effects(analysis.load(make_sweep(records))) == []


def test_what_follows_from_a_field_is_no_change_of_its_own(make_sweep: MakeSweep) -> None:
    """dynamic=mark pads to the longest, and reduce-overhead uses CUDA graphs: each is one change."""
    records = [
        trial("scope=full", 500, 60), trial("scope=full,dynamic=mark", 700, 70),
        trial("scope=full,mode=reduce-overhead", 550, 65),
        trial("scope=eager,padding=max", 400, 1), trial("scope=eager,padding=longest", 420, 1),
    ]  # fmt: skip
    found = {(one.name, one.before, one.after) for one in effects(analysis.load(make_sweep(records)))}
    assert found == {
        ("dynamic", "mark, pad to longest, pad multiple 8", "static, pad to max"),
        ("mode", "default", "reduce-overhead"),
        ("scope", "eager", "full"),
        ("padding, eager", "pad to longest, pad multiple 8", "pad to max"),
    }


def test_trials_of_other_conditions_make_no_pair(make_sweep: MakeSweep) -> None:
    for other in ({"num_workers": 4}, {"environment_key": "other"}, {"pipeline": "real"}):
        records = [trial("scope=full", 500, 60), trial("scope=regional", 480, 15, **other)]
        folder = make_sweep(records)
        assert effects(analysis.load(folder)) == []
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_noisy_trials_count_and_wrong_ones_do_not(make_sweep: MakeSweep) -> None:
    noisy = trial("scope=regional", 480, 15, stable=False, samples_per_s_ci95=(380.0, 580.0))
    wrong = trial("scope=modular", 900, 15, status=Status.INFEASIBLE, label="nan")
    (effect,) = effects(analysis.load(make_sweep([trial("scope=full", 500, 60), noisy, wrong])))
    assert (effect.before, effect.after) == ("full", "regional")
    assert effect.rate.low < -0.15
    assert effect.rate.high > 0.1


def test_regions_have_prices_from_modular_records(make_sweep: MakeSweep) -> None:
    """Compiling the encoder costs 30 s and saves 12.8 ms a step."""
    records = [
        trial("scope=modular", 500, 70),
        trial("scope=modular,parts.encoder.compile=off", 64_000 / 140.8, 40),
        trial("scope=modular,parts.encoder.mode=max-autotune", 520, 300),
        trial("scope=modular,optimizer=compiled", 510, 80),
        trial("scope=full", 600, 60),
        trial("scope=full,optimizer=compiled", 700, 75),
    ]
    found = {(one.name, one.before, one.after): one for one in region_prices(analysis.load(make_sweep(records)))}
    encoder = found["parts.encoder", "eager", "—"]
    assert encoder.compile_s is not None
    assert encoder.step_ms is not None
    assert encoder.compile_s.value == pytest.approx(30)
    assert encoder.step_ms.value == pytest.approx(-12.8)
    assert encoder.steps_to_pay == pytest.approx(30 / 0.0128)
    assert ("parts.encoder", "—", "mode=max-autotune") in found
    assert found["optimizer", "foreach", "compiled"].pairs == 1, "of the modular ones alone"
    worse = found["parts.encoder", "eager", "mode=max-autotune"]
    assert worse.steps_to_pay is not None


def test_of_warm_trials_the_price_is_of_what_they_would_compile_cold(make_sweep: MakeSweep) -> None:
    warm = {"caches": Caches.WARM, "cold_equivalent_s": 40.0}
    records = [trial("scope=modular", 500, 70), trial("scope=modular,parts.encoder.compile=off", 450, 3, **warm)]
    (encoder,) = region_prices(analysis.load(make_sweep(records)))
    assert encoder.compile_s is not None
    assert encoder.compile_s.value == pytest.approx(30)


def test_what_is_slower_is_never_paid_back(make_sweep: MakeSweep) -> None:
    (effect,) = effects(analysis.load(make_sweep([trial("scope=full", 600, 60), trial("scope=regional", 500, 15)])))
    assert effect.steps_to_pay is None


def test_what_lowers_throughput_is_not_paid_back_by_the_mean_of_steps(make_sweep: MakeSweep) -> None:
    """A long step gets a tenth shorter, a short one a third longer: fewer samples per second by the mean of ratios."""
    records = [
        trial(f"scope=full,workload.batch_size={size}{further}", 64e3 / step_ms, 60, step_ms=[step_ms] * 4)
        for size, steps_ms in ((64, (1000.0, 900.0)), (32, (10.0, 15.0)))
        for further, step_ms in zip(("", ",autocast=off"), steps_ms, strict=True)
    ]
    (effect,) = (one for one in effects(analysis.load(make_sweep(records))) if one.name == "autocast")
    assert effect.step_ms is not None
    assert effect.step_ms.value < 0
    assert effect.rate.value < 0
    assert effect.steps_to_pay is None


def test_an_empty_sweep_has_nothing_to_say(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([]))
    assert effects(df) == region_prices(df) == []
