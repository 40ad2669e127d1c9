"""Predicts figures and durations of untried settings from the records of tried ones."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.objectives import Aims, Record, figure
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.pareto import Losses, extended, reference_point
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.estimates import guessed_compile_s, later_wall_s, rest_s
from orchestrator.search.candidates import Candidates, Codes
from orchestrator.search.hypervolume import Cells
from orchestrator.search.surrogate import WEIGHTS, Posterior, Scale, likeness

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_USUAL_FAILURES = 0.1  # assumed fraction of settings that fail, before there is any result

_FAILURE_SPREAD = 0.5
"""Standard deviation of failing, as a 0/1 variable; about its value if both outcomes are equally likely."""

_MOST_KNOWN = 60
"""Number of results on the front, and of latest other results, to keep once there are three times as many. Bounds prediction
time.
"""


class Expected(NamedTuple):
    """One number for each requested setting."""

    gains: Floats
    """Expected hypervolume gain, in the objectives' own units, accounting for failure and violated constraints."""
    wall_s: Floats
    volume: float
    """The hypervolume reached, from the same reference point; 0 before there is a front."""


class Left(NamedTuple):
    """What is expected to still be gained, as fractions of the hypervolume reached; infinite before there is a front."""

    by_one: float  # gain of the one setting that adds most
    at_most: float  # sum of what each setting would add alone, which all together cannot exceed


@dataclass(frozen=True, slots=True)
class _Result:
    """A finished attempt, reduced to what predictions need."""

    codes: Codes
    guessed_compile_s: float
    compile_s: float | None
    wall_s: float
    is_usable: bool
    failure: float
    """Probability that the setting fails again."""
    figures: tuple[float, ...] | None
    """Losses, then figures of the constraints; None unless all were reached. An attempt that is not ok may have them."""


