"""How far a right run may be from eager runs, given how far these are from each other.

Background. If steps draw random numbers (dropout), right runs scatter. The eager runs are draws from the same distribution, so
the deviation of the run under test, divided by their standard deviation at that step, has Student's t distribution; the steps'
probabilities are combined by Fisher's method. A step counts as much as it is certain: while eager runs are close to each
other, a wrong constant factor of a percent is found; where they have drifted apart by chance, nothing is concluded.

If steps are deterministic, only rounding differs. Two eager runs round almost alike, so their distance from a more
precise run is the scale, and a run that rounds differently but equally finely has errors of the same variance: the ratio of
variances has Fisher's F distribution.

All quantiles are chosen so that the comparisons of one check together raise a false alarm at the rate `FALSE_ALARM_RATE`
(Bonferroni). The constants are based on figures in docs/log.md. Quantiles of Fisher's F and χ² come first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@cache
def f_quantile(tail: float, above: float, below: float) -> float:
    """Returns the value that an F-distributed variable exceeds with probability `tail`.

    Args:
        tail: Probability, below a half.
        above: Degrees of freedom of the numerator, at least 1.
        below: Degrees of freedom of the denominator, at least 1.
    """
    from scipy.special import betaincinv  # takes 0.2 s to load, which only a check of numbers needs

    share = float(betaincinv(below / 2, above / 2, tail))
    return below * (1 - share) / (above * share)


def chi_square_quantile(tail: float, degrees: float) -> float:
    """Returns the value that a χ² variable exceeds with probability `tail`, by Wilson and Hilferty (1931), to about 1%."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NormalDist().inv_cdf(1 - tail) * math.sqrt(spread)) ** 3


_SMALLEST_TAIL = 1e-300  # smaller ones are 0 in float64


def minus_two_log_p(deviations: Sequence[float] | NDArray[np.float64], degrees: int) -> NDArray[np.float64]:
    """Returns, for t-distributed values, -2 log of the probability of one as far from zero: χ² with 2 degrees of freedom."""
    from scipy.special import betainc

    tails = betainc(degrees / 2, 0.5, degrees / (degrees + np.square(deviations)))
    found: NDArray[np.float64] = -2 * np.log(np.maximum(tails, _SMALLEST_TAIL))
    return found


FALSE_ALARM_RATE = 1e-3  # probability that one check calls a right run diverging: one setting in a thousand

MAX_CALM_RATIO = 2.0
"""A step is judged only while its scatter is at most this multiple of the quietest steps'. Beyond it, chance differences have
grown through training: consecutive steps err alike, and more than a normal distribution allows.
"""

MAX_DIMENSIONS = 30
"""Number of independent directions that a group's parameters may scatter in; 40 and more were measured for groups of 128
elements.
"""

FLIPPED_ELEMENTS = 12
"""Number of elements with the largest differences that a distance leaves out, at most a tenth. Adam moves an element whose
gradient is only rounding noise by a whole step either way. That is rare: if no eager run met it, a right run meets more than 12
of them with a probability below that of a false alarm (Poisson, -log 1e-5 = 11.5).
"""

FLOAT32_ROUNDING = 2.0**-24  # relative rounding error of float32
RECORDED_ROUNDING = 4 * FLOAT32_ROUNDING  # relative rounding of the recorded numbers, which are float32 and sums of such
_FURTHEST = 1e9  # relative deviation at which larger ones are clipped, so that squares do not overflow
COARSE_FACTOR = 16.0
"""Roundings that one kernel may err by more than another, where no more precise run shows the effect of rounding. Gradients of a
small convolutional network with batch normalization are off by 3e-6 in `channels_last` on a CPU and by 3e-7 without
(docs/log.md).
"""

