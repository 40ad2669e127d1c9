"""Predicts untried settings from tried ones with a Gaussian process over their fields.

Two settings are similar by the fields they share: part of a figure's variance belongs to each field alone, so that an optimizer's
gain under one scope is expected under another, and part to all fields together, so that particular combinations may differ.
Only the scale of each figure is fitted, so that predictions take a millisecond and mean the same from the first trial on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from orchestrator.search.candidates import Codes

Floats = npt.NDArray[np.float64]

_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
NODES: Floats = _NODES
WEIGHTS: Floats = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()
"""Nodes that represent a standard normal variable, with their weights (Gauss-Hermite quadrature)."""

_SHARED = 0.75  # fraction of the variance that fields explain individually

_ALIKE = 0.6
"""Correlation, in the rest of the variance, between settings that differ in one field; with two, its square, and so on."""

_NOISE = 0.02**2  # variance of a repeated measurement, as a fraction of the figure's variance
_PRIOR_TRIALS = 2.0  # number of trials that the prior scale of a figure counts as


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts figures to modeled numbers and back: logarithmic, but linear near zero, so that figures may be zero or less."""

    unit: float
    centre: float
    spread: float

    @classmethod
    def of(cls, figures: Floats) -> Self:
        """Returns the scale of these figures, of which there must be at least one."""
        sizes = np.abs(figures[figures != 0])
        unit = 0.02 * float(np.median(sizes)) if len(sizes) else 1.0
        logs = np.arcsinh(figures / unit)
        squares = float(np.sum((logs - logs.mean()) ** 2))
        return cls(unit, float(logs.mean()), float(np.sqrt((squares + _PRIOR_TRIALS * 0.5**2) / (len(logs) + _PRIOR_TRIALS))))

    def modelled(self, figures: Floats) -> Floats:
        """Returns numbers with a mean near 0 and a variance near 1."""
        return (np.arcsinh(figures / self.unit) - self.centre) / self.spread

    def figures(self, modelled: Floats) -> Floats:
        """Returns the figures for modeled numbers, the inverse of `modelled`."""
        return self.unit * np.sinh(np.clip(modelled * self.spread + self.centre, -50, 50))


def likeness(one: Codes, other: Codes, fields: Sequence[Floats]) -> Floats:
    """Returns the prior correlation of each setting with each other one, 1 for the same."""
    shared = np.zeros((len(one), len(other)))
    for mine, theirs, alike in zip(one.T, other.T, fields, strict=True):
        shared += alike[np.ix_(mine, theirs)]
    num_fields = one.shape[1]
    if not num_fields:
        return np.ones_like(shared)
    return np.asarray(_SHARED * shared / num_fields + (1 - _SHARED) * _ALIKE ** (num_fields - shared), dtype=np.float64)


class Posterior:
    """Predictions for some settings, given others.

    Args:
        cross: Correlations of those with the settings to predict, of shape (tried, to predict).
        is_seen: Which of the tried ones have results; the others are running, and only make similar ones less worth trying.
    """

    def __init__(self, known: Floats, cross: Floats, is_seen: npt.NDArray[np.bool_]) -> None:
        self._weights = _solved(known[np.ix_(is_seen, is_seen)], cross[is_seen])
        weights = self._weights if is_seen.all() else _solved(known, cross)
        self.deviation: Floats = np.sqrt(np.maximum(1.0 - np.einsum("ka,ka->a", cross, weights), 1e-6))
        """Standard deviation of each prediction, in modeled numbers."""

    def mean(self, modelled: Floats) -> Floats:
        """Returns the expected value, in modeled numbers, of each setting to predict."""
        return modelled @ self._weights

    def drawn(self, figures: Floats) -> Floats:
        """Returns possible figures of each setting to predict, one column per node, given those of the tried ones."""
        scale = Scale.of(figures)
        return scale.figures(self.mean(scale.modelled(figures))[:, None] + self.deviation[:, None] * NODES)


def _solved(known: Floats, cross: Floats) -> Floats:
    """Returns the weight of each tried setting's number in each prediction, of shape (tried, to predict)."""
    return np.asarray(np.linalg.solve(known + _NOISE * np.eye(len(known)), cross), dtype=np.float64)
