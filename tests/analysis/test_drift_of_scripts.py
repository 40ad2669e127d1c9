"""No verdict about a script is more certain than the speed of its machine between trials: made-up records of one sweep."""

from __future__ import annotations

from typing import Any

import pytest
from sweep_folders import MakeSweep, trial

from analysis.choose.break_even import Job
from analysis.choose.decision import Outcome
from analysis.load import load_for_analysis
from analysis.recommend import Recommendation, recommend
from compile_sweep.schema.record import TrialRecord

JOB = Job(steps=1_000_000)
BASELINE, FULL, REGIONAL = "scope=eager,as_written=on", "scope=full,dynamic=auto", "scope=regional,dynamic=auto"


def figure(trial_id: str, settings: str, samples_per_s: float, device: str) -> TrialRecord:
    interval = (0.999 * samples_per_s, 1.001 * samples_per_s)
    known: dict[str, Any] = {"trial_id": trial_id, "device": device, "pipeline": "script", "samples_per_s_ci95": interval}
    return trial(settings, samples_per_s, 1.0, **known)


def recommended(make_sweep: MakeSweep, device: str, *rates: tuple[str, float]) -> Recommendation:
    records = [figure(str(number), *setting_and_rate, device) for number, setting_and_rate in enumerate(rates)]
    df, attempts = load_for_analysis(make_sweep(records))
    return recommend(df, JOB, attempts=attempts)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
@pytest.mark.parametrize("rates", [(100, 140, 140), (140, 100, 100), (100, 100, 140), (140, 140, 100), (100, 140, 100)])
def test_a_machine_whose_speed_changes_by_40_percent_leaves_no_verdict(
    device: str, rates: tuple[float, float, float], make_sweep: MakeSweep
) -> None:
    if device != "cpu" and rates[0] == rates[-1]:
        return  # a GPU that is as fast after as before was not slower in between
    found = recommended(make_sweep, device, *zip((BASELINE, FULL, BASELINE), rates, strict=True)).decision
    assert found.outcome is Outcome.UNCLEAR
    assert found.saving is not None
    assert 0.05 < found.saving.probability < 0.95


@pytest.mark.parametrize("rate", [70, 140])
def test_one_measurement_of_a_script_on_a_cpu_counts_the_usual_drift(rate: float, make_sweep: MakeSweep) -> None:
    assert recommended(make_sweep, "cpu", (BASELINE, 100), (FULL, rate)).decision.outcome is Outcome.UNCLEAR


@pytest.mark.parametrize(
    ("device", "rates"), [("cpu", (100, 200, 101)), ("NVIDIA H200", (100, 106, 100.5)), ("NVIDIA H200", (100, 130, 110))]
)
def test_a_gain_beyond_the_drift_that_was_seen_is_a_verdict(
    device: str, rates: tuple[float, float, float], make_sweep: MakeSweep
) -> None:
    found = recommended(make_sweep, device, *zip((BASELINE, FULL, BASELINE), rates, strict=True)).decision
    assert found.outcome is Outcome.USE


def test_a_gain_within_the_drift_that_was_seen_is_none(make_sweep: MakeSweep) -> None:
    rates = ((BASELINE, 100.0), (REGIONAL, 103.0), (FULL, 106.0), (BASELINE, 105.0))
    assert recommended(make_sweep, "NVIDIA H200", *rates).decision.outcome is Outcome.UNCLEAR


def test_enough_measurements_of_a_quiet_cpu_are_taken_at_their_word(make_sweep: MakeSweep) -> None:
    baselines = [(BASELINE, 100 + 0.2 * number) for number in range(6)]
    assert recommended(make_sweep, "cpu", *baselines, (FULL, 106)).decision.outcome is Outcome.USE


def test_a_workload_keeps_the_usual_noise(make_sweep: MakeSweep) -> None:
    records = [trial("scope=eager", 100, 0.1, device="cpu"), trial("scope=full", 106, 1, device="cpu")]
    df, attempts = load_for_analysis(make_sweep(records))
    assert recommend(df, JOB, attempts=attempts).decision.outcome is Outcome.USE
