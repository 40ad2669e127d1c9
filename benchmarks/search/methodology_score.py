"""The score by which the autotuning community compares searchers: how far above random search, on average over a budget.

Background: Willemsen et al., "A methodology for comparing auto-tuning optimization algorithms" (Future Generation Computer
Systems, 2024, https://doi.org/10.1016/j.future.2024.05.021) and its package, `autotuning_methodology` 1.1.0, whose default
cutoffs (0.01 and 0.95) are used. This follows the published definitions but, at each time, takes the mean of the best values so
far where the package fits a monotone curve through those of all repetitions; before its first value, a search has the table's
median. So scores resemble the package's and are not the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

CUTOFFS = (0.01, 0.95)
"""Where the budget begins and ends: random search has closed this part of the distance from the median to the optimum."""

_RESOLUTION = 1_000

Search = Sequence[tuple[float, float | None]]
"""The trials of a search in order: seconds each, and its value; None if it failed."""


@dataclass(frozen=True, slots=True)
class Space:
    """A table as the score sees it.

    Args:
        values: The figure to minimize of each setting that works.
        seconds_each: What a draw of random search costs on average, with its share of failures.
        median_s: Median seconds of a trial that works.
    """

    values: Floats  # ascending
    seconds_each: float
    median_s: float

    @classmethod
    def of(cls, trials: Search) -> Space:
        """Returns the space of all trials of a table, in any order."""
        values = sorted(value for _, value in trials if value is not None)
        works = [seconds for seconds, value in trials if value is not None]
        fails = [seconds for seconds, value in trials if value is None]
        share = len(fails) / len(trials)
        each = float(np.mean(works)) + (share * float(np.mean(fails)) if fails else 0.0)
        return cls(np.array(values), each, float(np.median(works)))

    def random_search(self, times: Floats) -> Floats:
        """Returns the value that random search without replacement is expected to have reached at each time."""
        draws = np.maximum(1, np.round(times / self.seconds_each))
        worst_first = self.values[::-1]
        places = np.round(draws * (len(worst_first) + 1) / (draws + 1)).astype(int)
        return np.asarray(worst_first[np.minimum(len(worst_first) - 1, places)], dtype=np.float64)

    def budget(self) -> Floats:
        """Returns the times, in seconds, over which the score is a mean."""
        begin, end = (self._draws_to(cutoff) for cutoff in CUTOFFS)
        if end - begin < 2:
            end = min(self._draws_to(1.0), end + (2 if begin == 0 else 1))
            begin = max(0, begin - 1)
        return np.linspace(begin * self.median_s, end * self.median_s, _RESOLUTION)

    def _draws_to(self, cutoff: float) -> int:
        optimum = self.values[0]
        goal = optimum + (float(np.median(self.values)) - optimum) * (1 - cutoff)
        worst_first = self.values[::-1]
        place = int(np.argmax(worst_first <= goal))
        if cutoff < 1 and worst_first[place] == optimum:
            place = max(0, place - 1)
        return math.ceil(place / (len(worst_first) + 1 - place))


def score(space: Space, searches: Sequence[Search]) -> float:
    """Returns the score of a searcher: 0 is as good as random search, 1 is the optimum from the beginning.

    Args:
        space: The table.
        searches: Its searches with several seeds.
    """
    times = space.budget()
    reached = np.mean([_best_so_far(search, times, float(np.median(space.values))) for search in searches], axis=0)
    baseline = space.random_search(times)
    left = space.values[0] - baseline
    is_open = left != 0  # in a small table, random search itself is expected at the optimum before the budget ends
    return float(np.mean((reached - baseline)[is_open] / left[is_open]))


def _best_so_far(search: Search, times: Floats, before: float) -> Floats:
    ends = np.cumsum([seconds for seconds, _ in search])
    best = np.minimum.accumulate([math.inf if value is None else value for _, value in search])
    place = np.searchsorted(ends, times, side="right") - 1
    reached = np.where(place >= 0, best[np.maximum(place, 0)], math.inf)
    return np.where(np.isfinite(reached), reached, before)
