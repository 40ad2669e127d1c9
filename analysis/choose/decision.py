"""Decides whether to change what is run today: use a setting, stay, or cannot tell. Pure functions.

A job of n steps takes `fixed_s + step_s · n`. Both have a standard deviation, hence so does the difference between two settings,
which gives the probability that one saves time. `page/templates/decision.js` decides in the same way for the job that a reader of
the report chooses.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

from analysis.choose.uncertainty import Z95

NEGLIGIBLE = 0.01  # fraction of the job below which a certain saving is not worth a change
LONGEST_STEPS = 10**12  # longer than any job, in steps


class Outcome(StrEnum):
    """What to do."""

    USE = "use"
    """The setting certainly saves time: its whole 95% interval is above zero."""
    STAY = "stay"
    """No setting saves enough time."""
    UNCLEAR = "unclear"
    """The 95% interval of the saving includes zero, or there is nothing to compare."""


class Line(NamedTuple):
    """A job's seconds under one setting as a function of its length, with standard deviations."""

    fixed_s: float  # all of the job's starts, including compiling
    fixed_sd_s: float
    step_s: float
    step_sd_s: float

    def total_s(self, steps: int) -> float:
        """Returns the seconds of a job of this many steps."""
        return self.fixed_s + self.step_s * steps


class Saving(NamedTuple):
    """What a setting saves over the whole job, relative to the baseline."""

    saved_s: float  # seconds saved; negative if it costs time
    low_s: float  # lower end of the 95% interval of `saved_s`
    high_s: float
    share: float  # fraction of the job's time under the baseline
    probability: float  # probability that it saves any time


class Decision(NamedTuple):
    """What to do, and the evidence."""

    outcome: Outcome
    setting: int | None
    """Index of the setting that the decision is about; None if there is none besides the baseline."""
    baseline: int | None
    """Index of what is run today; None if it has no usable trial."""
    saving: Saving | None
    """Saving of the setting over the baseline; None if either is missing."""
    clear_from_steps: int | None = None
    """For an unclear outcome, the job length from which on the setting certainly saves time; None if there is none."""


def decide(
    lines: Sequence[Line],
    baseline: int | None,
    steps: int,
    *,
    allowed: Sequence[bool] | None = None,
    tried_others: bool = True,
) -> Decision:
    """Decides for a job of this many steps.

    The decision is about the fastest of the settings that certainly save time or, if there are none, the fastest one except the
    baseline.

    Args:
        allowed: Which settings may be used; by default all. The baseline is compared with even if it is not allowed.
        tried_others: Whether settings besides the baseline were tried, usable or not.
    """
    usable = [place for place in range(len(lines)) if allowed is None or allowed[place]]
    ranked = sorted((place for place in usable if place != baseline), key=lambda place: lines[place].total_s(steps))
    if baseline is None:
        return Decision(Outcome.UNCLEAR, ranked[0], None, None)
    if not ranked:
        return Decision(Outcome.STAY if tried_others else Outcome.UNCLEAR, None, baseline, None)
    savings = {place: saving(lines[place], lines[baseline], steps) for place in ranked}
    chosen = next((place for place in ranked if savings[place].low_s > 0), ranked[0])
    found = savings[chosen]
    whole_s = lines[baseline].total_s(steps)
    if (found.low_s > 0 and found.high_s >= NEGLIGIBLE * whole_s) or baseline not in usable:
        return Decision(Outcome.USE, chosen, baseline, found)
    if found.high_s < NEGLIGIBLE * whole_s:
        return Decision(Outcome.STAY, chosen, baseline, found)
    return Decision(Outcome.UNCLEAR, chosen, baseline, found, clear_from_steps(lines[chosen], lines[baseline]))


def saving(setting: Line, baseline: Line, steps: int) -> Saving:
    """Returns what a setting saves over the baseline in a job of this many steps, which is at most the whole job."""
    whole_s = baseline.total_s(steps)
    saved_s = whole_s - setting.total_s(steps)
    sd_s = math.hypot(
        setting.fixed_sd_s, baseline.fixed_sd_s, steps * setting.step_sd_s, steps * baseline.step_sd_s
    )  # fmt: skip
    probability = NormalDist().cdf(saved_s / sd_s) if sd_s > 0 else float(saved_s > 0)
    return Saving(saved_s, saved_s - Z95 * sd_s, min(saved_s + Z95 * sd_s, whole_s), saved_s / whole_s, probability)


def step_saving(setting: Line, baseline: Line) -> tuple[float, float]:
    """Returns the 95% interval of the relative saving per step over the baseline."""
    saved = 1 - setting.step_s / baseline.step_s
    width = Z95 * math.hypot(setting.step_sd_s, baseline.step_sd_s) / baseline.step_s
    return saved - width, min(saved + width, 1.0)


def clear_from_steps(setting: Line, baseline: Line) -> int | None:
    """Returns the job length from which on a setting certainly saves time; None if it never does.

    The lower end of the saving's interval is zero where (n·d - f)² = z² (n²·s² + c²), where d is the saving per step, f the extra
    cost of the starts, and s and c are their standard deviations.
    """
    d, f = baseline.step_s - setting.step_s, setting.fixed_s - baseline.fixed_s
    s, c = math.hypot(setting.step_sd_s, baseline.step_sd_s), math.hypot(setting.fixed_sd_s, baseline.fixed_sd_s)
    leading = d * d - (Z95 * s) ** 2
    if d <= 0 or leading <= 0:
        return None
    root = math.sqrt(max((d * f) ** 2 - leading * (f * f - (Z95 * c) ** 2), 0.0))
    steps = max((d * f + root) / leading, 1.0)
    return math.ceil(steps) if steps <= LONGEST_STEPS else None
