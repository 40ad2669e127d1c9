"""Decisions: use a setting, stay, or cannot tell, and what would tell."""

from __future__ import annotations

import pytest

from analysis.choose.decision import NEGLIGIBLE, Line, Outcome, clear_from_steps, decide, saving, step_saving
from analysis.decision_text import saving_words

EAGER = Line(fixed_s=1.0, fixed_sd_s=0.5, step_s=0.1, step_sd_s=0.0005)
COMPILED = Line(fixed_s=61.0, fixed_sd_s=3.0, step_s=0.05, step_sd_s=0.0005)
NOISY = Line(fixed_s=21.0, fixed_sd_s=3.0, step_s=0.049, step_sd_s=0.03)


@pytest.mark.parametrize(
    ("steps", "outcome"), [(100, Outcome.STAY), (1200, Outcome.UNCLEAR), (2000, Outcome.USE), (10**9, Outcome.USE)]
)
def test_the_longer_the_job_the_clearer_the_gain(steps: int, outcome: Outcome) -> None:
    assert decide([EAGER, COMPILED], 0, steps).outcome is outcome


def test_an_interval_with_zero_in_it_is_no_gain() -> None:
    """−31 to 41 s of 11 minutes."""
    baseline = Line(fixed_s=0.0, fixed_sd_s=0.0, step_s=0.066, step_sd_s=0.0)
    setting = Line(fixed_s=15.0, fixed_sd_s=18.37, step_s=0.0644, step_sd_s=0.0)
    found = decide([baseline, setting], 0, 10_000)
    assert found.saving is not None
    assert (round(found.saving.low_s), round(found.saving.high_s)) == (-35, 37)
    assert found.outcome is Outcome.UNCLEAR
    assert 0.5 < found.saving.probability < 0.55


def test_nothing_saves_more_than_the_whole_job() -> None:
    fast = Line(fixed_s=1.0, fixed_sd_s=0.5, step_s=0.01, step_sd_s=0.01)
    found = saving(fast, EAGER, 10**6)
    assert found.low_s < found.saved_s < found.high_s == EAGER.total_s(10**6)
    assert step_saving(fast, EAGER)[1] == 1.0


@pytest.mark.parametrize(("step_sd_s", "saves"), [(0.01, "30.4% to 69.6%"), (0.03, "−8.8% or more")])
def test_a_step_whose_speed_has_no_upper_end_saves_so_much_or_more(step_sd_s: float, saves: str) -> None:
    lines = [EAGER._replace(step_sd_s=0.0), COMPILED._replace(step_sd_s=step_sd_s)]
    assert saving_words(decide(lines, 0, 1000), lines, 1000)["step_saves"] == saves


def test_the_length_from_which_on_it_is_clear_is_where_the_outcome_changes() -> None:
    steps = clear_from_steps(COMPILED, EAGER)
    assert steps is not None
    assert decide([EAGER, COMPILED], 0, steps).outcome is Outcome.USE
    assert decide([EAGER, COMPILED], 0, steps - 1).outcome is Outcome.UNCLEAR
    assert decide([EAGER, COMPILED], 0, steps - 1).clear_from_steps == steps


def test_no_length_tells_settings_apart_whose_steps_scatter_by_more_than_they_differ() -> None:
    assert clear_from_steps(NOISY, EAGER) is None
    assert decide([EAGER, NOISY], 0, 10**9) == (Outcome.UNCLEAR, 1, 0, saving(NOISY, EAGER, 10**9), None)


def test_a_certain_gain_goes_before_a_larger_one_that_may_be_none() -> None:
    found = decide([EAGER, COMPILED, NOISY], 0, 10**6)
    assert (found.outcome, found.setting) == (Outcome.USE, 1)


def test_a_gain_that_is_certainly_tiny_is_none_to_change_anything_for() -> None:
    tiny = EAGER._replace(step_s=EAGER.step_s * (1 - NEGLIGIBLE / 2), step_sd_s=0.0)
    found = decide([EAGER._replace(step_sd_s=0.0), tiny], 0, 10**6)
    assert found.saving is not None
    assert found.saving.low_s > 0
    assert found.outcome is Outcome.STAY


def test_with_nothing_to_compare_there_is_no_saving() -> None:
    assert decide([EAGER], 0, 100) == (Outcome.STAY, None, 0, None, None)
    assert decide([COMPILED, NOISY], None, 100) == (Outcome.UNCLEAR, 1, None, None, None)


def test_what_may_not_be_used_is_compared_with_all_the_same() -> None:
    found = decide([EAGER, COMPILED], 0, 100, allowed=[False, True])
    assert (found.outcome, found.setting) == (Outcome.USE, 1)
    assert found.saving is not None
    assert found.saving.saved_s < 0
