"""What to expect of settings that were not tried, from those that were: a Gaussian process over their fields.

Two settings are taken to be alike by the fields they share: a part of a figure's variance belongs to each field alone, which
lets what one optimizer gains under one scope be expected under another, and a part to all of them together, which lets
particular combinations differ. Nothing is fitted but the scale of each figure, so that predictions take a millisecond and mean
the same from the first trial on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.search.candidates import Codes

Floats = npt.NDArray[np.float64]

_SHARED = 0.75
"""Share of the variance that fields explain one by one."""

_ALIKE = 0.6
"""Likeness, in the rest of the variance, of settings that differ in one field; in two it is the square, and so on."""

_NOISE = 0.02**2
"""Variance of a repeated measurement, as a share of the figure's own."""

_PRIOR_TRIALS = 2.0
"""How many trials the scale that a figure is taken to have before any is worth."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Between figures and the numbers that are modelled: logarithmic, save near zero, so that a figure may be zero or less."""

    unit: float
    centre: float
    spread: float

    @classmethod
    def of(cls, figures: Floats) -> Scale:
        """The scale of these figures, of which there is at least one."""
        sizes = np.abs(figures[figures != 0])
        unit = 0.02 * float(np.median(sizes)) if len(sizes) else 1.0
        logs = np.arcsinh(figures / unit)
        squares = float(np.sum((logs - logs.mean()) ** 2))
        return cls(unit, float(logs.mean()), float(np.sqrt((squares + _PRIOR_TRIALS * 0.5**2) / (len(logs) + _PRIOR_TRIALS))))

    def modelled(self, figures: Floats) -> Floats:
        """Numbers with a mean near 0 and a variance near 1."""
        return (np.arcsinh(figures / self.unit) - self.centre) / self.spread

    def figures(self, modelled: Floats) -> Floats:
        """The inverse."""
        return self.unit * np.sinh(np.clip(modelled * self.spread + self.centre, -50, 50))


def likeness(one: Codes, other: Codes) -> Floats:
    """The prior covariance of each setting with each other one, 1 for the same."""
    num_fields = one.shape[1]
    num_same = np.zeros((len(one), len(other)), dtype=np.intp)
    for mine, theirs in zip(one.T, other.T, strict=True):
        num_same += (mine[:, None] == theirs[None, :]) & (mine[:, None] >= 0)
    same = np.arange(num_fields + 1)
    by_same = _SHARED * same / max(1, num_fields) + (1 - _SHARED) * _ALIKE ** (num_fields - same)
    return np.asarray((by_same if num_fields else np.ones(1))[num_same], dtype=np.float64)


class Posterior:
    """What is known of some settings once others are.

    Args:
        known: likeness of settings that were tried, with each other.
        cross: of them, one a row, with settings to predict, one a column.
        is_seen: which of the known have results; the others are under way, and only make it less worth while to try their like.
    """

    def __init__(self, known: Floats, cross: Floats, is_seen: npt.NDArray[np.bool_]) -> None:
        self._weights = _solved(known[np.ix_(is_seen, is_seen)], cross[is_seen])
        weights = self._weights if is_seen.all() else _solved(known, cross)
        self.deviation: Floats = np.sqrt(np.maximum(1.0 - np.einsum("ka,ka->a", cross, weights), 1e-6))
        """Of each prediction, in modelled numbers."""

    def mean(self, modelled: Floats) -> Floats:
        """The expectation, in modelled numbers, of each setting to predict.

        Args:
            modelled: of each setting with results.
        """
        return modelled @ self._weights


def _solved(known: Floats, cross: Floats) -> Floats:
    """One row a known setting, one column one to predict: how much of the known one's number is expected of the other."""
    return np.asarray(np.linalg.solve(known + _NOISE * np.eye(len(known)), cross), dtype=np.float64)
