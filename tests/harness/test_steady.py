"""The window's order of steps, and the coverage of its intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_workloads import Toy

from compile_sweep.contract.base import Batch
from compile_sweep.harness.steady import (
    Limits,
    Window,
    clock_drift,
    first_pass,
    grow,
    median_ci95,
    outliers,
    representative,
    speedup,
    step_ms_at,
    stratified_median,
    throughput,
)
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")
LENGTHS = [8, 16, 8, 24, 32]
TYPICAL_MS = [1.0 + length / 8 for length in LENGTHS]


def pool() -> list[Batch]:
    workload = Toy("only", 0)
    policy = CompileSettings.parse("scope=eager,padding=longest,pad_multiple=1").shape_policy(workload.max_length)
    return list(workload.pool(policy, rank=0, device=CPU))


def limits(min_passes: int, max_passes: int, target_width: float, min_window_s: float = 0.0) -> Limits:
    return Limits(min_passes=min_passes, max_passes=max_passes, min_window_s=min_window_s, target_width=target_width)


def drawn(source: np.random.Generator, passes: int, *, noise: float, drift: float = 0.0) -> list[list[float]]:
    clock = 1 + drift * source.standard_normal(passes)
    times = np.array(TYPICAL_MS) * clock[:, None] * (1 + noise * source.standard_normal((passes, len(LENGTHS))))
    return [list(map(float, row)) for row in times]


def test_eager_blocks_stand_between_passes_and_a_step_goes_untimed_at_every_switch() -> None:
    batches: list[Batch] = pool()
    seen: list[tuple[str, int]] = []

    def step_named(name: str) -> Callable[[Batch], torch.Tensor]:
        def step(batch: Batch) -> torch.Tensor:
            seen.append((name, batch.length))
            return torch.tensor(1.0)

        return step

    window = first_pass(step_named("compiled"), batches, CPU)
    window.chosen = [3, 1]
    grow(window, step_named("compiled"), batches, limits(3, 3, 0.0), CPU, reference=step_named("eager"))
    lengths = [batch.length for batch in batches]
    compiled = [("compiled", lengths[-1]), *(("compiled", length) for length in lengths)]
    eager = [("eager", lengths[1]), ("eager", lengths[3]), ("eager", lengths[1])]
    assert seen == [*compiled, *eager, *compiled, *eager, *compiled, *eager]
    assert (len(window.passes), len(window.eager_blocks)) == (3, 3)
    assert len(window.losses) == 3 * len(batches)


def test_a_window_of_equal_times_ends_at_once_a_noisy_one_at_its_limit_and_a_hopeless_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = pool()
    for noise, passes in ((0.0, 3), (0.012, 7), (0.2, 5)):
        times = iter(drawn(np.random.default_rng(0), 100, noise=noise))
        monkeypatch.setattr("compile_sweep.harness.steady.timed", lambda *_, times=times: next(times)[: len(batches)])
        window = first_pass(lambda _: torch.tensor(0.0), batches, CPU)
        grow(window, lambda _: torch.tensor(0.0), batches, limits(3, 7, 0.01), CPU)
        assert len(window.passes) == passes


def test_short_passes_may_be_more_than_the_limit_until_the_window_is_long_enough() -> None:
    batches = pool()
    window = first_pass(lambda _: torch.tensor(0.0), batches, CPU)
    grow(window, lambda _: torch.tensor(0.0), batches, limits(2, 4, 0.0, min_window_s=0.1), CPU)
    assert len(window.passes) > 4


def test_a_narrow_window_of_short_passes_lasts_as_long_as_its_limit_says_or_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, batches = [0.0], pool()

    def timed(*_: object) -> list[float]:
        now[0] += 0.01
        return [1.0] * len(batches)

    monkeypatch.setattr("compile_sweep.harness.steady.timed", timed)
    monkeypatch.setattr("compile_sweep.harness.steady.time.monotonic", lambda: now[0])
    for min_window_s, least, most in ((0.0, 4, 4), (0.3, 30, 36), (12.0, 100, 112)):
        window = first_pass(lambda _: torch.tensor(0.0), batches, CPU)
        grow(window, lambda _: torch.tensor(0.0), batches, limits(4, 8, 0.01, min_window_s), CPU)
        assert least <= len(window.passes) <= most


def test_a_window_that_has_had_its_time_ends_with_three_passes_however_wide_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, batches = [0.0], pool()

    def timed(*_: object) -> list[float]:
        now[0] += 4.0
        return [now[0]] * len(batches)

    monkeypatch.setattr("compile_sweep.harness.steady.timed", timed)
    monkeypatch.setattr("compile_sweep.harness.steady.time.monotonic", lambda: now[0])
    for max_window_s, passes in ((5.0, 3), (15.0, 5), (100.0, 8)):
        window = first_pass(lambda _: torch.tensor(0.0), batches, CPU)
        asked = replace(limits(4, 8, 0.0), max_window_s=max_window_s)
        grow(window, lambda _: torch.tensor(0.0), batches, asked, CPU)
        assert len(window.passes) == passes


@pytest.mark.parametrize(("noise", "passes"), [(0.0, 10), (0.2, 80)])
def test_a_wide_window_goes_on_longer_than_one_that_says_enough(
    noise: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, batches = [0.0], pool()
    times = iter(drawn(np.random.default_rng(0), 200, noise=noise))

    def timed(*_: object) -> list[float]:
        now[0] += 0.1
        return next(times)

    monkeypatch.setattr("compile_sweep.harness.steady.timed", timed)
    monkeypatch.setattr("compile_sweep.harness.steady.time.monotonic", lambda: now[0])
    window = first_pass(lambda _: torch.tensor(0.0), batches, CPU)
    asked = replace(limits(4, 8, 0.0 if noise else 0.01, min_window_s=1.0), wide_window_s=8.0)
    grow(window, lambda _: torch.tensor(0.0), batches, asked, CPU)
    assert passes <= len(window.passes) <= 1.3 * passes


def test_one_length_gives_the_plain_median_and_several_the_mean_of_each_lengths_own() -> None:
    passes = [[1.0, 9.0], [2.0, 10.0], [30.0, 11.0]]
    assert stratified_median(passes, [16, 16]) == statistics.median([1, 9, 2, 10, 30, 11])
    assert stratified_median(passes, [8, 16]) == (2 + 10) / 2


def test_lengths_that_differ_are_no_noise() -> None:
    low, high = median_ci95([TYPICAL_MS] * 3, LENGTHS)
    assert (low, high) == pytest.approx((statistics.fmean(TYPICAL_MS),) * 2)
    assert throughput([TYPICAL_MS] * 3, samples=5, tokens=50).ci95 == pytest.approx((5e3 / sum(TYPICAL_MS),) * 2)


@pytest.mark.parametrize("passes", [3, 8])
@pytest.mark.parametrize(("noise", "drift"), [(0.02, 0.0), (0.005, 0.01)])
def test_the_interval_of_the_typical_step_covers_the_true_one_about_as_often_as_it_says(
    passes: int, noise: float, drift: float
) -> None:
    source, covered, true = np.random.default_rng(1), 0, statistics.fmean(TYPICAL_MS)
    for _ in range(200):
        low, high = median_ci95(drawn(source, passes, noise=noise, drift=drift), LENGTHS)
        covered += low <= true <= high
    assert 0.90 <= covered / 200 <= 1.0


def interleaved(
    source: np.random.Generator, passes: int, *, ratio: float, noise: float, drift: float, shared: float = 0.0
) -> Window:
    """A device that slows down by `drift` with every pass and every block; steps have independent noise and `shared` noise."""
    window = Window(lengths=LENGTHS, chosen=[0, 3, 4])
    for k in range(passes):
        for times, ms, clock in (
            (window.passes, TYPICAL_MS, 1 + drift * 2 * k),
            (window.eager_blocks, [ratio * TYPICAL_MS[index] for index in window.chosen], 1 + drift * (2 * k + 1)),
        ):
            clock *= 1 + shared * source.standard_normal() if shared else 1.0
            times.append([step_ms * clock * (1 + noise * source.standard_normal()) for step_ms in ms])
    return window


def test_a_drifting_clock_cancels_in_the_speedup_and_shows_as_drift() -> None:
    window = interleaved(np.random.default_rng(0), 5, ratio=2.5, noise=0.0, drift=0.05)
    found = speedup(window)
    assert found is not None
    assert found.ratio == pytest.approx(2.5)
    assert clock_drift(window) == pytest.approx(1.45 / 1.05 - 1)
    apart = sum(map(math.fsum, window.eager_blocks)) / sum(pass_[index] for pass_ in window.passes for index in window.chosen)
    assert apart > 1.03 * 2.5  # the result of two consecutive windows


@pytest.mark.parametrize("passes", [3, 6, 8])
@pytest.mark.parametrize("shared", [0.0, 0.02])
def test_the_interval_of_the_speedup_covers_the_true_one_about_as_often_as_it_says(passes: int, shared: float) -> None:
    source, covered = np.random.default_rng(2), 0
    for _ in range(300):
        found = speedup(interleaved(source, passes, ratio=1.6, noise=0.01, drift=0.002, shared=shared))
        assert found is not None
        covered += found.ci95[0] <= 1.6 <= found.ci95[1]
    assert 0.91 <= covered / 300 <= 1.0


def test_no_speedup_is_claimed_without_a_pass_between_two_blocks_twice() -> None:
    source = np.random.default_rng(0)
    assert speedup(interleaved(source, 2, ratio=2.0, noise=0.01, drift=0.0)) is None
    alone = Window(lengths=LENGTHS, passes=[TYPICAL_MS] * 3)
    assert (speedup(alone), clock_drift(alone)) == (None, None)


def test_outliers_are_counted_against_their_own_batch() -> None:
    passes = [list(TYPICAL_MS) for _ in range(5)]
    passes[2][0] *= 1.6  # still shorter than a usual step of the longest batch
    passes[3][4] *= 1.4
    assert outliers(passes) == 1
    assert stratified_median(passes, LENGTHS) == pytest.approx(statistics.fmean(TYPICAL_MS))
    assert throughput(passes, samples=1, tokens=1).samples_per_s < 1e3 / sum(TYPICAL_MS)


def test_representative_batches_are_spread_over_the_lengths() -> None:
    lengths = [5, 90, 10, 80, 20, 70, 30, 60, 40, 50]
    assert [lengths[index] for index in representative(lengths, 5)] == [10, 30, 50, 70, 90]
    assert sorted(representative(lengths, 99)) == list(range(10))
    assert len(set(representative([16] * 50, 8))) == 8


def test_a_typical_step_is_the_median_of_its_length_and_on_a_line_between_lengths() -> None:
    window = Window(lengths=LENGTHS, passes=[TYPICAL_MS, [10 * ms for ms in TYPICAL_MS], TYPICAL_MS])
    for length in (8, 16, 20, 24, 4, 64):
        assert step_ms_at(window, length) == pytest.approx(1 + length / 8)
    assert step_ms_at(Window(lengths=[16, 16], passes=[[2.0, 4.0]]), 256) == 3.0
