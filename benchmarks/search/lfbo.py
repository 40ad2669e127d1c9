"""A standing baseline: likelihood-free Bayesian optimization with extremely randomized trees, per second of a trial.

Background: Song et al., "A General Recipe for Likelihood-free Bayesian Optimization" (ICML 2022). A classifier learns to tell the
better settings from all, each better one weighted by how much it is better; the odds it gives are proportional to expected
improvement. Several objectives are reduced to one by weights drawn anew for each proposal (Knowles, "ParEGO", 2006). A trial's
seconds are learned by a regression of their logarithm, also with trees. Needs scikit-learn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor

from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.pareto import Losses
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates, Untried, ordered_numbers

Floats = npt.NDArray[np.float64]

_BETTER = 1 / 3  # fraction of the trials that count as better ones

_NUM_TREES = 30


class Lfbo:
    """Proposes the setting with the largest expected improvement per second, by trees.

    Args:
        candidates: What may be proposed.
        aims: The objectives and constraints.
        seed: Seed of the trees and of the objectives' weights.
    """

    def __init__(self, candidates: Candidates, aims: Aims, *, seed: int) -> None:
        self._candidates, self._aims = candidates, aims
        self._random = np.random.default_rng(seed)
        self._untried = Untried(candidates)
        self._features = features(candidates)
        self._tried: list[int] = []
        self._losses: list[Losses | None] = []
        self._log_s: list[float] = []

    def propose(self) -> CompileSettings | None:
        if not len(self._untried):
            return None
        left = self._untried.indices()
        score = self._odds(left) / self._seconds(left) if self._tried else np.ones(len(left))
        return self._untried.take(int(self._random.choice(left[score >= score.max()])))

    def tell(self, record: Record) -> None:
        key = str(record["settings_key"])
        self._untried.strike(key)
        if (index := self._candidates.index(key)) is None:
            return
        self._tried.append(index)
        self._losses.append(self._aims.losses(record) if self._aims.is_usable(record) else None)
        self._log_s.append(float(np.log(max(float(record["wall_s"]), 1e-3))))

    def _odds(self, left: npt.NDArray[np.intp]) -> Floats:
        usable = np.array([losses is not None for losses in self._losses])
        found = np.array([losses for losses in self._losses if losses is not None])
        if len(found) < 2:
            return np.ones(len(left))
        low, high = found.min(axis=0), found.max(axis=0)
        scaled = (found - low) / np.where(high > low, high - low, 1.0)
        weighted = self._random.dirichlet(np.ones(scaled.shape[1])) * scaled
        loss = np.full(len(usable), np.inf)
        loss[usable] = weighted.max(axis=1) + 0.05 * weighted.sum(axis=1)
        bound = np.quantile(loss[usable], _BETTER)
        improvement = np.maximum(bound - loss, 0.0)
        is_better = improvement > 0
        if not is_better.any():
            return np.ones(len(left))
        known = self._features[self._tried]
        # Each better trial is there twice: among all, with weight 1, and as a better one, with its improvement.
        inputs = np.concatenate([known, known[is_better]])
        labels = np.concatenate([np.zeros(len(known)), np.ones(int(is_better.sum()))])
        weights = np.concatenate([np.ones(len(known)), improvement[is_better] / improvement[is_better].mean()])
        trees = ExtraTreesClassifier(_NUM_TREES, min_samples_leaf=2, random_state=int(self._random.integers(2**31)))
        chance = trees.fit(inputs, labels, sample_weight=weights).predict_proba(self._features[left])[:, 1]
        return np.asarray(chance / np.maximum(1 - chance, 1e-6), dtype=np.float64)

    def _seconds(self, left: npt.NDArray[np.intp]) -> Floats:
        trees = ExtraTreesRegressor(_NUM_TREES, random_state=int(self._random.integers(2**31)))
        predicted = trees.fit(self._features[self._tried], self._log_s).predict(self._features[left])
        return np.asarray(np.exp(predicted), dtype=np.float64)


def features(candidates: Candidates) -> Floats:
    """Returns one row per candidate: a column for each field's numbers if they are ordered, and one for each other value."""
    columns: list[Floats] = []
    for values, codes in zip(candidates.values, candidates.codes.T, strict=True):
        if numbers := ordered_numbers(values):
            columns.append(np.array([numbers.get(code, -1.0) for code in range(len(values))])[codes])
        columns += [(codes == code).astype(np.float64) for code in range(len(values)) if code not in numbers]
    return np.stack(columns, axis=1) if columns else np.zeros((len(candidates), 1))
