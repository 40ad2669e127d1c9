"""Hypervolume: how much of the objectives' space a front covers, as one figure with its reference point."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.choose.pareto import DEFAULT_OBJECTIVES, assured_costs, signs_of, usable
from analysis.choose.uncertainty import drawn
from compile_sweep.schema import pareto
from compile_sweep.schema.objectives import Goal

_DRAWS = 200  # number of draws, enough for a 95% interval of one figure


class Hypervolume(NamedTuple):
    """The volume between a front and a reference point."""

    value: float
    """In the product of the objectives' units."""
    low: float
    high: float
    reference: Mapping[str, float]
    """The reference point, by objective; worse values do not count."""


def reference_point(*frames: pd.DataFrame, objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES) -> dict[str, float]:
    """Returns a point worse than the worst usable trial of all frames by a tenth of each objective's range, by `assured` figures.

    The tenth makes the two ends of the front count. Hypervolumes are comparable only with the same reference point.

    Raises:
        ValueError: The objectives are invalid as in `pareto_front`, or no frame has a usable trial.
    """
    points: list[pareto.Losses] = []
    for df in frames:
        signs = signs_of(df, objectives)
        costs = assured_costs(usable(df, *signs), signs)
        points += map(tuple, costs[np.isfinite(costs).all(axis=1)].tolist())  # trials with an unbounded figure are on no front
    if not points:
        raise ValueError("no trial is usable, so there is no worst one to take as the reference point; name the point")
    beyond = pareto.reference_point(points)
    return {name: sign * value for (name, sign), value in zip(signs.items(), beyond, strict=True)}


def hypervolume(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    reference: Mapping[str, float],
    attempts: pd.DataFrame | None = None,
) -> Hypervolume:
    """Returns the exact hypervolume of the frame's usable trials, with an interval from the uncertainty of their figures.

    As in `pareto_front`, a noisy trial counts with the worse ends of its intervals, so the value is that of its front. The
    interval is based on the measured figures, and extended to include the value.

    Args:
        df: Trials as `load` returns them.
        objectives: "max" or "min", by column.
        reference: A value for each objective; anything worse does not count. `reference_point` makes one.
        attempts: Result of `load` with `all_attempts`.

    Raises:
        ValueError: The objectives are invalid as in `pareto_front`, or one lacks a reference.
    """
    signs = signs_of(df, objectives)
    if lacking := [name for name in signs if name not in reference]:
        raise ValueError(f"the reference point has no {lacking[0]!r}; give a value for each objective")
    trials = usable(df, *signs)
    factors = np.array(list(signs.values()))
    corner = factors * np.array([reference[name] for name in signs])
    value = volume(assured_costs(trials, signs), corner)
    draws = factors * drawn(trials, tuple(signs), attempts=attempts, count=_DRAWS)
    volumes = [volume(costs, corner) for costs in draws]
    low, high = np.quantile(volumes, [0.025, 0.975])
    return Hypervolume(value, min(value, float(low)), float(high), dict(reference))


def volume(costs: npt.NDArray[np.float64], corner: npt.NDArray[np.float64]) -> float:
    """Returns the volume of everything better than the corner and worse than some row; less is better in every column."""
    return pareto.hypervolume(map(tuple, costs.tolist()), tuple(corner.tolist()))
