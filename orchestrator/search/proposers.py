"""The interface of everything that proposes settings, and the searchers by name.

Also contains the proposer that learns nothing: every candidate in order, or shuffled.
"""

import math
import random
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Protocol

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates, Untried
from orchestrator.search.gain_search import GainPerSecond
from orchestrator.search.lever_prior import Prior
from orchestrator.search.lever_search import LeverSearch


class InOrder:
    """Proposes candidates one after the other: in their order, which is a grid's, or shuffled by a seed."""

    def __init__(self, candidates: Candidates, *, seed: int | None = None) -> None:
        self._untried = Untried(candidates)
        self._order = list(range(len(candidates)))
        if seed is not None:
            random.Random(seed).shuffle(self._order)
        self._order.reverse()

    def propose(self) -> CompileSettings | None:
        while self._order:
            if (index := self._order.pop()) in self._untried:
                return self._untried.take(index)
        return None

    def tell(self, record: Record) -> None:
        self._untried.strike(str(record["settings_key"]))


class Proposer(Protocol):
    """Says what to try next, and learns from the results.

    Several proposals may run at once, and results may come in any order. No setting is proposed twice, whatever its result, nor
    one whose record was passed to `tell` before. The same seed, candidates and results lead to the same proposals.
    """

    def propose(self) -> CompileSettings | None:
        """Returns the next setting; None if none is left or, for `levers`, none is worth trying."""
        ...

    def tell(self, record: Record) -> None:
        """Learns from a finished attempt.

        Args:
            record: Fields of a `TrialRecord`, as `dataclasses.asdict` gives them. `settings_key`, `status` and `wall_s` are
                required; figures that were not reached may be missing. Failures and stopped trials are included. A setting that
                was never proposed, such as one from an earlier sweep, counts as tried from then on.
        """
        ...


class Searcher(StrEnum):
    """The algorithm that says what to try next."""

    GRID = "grid"
    """Every candidate in order."""
    RANDOM = "random"
    """Every candidate in random order."""
    TPE = "tpe"
    """Optuna's tree-structured Parzen estimator."""
    NSGA2 = "nsga2"
    """Optuna's genetic algorithm."""
    GP = "gp"
    """Optuna's Gaussian processes; about a second per proposal."""
    GAIN = "gain"
    """Expected hypervolume gain per second; see `gain_search.py`."""
    LEVERS = "levers"
    """What won elsewhere, then the best so far with one more lever; see `lever_search.py`."""


def make_proposer(
    name: Searcher,
    candidates: Candidates,
    aims: Aims,
    facts: WorkloadFacts,
    *,
    seed: int = 0,
    known_good: Iterable[CompileSettings] = (),
    prior: Prior | None = None,
    tokens: Callable[[CompileSettings], float] | None = None,
    fits: Callable[[CompileSettings], bool] | None = None,
    left_s: Callable[[], float] = lambda: math.inf,
) -> Proposer:
    """Returns a new proposer of this name.

    Args:
        known_good: Settings from elsewhere to begin with; used only by `gain`.
        prior: What levers gained elsewhere; used only by `levers`.
        tokens: Mean number of tokens that batches are padded to under a setting; used only by `levers`.
        fits: Tells whether a trial of a setting would end within the budget; used only by `levers`. The proposals of others are
            refused afterwards.
        left_s: Seconds that are left of the budget; used only by `levers`.
    """
    match name:
        case Searcher.GRID:
            return InOrder(candidates)
        case Searcher.RANDOM:
            return InOrder(candidates, seed=seed)
        case Searcher.GAIN:
            return GainPerSecond(candidates, aims, facts, seed=seed, known_good=known_good)
        case Searcher.LEVERS:
            return LeverSearch(candidates, aims, facts, prior=prior, tokens=tokens, fits=fits, left_s=left_s)
    from orchestrator.search import optuna_proposer as samplers  # takes half a second, and most sweeps need none of them

    match name:
        case Searcher.TPE:
            return samplers.Asking(candidates, aims, samplers.tpe, seed=seed)
        case Searcher.NSGA2:
            return samplers.Asking(candidates, aims, samplers.nsga2, seed=seed)
        case Searcher.GP:
            return samplers.Asking(candidates, aims, samplers.gp, seed=seed, conditional=False)