FLOAT8_ROUNDING = 2.0**-4
"""Relative rounding error of float8 with three fraction bits (e4m3). A run in float8 is compared with eager runs without it, and
may be that far from them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity that each step has and in which runs are compared."""

    name: str
    correlation: float
    """Number of steps that carry the information of one independent step: the variance of Fisher's statistic relative to that of
    independent steps. Measured in eager runs of captioning.
    """
    roundings: float
    """Roundings of the compute dtype by which the value may be off if the eager runs happen to agree."""
    single_steps: bool
    """Whether a single step can fail a run; not if chance has longer tails than a normal distribution."""
    least: float = 0.0
    """Relative difference that is always allowed, in any precision."""


LOSS = Quantity(name="loss", correlation=2.0, roundings=1 / 8, single_steps=True)
"""The loss is a mean over many tokens, computed in float32, so that their roundings average out."""

_LEAST = 1e-4
"""Right runs in float32 differ by this much in gradients and updates. A ReLU's input so close to zero that a kernel's rounding
decides its sign changes a convolution's gradient by 1e-5 to 1.5e-4 of its norm, and `channels_last` on a CPU does so to one step
in two, where weights off by a rounding do so to none; compiled Adam takes powers of its betas in float32, which is 7e-6 of an
update (docs/log.md).
"""

GRADIENTS = Quantity(name="gradients", correlation=2.5, roundings=1.0, single_steps=True, least=_LEAST)
UPDATES = Quantity(name="updates", correlation=2.5, roundings=1 / 4, single_steps=False, least=_LEAST)
"""Adam averages gradients, so consecutive updates are alike. Other kernels for the same attention moved one block's by 0.62% on
an H200, where an eighth of a rounding allowed 0.59% (docs/log.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far a run is from eager in one quantity, and how far it may be; relative."""

    gap: float | None
    """None if a number is not finite."""
    tolerance: float | None
    kind: str
    """rms: root mean square over the steps; constant: the constant error that would be as surprising as all steps together;
    step: error of a single step; distance: distance of parameters.
    """

    @property
    def share(self) -> float:
        """The gap in units of its tolerance; above 1 is out of tolerance."""
        if self.gap is None or self.tolerance is None:
            return math.inf
        return self.gap / self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonContext:
    """What tolerances depend on besides the runs."""

    random: bool  # whether right runs draw different random numbers
    has_precise: bool  # whether the last of the eager runs is a more precise one
    rounding: float  # relative rounding error of one operation under the settings
    comparisons: int  # number of comparisons in the check
    calm: Sequence[int]  # indices of the steps that are judged

    @property
    def level(self) -> float:
        """Probability of a false alarm allowed for each comparison."""
        return FALSE_ALARM_RATE / self.comparisons

    def floor(self, roundings: float) -> float:
        """Returns the relative difference that is always tolerated."""
        fine = self.has_precise or self.rounding >= FLOAT8_ROUNDING
        return (roundings * self.rounding + RECORDED_ROUNDING) * (1 if fine else COARSE_FACTOR)


def calm_steps(eager: Sequence[Sequence[Sequence[float]]]) -> list[int]:
    """Returns the indices of the steps at which eager runs have not drifted apart."""
    values = np.array(eager)
    centers = values.mean(axis=1, keepdims=True)
    relative = np.divide(values - centers, centers, out=np.zeros_like(values), where=centers != 0)
    scatter = np.sqrt((relative**2).mean(axis=(0, 1)))
    quiet = np.sort(scatter)[min(2, len(scatter) - 1)]
    return [int(step) for step in np.flatnonzero(scatter <= MAX_CALM_RATIO * quiet)]