class Outlook:
    """Learns from records and predicts, for any proposer."""

    def __init__(self, candidates: Candidates, aims: Aims, facts: WorkloadFacts) -> None:
        self._candidates = candidates
        self._aims = aims
        self._facts = facts
        guessed = [guessed_compile_s(setting, facts) for setting in candidates.settings]
        self._guessed_compile_s = np.array(guessed)
        names = (*(objective.name for objective in aims.objectives), *(constraint.name for constraint in aims.constraints))
        self._is_compile_s = [name == "compile_s" for name in names]
        self.guessed_s: list[float] = (rest_s(()) + self._guessed_compile_s).tolist()
        """Estimated seconds of each candidate before any results."""
        self._results: dict[str, _Result] = {}
        self._under_way: dict[str, CompileSettings] = {}
        self._front: list[Losses] = []

    def begin(self, setting: CompileSettings) -> None:
        """Marks a setting as running, so that similar settings promise less news."""
        self._under_way[setting.key] = setting

    def tell(self, record: Record) -> None:
        """Learns from a finished attempt; a later one at the same setting replaces it."""
        key = str(record["settings_key"])
        setting = self._under_way.pop(key, None) or CompileSettings.parse(key)
        # For an attempt that was stopped after it was timed, the bounds almost equal the figures.
        told = {**record, **(record.get("bounds") or {})}
        losses = self._aims.losses(told)
        bounded = tuple(constraint.figure_of(told) for constraint in self._aims.constraints)
        numbers = None if losses is None else (*losses, *bounded)
        is_usable = self._aims.is_usable(record)
        self._results.pop(key, None)  # so that the latest is last
        self._results[key] = _Result(
            codes=self._candidates.encode(setting),
            guessed_compile_s=guessed_compile_s(setting, self._facts),
            compile_s=figure(record, "compile_s"),
            wall_s=max(later_wall_s(figure(record, "wall_s") or 0.0, record.get("phases_s") or {}), 1e-3),
            is_usable=is_usable,
            failure=self._failure(record, has_figures=losses is not None),
            figures=None
            if numbers is None or None in numbers
            else tuple(float(number) for number in numbers if number is not None),
        )
        if is_usable and losses is not None:
            self._front = extended(self._front, losses)
        if len(self._results) > 3 * _MOST_KNOWN:
            self._forget()

    def expected(self, asked: Indices) -> Expected:
        """Predicts what candidates would gain and how long they would take."""
        candidates = self._candidates.codes[asked]
        results = list(self._results.values())
        if not results:
            return Expected(np.ones(len(asked)), np.array([self.guessed_s[place] for place in asked]), 0.0)
        under_way = [self._candidates.encode(setting) for setting in self._under_way.values()]
        codes = np.stack([*(result.codes for result in results), *under_way])
        fields = self._candidates.likeness
        known, cross = likeness(codes, codes, fields), likeness(codes, candidates, fields)
        is_seen = np.arange(len(results) + len(under_way)) < len(results)
        outcomes = Posterior(known, cross, is_seen)
        failures = (np.array([result.failure for result in results]) - _USUAL_FAILURES) / _FAILURE_SPREAD
        works = np.clip(1 - _USUAL_FAILURES - _FAILURE_SPREAD * outcomes.mean(failures), 0.02, 0.98)
        # The model predicts the deviation from the estimate, which knows that six autotuned graphs take long.
        guessed, guesses = np.array([result.guessed_compile_s for result in results]), self._guessed_compile_s[asked]
        rest = rest_s((result.compile_s, result.wall_s) for result in results)
        seconds = np.array([result.wall_s for result in results])
        ratios = seconds / (rest + guessed)
        in_time = Scale.of(ratios)
        wall_s = (rest + guesses) * in_time.figures(outcomes.mean(in_time.modelled(ratios)))
        wall_s = np.maximum(wall_s, 0.2 * float(seconds.min()))
        measured = np.array([result.figures is not None for result in results])
        if not measured.any():
            return Expected(works, wall_s, 0.0)
        seen = np.append(measured, np.zeros(len(under_way), dtype=bool))
        # A failed setting has no figures; a running one probably will, so similar settings are less of a find.
        has_or_will = np.append(measured, np.ones(len(under_way), dtype=bool))
        figured = np.ix_(has_or_will, has_or_will)
        posterior = outcomes if measured.all() else Posterior(known[figured], cross[has_or_will], seen[has_or_will])
        figures = np.array([result.figures for result in results if result.figures is not None])
        draws = [
            posterior.drawn(column / guessed[measured]) * guesses[:, None] if is_compile_s else posterior.drawn(column)
            for column, is_compile_s in zip(figures.T, self._is_compile_s, strict=True)
        ]
        num_objectives = len(self._aims.objectives)
        for constraint, drawn in zip(self._aims.constraints, draws[num_objectives:], strict=True):
            keeps = drawn <= constraint.bound if constraint.is_upper else drawn >= constraint.bound
            works = works * np.clip(keeps @ WEIGHTS, 0.02, 1.0)
        losses = draws[:num_objectives]
        middle = np.stack([drawn[:, len(WEIGHTS) // 2] for drawn in losses], axis=1)
        reference = reference_point([*self._front, *(tuple(map(float, row)) for row in middle)])
        cells = Cells(self._front, reference)
        return Expected(works * cells.expected_gains(losses, WEIGHTS), wall_s, cells.volume())

    def left(self, untried: Indices) -> Left:
        """Returns what candidates are expected to add to the hypervolume."""
        if not len(untried):
            return Left(0.0, 0.0)
        gains, _, volume = self.expected(untried)
        return Left(float(gains.max()) / volume, float(gains.sum()) / volume) if volume else Left(np.inf, np.inf)

    @staticmethod
    def _failure(record: Record, *, has_figures: bool) -> float:
        if record["status"] == Status.OK:
            return 0.0
        # A stopped trial with all its figures is not a failure, and a broken one says nothing certain.
        return _USUAL_FAILURES if record["status"] != Status.INFEASIBLE and has_figures else 1.0

    def _forget(self) -> None:
        """Drops old results that are not on the front, and those on the front except the latest."""
        num = len(self._aims.objectives)
        best = set(self._front)
        items = list(self._results.items())
        old = [(key, r) for key, r in items[:-_MOST_KNOWN] if r.is_usable and r.figures is not None and r.figures[:num] in best]
        self._results = dict([*old[-_MOST_KNOWN:], *items[-_MOST_KNOWN:]])
