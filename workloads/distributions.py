"""Quantiles and tails of the distributions that tolerances are taken from: Fisher's F, Student's t, χ²."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_INTERVALS = 200
"""Of Simpson's rule; gives tails of 1e-9 to six digits."""


@cache
def f_quantile(tail: float, above: float, below: float) -> float:
    """The value that an F-distributed one exceeds with probability `tail`.

    Args:
        tail: probability, below a half.
        above: degrees of freedom of the numerator, at least 1.
        below: degrees of freedom of the denominator, at least 1.
    """
    low, high = 0.0, 1.0
    while f_tail(high, above, below) > tail:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f_tail(middle, above, below) > tail else (low, middle)
    return high


def f_tail(value: float, above: float, below: float) -> float:
    """Probability that an F-distributed value exceeds `value`.

    With t = sin²θ, the regularised incomplete beta function I_x(below/2, above/2) at x = below / (below + above · value) is the
    integral of 2 sin^(below-1) θ cos^(above-1) θ / B(below/2, above/2) from 0 to asin √x.
    """
    end = math.asin(math.sqrt(below / (below + above * value)))
    angles = np.linspace(0.0, end, _INTERVALS + 1)
    weights = np.full(_INTERVALS + 1, 2.0)
    weights[1::2], weights[0], weights[-1] = 4.0, 1.0, 1.0
    integrand = np.sin(angles) ** (below - 1) * np.cos(angles) ** (above - 1)
    log_beta = math.lgamma(above / 2) + math.lgamma(below / 2) - math.lgamma((above + below) / 2)
    return 2 * math.exp(-log_beta) * float(weights @ integrand) * end / _INTERVALS / 3


def chi_square_quantile(tail: float, degrees: float) -> float:
    """The value that a χ²-distributed one exceeds with probability `tail`, after Wilson and Hilferty (1931), to about 1 %."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NormalDist().inv_cdf(1 - tail) * math.sqrt(spread)) ** 3


def surprise(deviations: Sequence[float] | NDArray[np.float64], degrees: int) -> NDArray[np.float64]:
    """For each of some t-distributed values, -2 log of the probability of one as far from zero: χ² with 2 degrees of freedom."""
    grid, values = _surprises(degrees)
    found: NDArray[np.float64] = np.interp(np.abs(deviations), grid, values)
    return found


@cache
def _surprises(degrees: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    grid = np.concatenate([[0.0], np.geomspace(1e-3, 1e9, 1200)])
    return grid, np.array([-2 * math.log(f_tail(t * t, 1.0, degrees)) for t in grid])
