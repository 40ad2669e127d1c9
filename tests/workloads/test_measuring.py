"""The measuring protocol's arithmetic, and that its figures are what they say."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from toy_workloads import Toy

from workloads.measuring import Protocol, measure, median_ci95
from workloads.phases import Phase
from workloads.settings import CompileSettings

CPU = torch.device("cpu")


def test_phases_come_in_order_and_figures_agree_with_each_other() -> None:
    phases: list[Phase] = []
    found = measure(
        Toy("only", 0),
        CompileSettings.parse("scope=eager"),
        device=CPU,
        protocol=Protocol(compared_steps=2, min_passes=3, max_passes=3),
        on_phase=phases.append,
    )
    assert phases == [Phase.BUILDING, Phase.WARMING_UP, Phase.STEADY, Phase.CHECKING, Phase.DONE]
    assert found.steady_steps == len(found.step_ms) == 3 * Toy.pool_batches
    assert found.warmup_steps == 2 + 2  # two compared, one length visited twice
    assert found.compile_s == pytest.approx(max(0, found.warmup_s - found.warmup_steps * found.step_ms_median / 1e3), abs=1e-9)
    assert 0 < found.first_step_s <= found.warmup_s
    seconds = sum(found.step_ms) / 1e3
    assert found.samples_per_s == pytest.approx(found.steady_steps * Toy.batch_size / seconds, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(found.samples_per_s * Toy.max_length, rel=1e-6)
    low, high = found.samples_per_s_ci95
    assert low < found.samples_per_s < high
    assert found.mean_length == Toy.max_length


def test_the_warm_up_visits_every_length_even_those_the_pool_lacks() -> None:
    seen: list[int] = []

    class Watched(Toy):
        def batch_of_length(self, length: int, *, rank: int, device: torch.device):  # type: ignore[no-untyped-def]
            seen.append(length)
            return super().batch_of_length(length, rank=rank, device=device)

    settings = CompileSettings.parse("scope=eager,padding=longest,pad_multiple=2")
    found = measure(Watched("only", 0), settings, device=CPU, protocol=Protocol(compared_steps=1, min_passes=2, max_passes=2))
    assert seen == [2, 8, 12, 14]  # the pool's are 6, 16, 10 and 4
    assert found.warmup_steps == 1 + 2 * 8


def test_the_window_grows_until_its_limit_when_steps_are_noisy() -> None:
    protocol = Protocol(compared_steps=1, min_passes=2, max_passes=5, target_half_width=0.0)
    found = measure(Toy("only", 0), CompileSettings.parse("scope=eager"), device=CPU, protocol=protocol)
    assert found.steady_steps == 5 * Toy.pool_batches


def test_the_interval_of_the_median_covers_the_true_one_about_as_often_as_it_says() -> None:
    source = random.Random(0)
    covered = 0
    for _ in range(400):
        low, high = median_ci95([source.expovariate(1.0) for _ in range(101)])
        covered += low <= 0.6931 <= high
    assert 0.92 <= covered / 400 <= 0.99


def test_equal_seeds_give_equal_losses() -> None:
    protocol = Protocol(compared_steps=2, min_passes=2, max_passes=2)
    settings = CompileSettings.parse("scope=eager")
    losses = {measure(Toy("only", 7), settings, device=CPU, protocol=protocol).numerics["last_loss"] for _ in range(2)}
    assert len(losses) == 1
    assert statistics.fmean(losses) > 0
