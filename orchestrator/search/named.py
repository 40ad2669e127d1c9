"""Searchers by name."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from orchestrator.objectives import Aims
from orchestrator.search.candidates import Candidates
from orchestrator.search.gain import GainPerSecond
from orchestrator.search.plain import InOrder
from orchestrator.search.proposer import Proposer
from workloads.settings import CompileSettings


class Searcher(StrEnum):
    """Who says what to try next."""

    GRID = "grid"
    """Every candidate in order."""
    RANDOM = "random"
    """Every candidate in any order."""
    TPE = "tpe"
    """Optuna's tree-structured Parzen estimator."""
    NSGA2 = "nsga2"
    """Optuna's genetic algorithm."""
    GP = "gp"
    """Optuna's Gaussian processes; about a second a proposal."""
    GAIN = "gain"
    """Expected hypervolume gain for each second; see `gain.py`."""


def make_proposer(
    name: Searcher,
    candidates: Candidates,
    aims: Aims,
    *,
    max_length: int,
    min_length: int = 1,
    seed: int = 0,
    known_good: Iterable[CompileSettings] = (),
) -> Proposer:
    """The proposer of this name, at its beginning.

    Args:
        name: which.
        candidates: what it may propose.
        aims: the objectives and constraints.
        max_length: of the workload, in tokens.
        min_length: of the workload, in tokens.
        seed: decides whatever is left to chance.
        known_good: settings from elsewhere to begin with; only `gain` does.
    """
    match name:
        case Searcher.GRID:
            return InOrder(candidates)
        case Searcher.RANDOM:
            return InOrder(candidates, seed=seed)
        case Searcher.GAIN:
            lengths = {"max_length": max_length, "min_length": min_length}
            return GainPerSecond(candidates, aims, **lengths, seed=seed, known_good=known_good)
    from orchestrator.search import optuna_samplers as samplers  # half a second, and most sweeps need none of them

    match name:
        case Searcher.TPE:
            return samplers.Asking(candidates, aims, samplers.tpe, seed=seed)
        case Searcher.NSGA2:
            return samplers.Asking(candidates, aims, samplers.nsga2, seed=seed)
        case Searcher.GP:
            return samplers.Asking(candidates, aims, samplers.gp, seed=seed, conditional=False)