def compare_series(
    respect: Quantity, run: Sequence[float], eager: Sequence[Sequence[float]], sizes: Sequence[float], about: ComparisonContext
) -> tuple[Gap, list[float]]:
    """Compares a value that each step has.

    Args:
        eager: Values of the eager runs, the precise one last.
        sizes: For each step, the total that the value is a part of, whose float32 rounding it carries.

    Returns:
        The gap nearest to its tolerance or furthest above it, and that of each judged step by itself, 0 for the others.
    """
    calm = list(about.calm)
    values = np.array(eager, dtype=np.float64)[:, calm]
    # Deterministic runs round around the precise one; random ones scatter around their mean.
    centers = values[-1] if about.has_precise and not about.random else values.mean(axis=0)
    scales = np.maximum(np.abs(centers), RECORDED_ROUNDING * np.array(sizes)[calm])
    scales[scales == 0] = 1.0
    with np.errstate(over="ignore"):
        deviations = ((np.array(run, dtype=np.float64)[calm] - centers) / scales).clip(-_FURTHEST, _FURTHEST)
    variances = (((values - centers) / scales) ** 2).sum(axis=0) / (len(values) - 1)
    floor = max(respect.least, about.floor(respect.roundings))
    if respect is LOSS and about.rounding >= FLOAT8_ROUNDING:
        # Rounding moves the weights' way in all directions, so it does little to how far the way changes the loss.
        changes = (centers - centers[0]) / scales
        floor += about.floor(1.0) * math.sqrt(float((changes**2).mean()))
    if about.random:
        spreads = np.sqrt((variances + floor**2) * (1 + 1 / len(values)))
        gap = _of_random(respect, deviations, spreads, len(values) - 1, about.level)
    else:
        draws = max(1.0, len(deviations) / respect.correlation)
        limit = math.sqrt(f_quantile(about.level, draws, draws) * float(variances.mean())) + floor
        gap = Gap(gap=math.sqrt(float((deviations**2).mean())), tolerance=limit, kind="rms")
    steps = np.zeros(len(run))
    steps[calm] = np.abs(deviations)
    return gap, steps.tolist()


CHANCE_MARGIN = 5.0
"""How many times as far from the others as an eager run a compiled run may be if random numbers act rarely."""

RARE_RATIO = 10.0
"""Random numbers act rarely if the furthest eager run is this many times as far from the median as half of them are; of 13 runs
with normal scatter it is about 3 times as far.
"""


def steps_of_rare_chance(eager: Sequence[Sequence[float]]) -> NDArray[np.bool_]:
    """Tells for each step whether random numbers acted in only a few of the eager runs.

    Dropout with a probability of 0.001 and a block that is rarely skipped leave most eager runs alike in most steps. A normal
    distribution fitted to those allows nearly nothing, and calm steps are those without such numbers.
    """
    centers, apart = _apart(eager)
    few: NDArray[np.bool_] = apart.max(axis=0) > RARE_RATIO * (np.median(apart, axis=0) + RECORDED_ROUNDING * np.abs(centers))
    return few


