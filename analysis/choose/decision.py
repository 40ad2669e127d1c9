"""Whether to change what is run today: use a setting, stay, or cannot tell. Pure functions.

A job of n steps takes `fixed_s + step_s · n`. Each of the two is known up to a standard deviation, so what one setting saves
against another is known up to one, too, and the probability that it saves anything follows. `page/templates/decision.js` decides
alike for the job that a reader of the report sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist
from typing import NamedTuple

from analysis.choose.uncertainty import Z95

NEGLIGIBLE = 0.01
"""A saving that is certainly below this share of the job is none to change anything for."""

LONGEST_STEPS = 10**12
"""Longer than any job."""


class Outcome(StrEnum):
    """What to do."""

    USE = "use"
    """The setting saves time for certain: its whole 95 % interval is above zero."""
    STAY = "stay"
    """No setting saves time worth having."""
    UNCLEAR = "unclear"
    """The 95 % interval of what is saved has zero in it, or there is nothing to compare with."""


class Line(NamedTuple):
    """What jobs take under one setting, and standard deviations of that."""

    fixed_s: float
    """All of the job's starts, compiling included."""
    fixed_sd_s: float
    step_s: float
    step_sd_s: float

    def total_s(self, steps: int) -> float:
        """Seconds of a job of so many steps."""
        return self.fixed_s + self.step_s * steps


class Saving(NamedTuple):
    """What a setting saves against the baseline over the whole job."""

    saved_s: float
    """Negative if it costs time."""
    low_s: float
    """Lower end of its 95 % interval."""
    high_s: float
    share: float
    """Of what the job takes under the baseline."""
    probability: float
    """That it saves anything."""


class Decision(NamedTuple):
    """What to do, and what it rests on."""

    outcome: Outcome
    setting: int | None
    """Place of the setting that it is about; None where there is no other than the baseline."""
    baseline: int | None
    """Place of what is run today; None if it has no usable trial."""
    saving: Saving | None
    """Of the setting against the baseline; None without either."""
    clear_from_steps: int | None = None
    """Of an unclear outcome, the length of a job from which on the setting saves time for certain; None if there is none."""


def decide(lines: Sequence[Line], baseline: int | None, steps: int, *, allowed: Sequence[bool] | None = None) -> Decision:
    """What to do for a job of so many steps.

    The setting it is about is the one that takes least of those that save time for certain, or, if none does, the one that takes
    least of all but the baseline.

    Args:
        lines: what jobs take under each setting; at least one.
        baseline: place of what is run today.
        steps: length of the job.
        allowed: which settings may be used; by default all. The baseline is compared with whether or not it is.
    """
    usable = [place for place in range(len(lines)) if allowed is None or allowed[place]]
    ranked = sorted((place for place in usable if place != baseline), key=lambda place: lines[place].total_s(steps))
    if baseline is None:
        return Decision(Outcome.UNCLEAR, ranked[0], None, None)
    if not ranked:
        return Decision(Outcome.STAY, None, baseline, None)
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
    """What a setting saves against the baseline in a job of so many steps."""
    whole_s = baseline.total_s(steps)
    saved_s = whole_s - setting.total_s(steps)
    sd_s = math.hypot(
        setting.fixed_sd_s, baseline.fixed_sd_s, steps * setting.step_sd_s, steps * baseline.step_sd_s
    )  # fmt: skip
    probability = NormalDist().cdf(saved_s / sd_s) if sd_s > 0 else float(saved_s > 0)
    return Saving(saved_s, saved_s - Z95 * sd_s, saved_s + Z95 * sd_s, saved_s / whole_s, probability)


def step_saving(setting: Line, baseline: Line) -> tuple[float, float]:
    """95 % interval of the share of the baseline's step that a setting's step saves."""
    saved = 1 - setting.step_s / baseline.step_s
    width = Z95 * math.hypot(setting.step_sd_s, baseline.step_sd_s) / baseline.step_s
    return saved - width, saved + width


def clear_from_steps(setting: Line, baseline: Line) -> int | None:
    """The length of a job from which on a setting saves time for certain; None if it never does.

    The lower end of the saving's interval is zero where (n·d - f)² = z² (n²·s² + c²), with d what a step saves, f what starts
    cost more, and s and c the deviations of both.
    """
    d, f = baseline.step_s - setting.step_s, setting.fixed_s - baseline.fixed_s
    s, c = math.hypot(setting.step_sd_s, baseline.step_sd_s), math.hypot(setting.fixed_sd_s, baseline.fixed_sd_s)
    leading = d * d - (Z95 * s) ** 2
    if d <= 0 or leading <= 0:
        return None
    root = math.sqrt(max((d * f) ** 2 - leading * (f * f - (Z95 * c) ** 2), 0.0))
    steps = max((d * f + root) / leading, 1.0)
    return math.ceil(steps) if steps <= LONGEST_STEPS else None
