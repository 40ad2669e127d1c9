"""The steady state of a script: a stream of steps, cut into passes, until the interval of their median is narrow.

Background: the figures are those of `steady.py`, whose passes go over a pool of batches. Here a pass is as many steps as take
about 0.3 s, followed by a step that is not timed, because the device was waited for. Steps that include an evaluation or a
checkpoint are left out, unless many do, in which case they belong to a typical step; where every second step of reinforcement
learning generates answers, say, a pass has as many steps of each kind.

A batch of a new length often takes a step several times as long, in eager training too: attention kernels are planned, memory
is allocated, CUDA graphs are recorded. A workload's warm-up goes through every length; a script's batches come as they come, so
steps with a new shape count as warm-up, unless they are not slower or shapes hardly ever come again. Even then a few that take
several times as long as the others are warm-up: of T5-base on an H200 one step in thirty took 2.2 to 3.1 s instead of 0.3 s,
always with the same batch, which made 38 of 50 samples/s.

Batches of different sizes take different times, which is no noise: the times of a FastSpeech's steps on an H200 varied by 26%, of
which all but 9% followed the number of elements in its batches. Such steps are timed as if each had a batch of the mean size, by
linear regression (Cochran, Sampling Techniques, chapter 7), and the mean is that of the script as it is, for all settings.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch

from compile_sweep.harness import steady
from compile_sweep.harness.distributed import agreed, agreed_numbers, largest_everywhere
from compile_sweep.harness.protocol import Protocol
from compile_sweep.harness.steady import Window
from compile_sweep.script.clock import StepClock, StepTime

PASS_S = 0.3  # approximate seconds of a pass
PASS_STEPS = (2, 50)  # minimum and maximum number of steps in a pass
LEAST_LAST = 20  # timed steps that give a figure where a script has ended; passes are shorter then, and its interval wide
LEAST_INTERRUPTED = 3  # timed steps with an evaluation that tell its share of the time; one is there by chance
USUAL_SHARE = 0.3  # fraction of steps that include an evaluation, above which it belongs to a typical step

SLOWER = 1.2
"""Ratio of a new shape's step to a typical one above which it counts as warm-up."""

MAX_NEW_S, MAX_NEW_STEPS, LEAST_SEEN = 20.0, 100, 0.3
"""Seconds or number of timed steps after which those with new shapes count, too, if fewer than this fraction had a known one;
half as many if fewer than half of it had.
"""


AS_BEFORE = 0.5
"""Fraction by which `LEAST_SEEN` must be missed for an answer other than that of the script as it is: a FastSpeech trained 140
samples/s in one run and 700 in another, because new shapes counted in the one and not in the other.
"""

FAR_SLOWER, RARE = 4.0, 0.1
"""Ratio to a typical step above which a new shape's step is warm-up in any case, if at most this fraction of steps is."""


LEAST_FITTED, LEAST_EXPLAINED, LEAST_F = 8, 0.25, 9.0
"""From which times are adjusted: number of steps, fraction of their variance that the sizes of their batches explain, and square
of the slope over its standard error.
"""


class _Line(NamedTuple):
    """A step's milliseconds by the number of elements of its batch."""

    at_zero_ms: float
    slope_ms: float
    explained: float
    """Fraction of the steps' variance."""


def _fit(steps: Sequence[StepTime]) -> _Line | None:
    """Returns the line through the times of steps; None unless larger batches certainly take longer."""
    times, sizes = [one.compute_ms for one in steps], [float(one.elements) for one in steps]
    if len(steps) < LEAST_FITTED or min(sizes) == max(sizes) or min(times) == max(times):
        return None
    slope, at_zero = statistics.linear_regression(sizes, times)
    explained = statistics.correlation(sizes, times) ** 2
    is_certain = explained * (len(steps) - 2) >= LEAST_F * (1 - explained)
    return _Line(at_zero, slope, explained) if slope > 0 and explained >= LEAST_EXPLAINED and is_certain else None