def _apart(eager: Sequence[Sequence[float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the median of the runs in each step, and how far each run is from it."""
    values = np.array(eager, dtype=np.float64)
    centers: NDArray[np.float64] = np.median(values, axis=0)
    return centers, np.abs(values - centers)


def widened_by_chance(gap: Gap, run: Sequence[float], eager: Sequence[Sequence[float]], calm: Sequence[int]) -> Gap:
    """Widens a tolerance of `compare_series` by what random numbers do to eager runs in the steps in which they act rarely.

    It stays as it is if the run is off in most steps, as one with a fault is.
    """
    centers, apart = _apart(eager)
    own = np.abs(np.array(run, dtype=np.float64) - centers)
    usual = np.median(apart, axis=1).max() + RECORDED_ROUNDING * np.median(np.abs(centers))
    if np.median(own) > CHANCE_MARGIN * usual:
        return gap
    furthest = apart.max(axis=0)[steps_of_rare_chance(eager)].max(initial=0.0)
    return _widened(gap, float(furthest), float(own[list(calm)].max()))


def _widened(gap: Gap, furthest: float, own: float) -> Gap:
    """Allows `CHANCE_MARGIN` times what the furthest eager run is apart; the run that has this gap is `own` apart."""
    if gap.gap is None or not own:
        return gap
    return replace(gap, tolerance=max(gap.tolerance or 0.0, gap.gap * CHANCE_MARGIN * furthest / own))


def _of_random(
    respect: Quantity, deviations: NDArray[np.float64], spreads: NDArray[np.float64], degrees: int, level: float
) -> Gap:
    level = level / 2 if respect.single_steps else level
    together = max(1.0, 2 * len(deviations) / respect.correlation)
    limit = respect.correlation * chi_square_quantile(level, together)
    gaps = [
        Gap(
            gap=_constant(float(minus_two_log_p(deviations / spreads, degrees).sum()), spreads, degrees),
            tolerance=_constant(limit, spreads, degrees),
            kind="constant",
        )
    ]
    if respect.single_steps:
        furthest = int(np.argmax(np.abs(deviations) / spreads))
        allowed = math.sqrt(f_quantile(level / len(deviations), 1, degrees))
        gaps.append(Gap(gap=float(abs(deviations[furthest])), tolerance=allowed * float(spreads[furthest]), kind="step"))
    return max(gaps, key=lambda gap: gap.share)


def _constant(surprises: float, spreads: NDArray[np.float64], degrees: int) -> float:
    """Returns the deviation that would be equally surprising if it were the same in all steps."""
    low, high = 0.0, float(spreads.max())
    while minus_two_log_p(high / spreads, degrees).sum() < surprises and high < 1e6:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if minus_two_log_p(middle / spreads, degrees).sum() < surprises else (low, middle)
    return high


def compare_movement(run: Tensor, eager: Sequence[Tensor], start_norm: float, steps: int, about: ComparisonContext) -> Gap:
    """Compares a group's displacement, relative to how far it went in the last, precise eager run."""
    scale = max(float(torch.linalg.vector_norm(eager[-1])), RECORDED_ROUNDING * start_norm) or 1.0
    # The largest distance between two, because eager runs that round alike say nothing about rounding.
    largest = max(_distance(a, b) for i, a in enumerate(eager) for b in eager[i + 1 :]) / scale
    if about.random:
        runs = len(eager)
        draws = min(MAX_DIMENSIONS, max(1.0, run.numel() / 4))
        factor = f_quantile(about.level, draws, draws * (runs - 1)) * (1 + 1 / runs) / 2
        center = torch.stack(list(eager)).mean(dim=0)
    else:
        factor = f_quantile(about.level, steps, steps)
        center = eager[-1]
    # About the fraction `rounding` of a gradient's elements is rounding noise, and Adam moves each of them by a whole step either
    # way: that fraction of the square of the movement is the square of a distance.
    floor = math.sqrt(about.floor(1.0))
    return Gap(gap=_distance(run, center) / scale, tolerance=math.sqrt(factor) * largest + floor, kind="distance")


def movement_widened_by_chance(gap: Gap, run: Tensor, eager: Sequence[Tensor]) -> Gap:
    """Widens a tolerance of `compare_movement` where random numbers act rarely."""
    center = torch.stack(list(eager)).median(dim=0).values
    return _widened(gap, max(_distance(one, center) for one in eager), _distance(run, center))


def compare_outputs(
    run: Sequence[Tensor], eager: Sequence[Sequence[Tensor]], about: ComparisonContext
) -> tuple[Gap, list[float]]:
    """Compares the outputs of deterministic inference, element by element, relative to the size of the last eager run's.

    Args:
        eager: Elements in the eager runs, the precise one last.

    Returns:
        The gap over all steps, and that of each step.
    """
    sizes = [float(torch.linalg.vector_norm(outputs)) or 1.0 for outputs in eager[-1]]

    def gaps(of: Sequence[Tensor]) -> list[float]:
        pairs = zip(of, eager[-1], sizes, strict=True)
        return [float(torch.linalg.vector_norm(one - center)) / size for one, center, size in pairs]

    steps = gaps(run)
    scatter = max(_rms(gaps(other)) for other in eager[:-1])
    limit = math.sqrt(f_quantile(about.level, len(steps), len(steps))) * scatter + about.floor(1.0)
    return Gap(gap=_rms(steps), tolerance=limit, kind="rms"), steps


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _distance(one: Tensor, other: Tensor) -> float:
    difference = (one - other).abs()
    kept = difference.numel() - min(FLIPPED_ELEMENTS, difference.numel() // 10)
    return float(torch.linalg.vector_norm(difference.sort().values[:kept]))
