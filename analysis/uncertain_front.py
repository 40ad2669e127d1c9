"""The Pareto front as certain as it is: how probable each trial is on it, and which cannot be told apart. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.pareto import DEFAULT_OBJECTIVES, assured_costs, costs_of, dominated, on_front, signs_of, usable
from analysis.uncertainty import DRAWS, Z95, Noise, deviations, drawn, noise
from orchestrator.objectives import Goal

POSSIBLE = 0.05
"""Probability from which on a trial that is not on the front might be."""

_FAR = 3.0
"""Standard deviations by which both of two trials must be off at once for their order to turn, which one draw in 30,000 has: a
trial so far behind another has probability 0 without drawing."""

_DRAWN_AT_ONCE = 20_000_000
"""Comparisons; bounds the memory of a sweep of thousands of trials."""


class UncertainFront(NamedTuple):
    """A front, what might be on it, and what that rests on."""

    trials: pd.DataFrame
    """The front and the trials that might be on it, ascending in the last objective, with four columns more: `on_front`, as
    `pareto_front` has it; `front_probability`; `equal_to`, the settings_key of the trial it cannot be told apart from, its own
    if there is none before it; `ties`, how many trials share that."""
    noise: Mapping[str, Noise]
    """Of each objective between runs."""


def uncertain_front(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    attempts: pd.DataFrame | None = None,
    count: int = DRAWS,
    seed: int = 0,
) -> UncertainFront:
    """The Pareto front with each trial's probability of being on it.

    Every draw moves all trials' figures by what they may be off (`uncertainty.py`), and the share of draws in which a trial is
    dominated by none is its probability. Two trials are equal when in no objective their difference is beyond a 95 % interval.
    Equality goes by leaders: the most probable trial takes all that equal it, then the next of the rest, so that no chain of
    small steps makes one group of very different trials.

    Args:
        df: trials as `load` returns them.
        objectives: column → "max" or "min"; two or three, as a rule.
        attempts: what `load` returns with `all_attempts`, to see how settings scatter between runs.
        count: draws.
        seed: of the draws.

    Raises:
        ValueError: as `pareto_front`.
    """
    signs = signs_of(df, objectives)
    candidates, between, chances = _chances(df, signs, attempts, count, seed)
    is_on_front = on_front(assured_costs(candidates, signs))
    kept = is_on_front | (chances >= POSSIBLE)
    last, *others = reversed(signs)
    trials = candidates.assign(on_front=is_on_front, front_probability=chances)[kept].sort_values([last, *others], kind="stable")
    leaders = _leaders(trials, signs, between)
    keys = trials["settings_key"].to_numpy() if "settings_key" in trials else trials.index.to_numpy()
    sizes = np.bincount(leaders, minlength=len(trials)) if len(trials) else np.zeros(0, dtype=np.int64)
    return UncertainFront(trials.assign(equal_to=keys[leaders], ties=sizes[leaders]), between)


def front_probability(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    attempts: pd.DataFrame | None = None,
    count: int = DRAWS,
    seed: int = 0,
) -> pd.Series:
    """The probability of each of the frame's trials of being on the front; NA for those that cannot be, as not ok.

    Args:
        df: trials as `load` returns them.
        objectives: as in `uncertain_front`.
        attempts: likewise.
        count: draws.
        seed: of the draws.

    Raises:
        ValueError: as `pareto_front`.
    """
    candidates, _, chances = _chances(df, signs_of(df, objectives), attempts, count, seed)
    return pd.Series(chances, index=candidates.index, dtype="Float64").reindex(df.index)


def _chances(
    df: pd.DataFrame, signs: Mapping[str, float], attempts: pd.DataFrame | None, count: int, seed: int
) -> tuple[pd.DataFrame, dict[str, Noise], npt.NDArray[np.float64]]:
    """Which trials can be on the front, the noise between runs, and in what share of draws each is dominated by none."""
    between = {name: noise(df if attempts is None else attempts, name) for name in signs}
    candidates = usable(df, *signs)
    chances = np.zeros(len(candidates))
    near = _near(candidates, signs, between)
    if not len(near):
        return candidates, between, chances
    factors = np.array(list(signs.values()))
    costs = factors * drawn(candidates.iloc[near], tuple(signs), attempts=attempts, count=count, seed=seed)
    chances[near] = (_undominated_in_two(costs) if len(signs) == 2 else _undominated(costs)) / count
    return candidates, between, chances


def _undominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For costs of shape (draw, trial, objective), in how many draws each trial is dominated by none: every pair compared."""
    count, trials, objectives = costs.shape
    at_once = max(1, _DRAWN_AT_ONCE // (trials**2 * objectives))
    found = np.zeros(trials)
    for begin in range(0, count, at_once):
        some = costs[begin : begin + at_once]
        no_worse = np.asarray((some[:, :, None, :] <= some[:, None, :, :]).all(axis=3))
        better = np.asarray((some[:, :, None, :] < some[:, None, :, :]).any(axis=3))
        found += (~(no_worse & better).any(axis=1)).sum(axis=0)
    return found


def _undominated_in_two(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same of two objectives, by sorting: each trial must be below all before it in the second, or equal to the lowest."""
    count, trials, _ = costs.shape
    order = np.lexsort((costs[:, :, 1], costs[:, :, 0]), axis=-1)
    first, second = (np.take_along_axis(costs[:, :, at], order, axis=1) for at in (0, 1))
    lowest_before = np.minimum.accumulate(np.column_stack([np.full(count, np.inf), second[:, :-1]]), axis=1)
    is_new = second < lowest_before
    lowest_at = np.maximum.accumulate(np.where(is_new, np.arange(trials), 0), axis=1)
    equal = (second == np.take_along_axis(second, lowest_at, axis=1)) & (first == np.take_along_axis(first, lowest_at, axis=1))
    return np.bincount(order[is_new | equal], minlength=trials).astype(np.float64)


def _near(candidates: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """Positions of the candidates that are not behind another one by far more than both may be off."""
    margins = np.column_stack([_FAR * _absolute(candidates, name, between[name]) for name in signs])
    costs = costs_of(candidates, signs)
    at_worst: npt.NDArray[np.float64] = costs + margins
    at_worst = at_worst[~dominated(at_worst)]
    worse_everywhere = np.asarray((at_worst[None, :, :] < (costs - margins)[:, None, :]).all(axis=2))
    return np.flatnonzero(~worse_everywhere.any(axis=1))


def _leaders(trials: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """For each trial the position of the one that leads its group."""
    costs = costs_of(trials, signs)
    off = np.column_stack([_absolute(trials, name, between[name]) for name in signs]) if len(trials) else costs
    leaders = np.full(len(trials), -1, dtype=np.intp)
    certain_first = np.argsort(-trials["front_probability"].to_numpy(dtype=np.float64), kind="stable")
    for leader in certain_first:
        if leaders[leader] == -1:
            apart = np.abs(costs - costs[leader])
            equal = (apart <= Z95 * np.sqrt(off**2 + off[leader] ** 2)).all(axis=1)
            leaders[(leaders == -1) & equal] = leader
    return leaders


def _absolute(trials: pd.DataFrame, name: str, between: Noise) -> npt.NDArray[np.float64]:
    values = trials[name].to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(values > 0, deviations(trials, name, between) * values, between.floor)