@dataclass(slots=True, kw_only=True)
class Stream:
    """Timed steps."""

    protocol: Protocol
    device: torch.device
    pass_steps: int
    keeps_interrupted: bool
    """Whether steps with an evaluation count, because most have one."""
    period: int = 1
    """Number of steps from one with an evaluation to the next, if they count and always come so; a pass has whole periods."""
    taken: list[StepTime] = field(default_factory=list)
    """All timed steps."""
    behind_ms: list[float] = field(default_factory=list)
    """Milliseconds that the device still worked when a pass's steps were launched."""
    core_wait_shares: list[float] = field(default_factory=list)
    """For each pass, the fraction of the time that threads could have run and other processes had their cores."""
    idle_shares: list[float] = field(default_factory=list)
    """For each pass, the fraction of the time that the script's thread slept outside of a `DataLoader`."""
    keeps_new: bool = False
    """Whether steps with new shapes count, except for the few that take several times as long."""
    passes: list[list[float]] = field(default_factory=list)
    """Milliseconds of steps that count, minus their wait for data."""
    explained: float = 0.0
    """Fraction of the steps' variance that the sizes of their batches explain, if times are adjusted to the mean size; else 0."""
    _marks: list[int] = field(default_factory=list)
    """For each of `taken`, 1 if it counts as warm-up."""
    _began: float = field(default_factory=time.monotonic)
    _look_again_at: int = 0
    _shows: bool = False
    _ended: int = 0
    """Number of passes that have ended."""

    @classmethod
    def after(cls, warmup: Sequence[StepTime], protocol: Protocol, device: torch.device) -> Self:
        """Returns a stream whose passes fit the last steps of a warm-up."""
        seen = [one.ms for one in warmup if not one.is_new][-5:]
        (step_ms,) = agreed_numbers([statistics.median(seen or [one.ms for one in warmup[-5:]])], device)
        least, most = PASS_STEPS
        steps = int(min(most, max(least, round(1e3 * PASS_S / max(step_ms, 1e-3)))))
        held = [at for at, one in enumerate(warmup) if one.interrupted]
        keeps_interrupted = len(held) > USUAL_SHARE * len(warmup)
        gaps = {after - before for before, after in pairwise(held)}
        period = largest_everywhere([gaps.pop() if keeps_interrupted and len(gaps) == 1 else 1], device)[0]
        steps = math.ceil(steps / period) * period
        return cls(protocol=protocol, device=device, pass_steps=steps, keeps_interrupted=keeps_interrupted, period=period)

    def before_next_pass(self) -> int:
        """Returns the number of the step before the next pass's first, which is its step 1: 0 or below.

        Now one step is left out and now two. What comes every few steps, such as a longer one, would otherwise be in all passes
        at the same places, and the rate too high or too low by up to a half.
        """
        self._ended += 1
        return -1 - self._ended % 2

    def note(self, clock: StepClock) -> None:
        """Keeps what a clock found beside the times of the pass that was taken last."""
        self.behind_ms.append(clock.behind_ms)
        self.core_wait_shares.append(clock.core_wait_share)
        self.idle_shares.append(clock.idle_share)

    @property
    def times(self) -> list[StepTime]:
        """Steps that count."""
        return [one for one, is_prepared in zip(self.taken, self._marks, strict=True) if not is_prepared and self._is_whole(one)]

    @property
    def prepared(self) -> list[StepTime]:
        """Steps with new shapes that count as warm-up."""
        return [one for one, is_prepared in zip(self.taken, self._marks, strict=True) if is_prepared and self._is_whole(one)]

    @property
    def interrupted(self) -> int:
        """Number of steps that do not count because they include an evaluation or a checkpoint."""
        return len(self.taken) - len(self._uninterrupted)

    @property
    def interrupted_share(self) -> float:
        """Fraction of the time that evaluations, checkpoints and the like took, beside their steps; 0 if too few to tell."""
        held = [one.ms for one in self.taken if one.interrupted]
        others = [one.ms for one in self.taken if not one.interrupted]
        if len(held) < LEAST_INTERRUPTED or not others:
            return 0.0
        return max(0.0, sum(held) - len(held) * statistics.median(others)) / (sum(held) + sum(others))

    @property
    def new(self) -> list[StepTime]:
        """Steps with new shapes."""
        return [one for one in self._uninterrupted if one.is_new]

    @property
    def shapes_recur(self) -> bool:
        """Whether enough steps had shapes that had come before."""
        return self._have_recurred(LEAST_SEEN)

    def _have_recurred(self, least: float) -> bool:
        return sum(not one.is_new for one in self._uninterrupted) >= least * len(self._uninterrupted)

    @property
    def extra_ms(self) -> float:
        """Milliseconds that a step with a new shape takes longer than its size explains; 0 within what steps vary by."""
        new, seen = self.new, [one for one in self._uninterrupted if not one.is_new]
        if not new:
            return 0.0
        if not seen:
            return math.inf
        new_ms, typical_ms = statistics.fmean(one.compute_ms for one in new), statistics.median(one.compute_ms for one in seen)
        if (line := _fit(seen)) is not None:  # large batches come with new shapes more often than small ones
            typical_ms = max(typical_ms, line.at_zero_ms + line.slope_ms * statistics.fmean(one.elements for one in new))
        return new_ms - typical_ms if new_ms > SLOWER * typical_ms else 0.0

    @property
    def _uninterrupted(self) -> list[StepTime]:
        return [one for one in self.taken if self._is_whole(one)]

    def _is_whole(self, one: StepTime) -> bool:
        return self.keeps_interrupted or not one.interrupted

    def _lacks_whole_steps(self) -> bool:
        """Tells whether hardly a step is without an evaluation or a checkpoint, although most of the warm-up were."""
        least = min(LEAST_LAST, 2 * self.pass_steps)
        return self.interrupted > USUAL_SHARE * len(self.taken) and len(self._uninterrupted) < least

    def _far_slower(self) -> list[int]:
        """Marks steps with new shapes that take several times as long as others, if they are few."""
        steps = self._uninterrupted
        limit_ms = FAR_SLOWER * statistics.median([one.compute_ms for one in steps] or [0.0])
        marks = [int(one.is_new and self._is_whole(one) and one.compute_ms > limit_ms) for one in self.taken]
        return marks if sum(marks) <= RARE * len(steps) else [0] * len(marks)

    @property
    def window(self) -> Window:
        """Returns the passes in the form that `steady.py` takes, with all steps alike; steps of two kinds are one, their mean."""
        if self.keeps_interrupted:
            return Window(lengths=[1], passes=[[statistics.fmean(steps)] for steps in self.passes])
        return Window(lengths=[1] * self.pass_steps, passes=self.passes)

    @property
    def median_ms(self) -> float:
        """Median milliseconds of a step; of steps of two kinds, of a pass's mean step."""
        return steady.stratified_median(self.window.passes, self.window.lengths)

    @property
    def wait_share(self) -> float:
        """Fraction of the time that was waiting for data."""
        counted = self.times
        return sum(one.wait_ms for one in counted) / sum(one.ms for one in counted)

    @property
    def is_stable(self) -> bool:
        """Whether the interval of the median is narrow."""
        return steady.relative_width(self.window) <= self.protocol.limits(self.device).target_width

    def take(self, times: Sequence[StepTime], *, are_last: bool = False) -> None:
        """Adds consecutive steps; all workers must call this alike, except for the last time, when a script ended by itself."""
        facts = [*(int(one.is_new) for one in times), *(one.elements for one in times)]
        facts = facts if are_last else largest_everywhere(facts, self.device)
        both = zip(times, facts[: len(times)], facts[len(times) :], strict=True)
        self.taken += [replace(one, is_new=bool(is_new), elements=elements) for one, is_new, elements in both]
        part = 1.0 if self._have_recurred(LEAST_SEEN / 2) else 0.5
        has_waited = len(self.taken) >= part * MAX_NEW_STEPS or time.monotonic() - self._began >= part * MAX_NEW_S
        is_late = are_last or has_waited
        if self._lacks_whole_steps() and (are_last or agreed(has_waited, self.device)):
            self.keeps_interrupted = True
        known = self.protocol.counts_new_shapes
        least = LEAST_SEEN if known is None else LEAST_SEEN * (1 + AS_BEFORE if known else 1 - AS_BEFORE)
        keeps_new = not self.extra_ms or (is_late and not self._have_recurred(least))
        self.keeps_new = keeps_new if are_last else agreed(keeps_new, self.device)
        self._marks = self._far_slower() if self.keeps_new else [int(one.is_new) for one in self.taken]
        if self.keeps_new and not are_last:  # workers may time a step differently
            self._marks = largest_everywhere(self._marks, self.device)
        counted = self.times
        if are_last and LEAST_LAST <= len(counted) < 2 * self.pass_steps:
            periods = len(counted) // self.period
            self.pass_steps = max(1, periods // self.protocol.min_passes) * self.period
        whole = len(counted) // self.pass_steps * self.pass_steps
        compute = self._adjusted(counted)[:whole]
        self.passes = [compute[at : at + self.pass_steps] for at in range(0, whole, self.pass_steps)]

    def _adjusted(self, steps: Sequence[StepTime]) -> list[float]:
        """Returns milliseconds of steps, as if each had a batch of the mean size where that explains what they vary by.

        What it leaves unexplained is scaled up by the uncertainty of the slope.
        """
        line = _fit(steps)
        self.explained = 0.0 if line is None else line.explained
        if line is None:
            return [one.compute_ms for one in steps]
        sizes = [float(one.elements) for one in steps]
        number, size = len(steps), self.mean_step[2]
        off = (size - statistics.fmean(sizes)) ** 2 / statistics.pvariance(sizes)
        scale = math.sqrt((number - 1) / (number - 2) * (1 + off))
        expected = line.at_zero_ms + line.slope_ms * size
        left = (one.compute_ms - line.at_zero_ms - line.slope_ms * one.elements for one in steps)
        return [max(1e-6, expected + scale * one) for one in left]

    @property
    def _sizes_differ(self) -> bool:
        return len({one.elements for one in self.taken}) > 1

    def begins_to_show(self) -> bool:
        """Tells, once, that the passes so far show how fast steps are: the first one, of batches that differ in size a few."""
        shows = bool(self.passes) and (len(self.times) >= LEAST_FITTED or not self._sizes_differ)
        begins, self._shows = shows and not self._shows, self._shows or shows
        return begins

    @property
    def slack(self) -> float:
        """How many times faster the steps may be than they seem, because batches differ in size: by two standard errors."""
        times = [ms for steps in self.passes for ms in steps]
        if not self._sizes_differ or len(times) < 2:
            return 1.0
        return 1 + 2 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)

    def to_keep(self) -> dict[str, Any]:
        """Returns what the protocol of other settings takes from the script as it is, by field."""
        found: dict[str, Any] = {"mean_step": self.mean_step} if self._uninterrupted else {}
        return {**found, "counts_new_shapes": self.keeps_new} if self.extra_ms else found

    @property
    def mean_step(self) -> tuple[float, float, float]:
        """Samples, tokens and elements of a mean step: of the script as it is, if known and batches have as many samples."""
        found = self._uninterrupted
        known, samples = self.protocol.mean_step, [one.samples for one in found]
        if known is not None and min(samples) <= known[0] <= max(samples):
            return known[0], known[1], known[2]
        tokens, elements = (statistics.fmean(map(attrgetter(name), found)) for name in ("tokens", "elements"))
        return statistics.fmean(samples), tokens, elements

    def is_long_enough(self) -> bool:
        """Tells whether to stop; worker 0 decides for all."""
        limits = self.protocol.limits(self.device)
        elapsed_s = time.monotonic() - self._began
        if steady.is_late(limits, elapsed_s, len(self.passes), self.device):
            return True
        if len(self.passes) < max(self._look_again_at, limits.min_passes):
            return agreed(False, self.device)
        self._look_again_at = steady.next_look(len(self.passes))
        return agreed(steady.is_long_enough(self.window, limits, elapsed_s), self.device)

    def mean_size(self) -> tuple[float, float]:
        """Returns samples and tokens of the mean step that the times are of."""
        if self.explained:
            return self.mean_step[:2]
        counted = self.times
        return statistics.fmean(one.samples for one in counted), statistics.fmean(one.tokens for one in counted)

    def throughput(self, samples: float, tokens: float) -> steady.Throughput:
        """Returns the rate, given the samples and tokens of a mean step."""
        return steady.throughput(self.passes, samples=samples * self.pass_steps, tokens=tokens * self.pass_steps)
