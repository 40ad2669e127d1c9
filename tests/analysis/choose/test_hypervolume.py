"""Hypervolume compared with counting random points, and its reference point."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import MakeSweep, trial

import analysis
from analysis.choose.hypervolume import hypervolume, reference_point, volume

THREE = {"samples_per_s": "max", "compile_s": "min", "peak_memory_bytes": "min"}


@settings(deadline=None)  # a busy machine takes its time
@given(st.integers(1, 3), st.integers(0, 8), st.integers(0, 10_000))
def test_the_volume_is_the_share_of_cells_that_some_point_covers(dimensions: int, points: int, seed: int) -> None:
    """On a grid of integers every cell is covered or not, so counting is exact."""
    costs = np.random.default_rng(seed).integers(0, 7, size=(points, dimensions)).astype(float)
    cells = np.stack(np.meshgrid(*[np.arange(6)] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    covered = sum(any((cost <= cell).all() for cost in costs) for cell in cells)
    assert volume(costs, np.full(dimensions, 6.0)) == pytest.approx(covered)


def test_two_points_cover_two_rectangles_less_what_they_share(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep([trial("scope=eager", 500, 10), trial("scope=full", 900, 60)]))
    found = hypervolume(df, reference={"samples_per_s": 400, "compile_s": 100})
    assert found.value == pytest.approx(100 * 90 + 400 * 40)
    assert found.low < found.value < found.high


def test_a_worse_point_adds_nothing_and_an_unusable_one_neither(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    reference = {"samples_per_s": 400.0, "compile_s": 500.0}
    alone = hypervolume(analysis.pareto_front(df), reference=reference)
    assert hypervolume(df, reference=reference).value == pytest.approx(alone.value)


def test_the_volume_of_noisy_trials_is_that_of_their_front(make_sweep: MakeSweep) -> None:
    noisy = trial("scope=full", 1500, 50, stable=False, samples_per_s_ci95=(850.0, 6000.0))
    df = analysis.load(make_sweep([trial("scope=eager", 900, 0.5), noisy]))
    reference = {"samples_per_s": 0.0, "compile_s": 100.0}
    found = hypervolume(df, reference=reference)
    assert found.value == pytest.approx(900 * 99.5)
    assert found.value == pytest.approx(hypervolume(analysis.pareto_front(df), reference=reference).value)
    assert found.low <= found.value <= found.high


def test_the_reference_point_is_beyond_the_worst_of_all_frames(make_sweep: MakeSweep) -> None:
    df = analysis.load(make_sweep())
    slow, quick = df[df["compile_s"] > 30], df[df["compile_s"] < 30]
    point = reference_point(slow, quick, objectives=THREE)
    assert point["compile_s"] == pytest.approx(440 + 0.1 * (440 - 0.01))
    assert point["samples_per_s"] == pytest.approx(586 - 0.1 * (1046 - 586))
    assert point == reference_point(quick, slow, objectives=THREE)
    assert hypervolume(df, reference=point).value > 0


def test_a_noisy_trial_on_the_front_lies_before_the_reference_point(make_sweep: MakeSweep) -> None:
    noisy = trial("scope=eager", 950, 0.5, stable=False, samples_per_s_ci95=(500.0, 6000.0))
    df = analysis.load(make_sweep([noisy, trial("scope=full", 1000, 50)]))
    point = reference_point(df)
    assert point["samples_per_s"] == pytest.approx(500 - 0.1 * (1000 - 500))
    assert hypervolume(df, reference=point).value > hypervolume(df[df["samples_per_s"] > 950], reference=point).value
    unbounded = trial("scope=regional", 900, 5, stable=False, step_ms_ci95=(1.0, math.inf))
    other = analysis.load(make_sweep([unbounded, trial("scope=full", 1000, 50)], name="other"))
    assert math.isfinite(reference_point(other, objectives={"step_ms_median": "min"})["step_ms_median"])


def test_without_a_usable_trial_there_is_no_point_and_no_volume(make_sweep: MakeSweep) -> None:
    empty = analysis.load(make_sweep([]))
    with pytest.raises(ValueError, match="no trial is usable"):
        reference_point(empty)
    assert hypervolume(empty, reference={"samples_per_s": 1, "compile_s": 1}).value == 0


def test_an_objective_without_a_reference_is_refused(make_sweep: MakeSweep) -> None:
    with pytest.raises(ValueError, match="no 'compile_s'"):
        hypervolume(analysis.load(make_sweep()), reference={"samples_per_s": 1})
