"""Optuna's samplers as proposers: ask and tell, constraints for failures, and no setting twice.

The conditional space is defined by going through the fields: a value is sampled among those that some candidate with the previous
values has; if there is only one, nothing is sampled. A parameter's name includes its choices, because Optuna requires them to be
fixed. A sampler often suggests what was already tried. Then it is asked again, and finally the untried candidate that differs
from its suggestion in the fewest fields is tried and reported instead.
"""

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import optuna

from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates, Untried

_POPULATION = 10
"""Number of settings in a generation of NSGA-II; Optuna's 50 would reduce a sweep of some dozens to its random start."""

_ASKS = 5
"""How often a sampler with much randomness is asked again after it suggested what was tried; one on a flat space is asked once.
"""


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    """Returns the tree-structured Parzen estimator, which supports several trials at once."""
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def nsga2(seed: int) -> optuna.samplers.BaseSampler:
    """Returns the genetic algorithm NSGA-II."""
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=_POPULATION)


def gp(seed: int) -> optuna.samplers.BaseSampler:
    """Returns Gaussian processes with expected hypervolume improvement."""
    return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)


class Asking:
    """Proposes what an Optuna sampler suggests: field by field if `conditional`, else the candidate nearest to its suggestion."""

    def __init__(
        self,
        candidates: Candidates,
        aims: Aims,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        *,
        seed: int = 0,
        conditional: bool = True,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # GP warns each time that the space is almost exhausted
        self._candidates = candidates
        self._aims = aims
        self._conditional = conditional
        self._untried = Untried(candidates)
        self._random = np.random.default_rng(seed)
        self._asked: dict[str, optuna.Trial] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study = optuna.create_study(
                sampler=sampler(seed), directions=["minimize"] * len(aims.objectives), storage=optuna.storages.InMemoryStorage()
            )

    def propose(self) -> CompileSettings | None:
        if not len(self._untried):
            return None
        for _ in range(_ASKS if self._conditional else 1):
            trial, index = self._answer()
            if index in self._untried:
                break
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # samplers ignore failed trials
        else:
            index = self._nearest(self._candidates.codes[index], self._untried.indices())
            trial = self._at(index)
        setting = self._untried.take(index)
        self._asked[setting.key] = trial
        return setting

    def tell(self, record: Record) -> None:
        key = str(record["settings_key"])
        index = self._candidates.index(key)
        self._untried.strike(key)
        trial = self._asked.pop(key, None)
        if trial is None:
            if index is None:
                return  # a sampler knows only the candidates' values
            trial = self._at(index)
        losses = self._aims.losses(record)
        for number, violation in enumerate(self._aims.violations(record)):
            trial.set_constraint(str(number), violation)
        self._study.tell(trial, losses if losses is not None else self._worst())

    def _worst(self) -> tuple[float, ...]:
        """Returns losses for a trial that has none: the worst so far. Its violation tells the sampler that it failed."""
        told = [trial.values for trial in self._study.get_trials(deepcopy=False) if trial.values is not None]
        return tuple(map(max, zip(*told, strict=True))) if told else (0.0,) * len(self._aims.objectives)

    def _at(self, index: int) -> optuna.Trial:
        row = self._candidates.codes[index]
        matching = np.arange(len(self._candidates))
        fixed = {}
        for column, name in enumerate(self._candidates.names):
            choices = self._choices(matching, column)
            matching = self._narrowed(matching, column, int(row[column]))
            if len(choices) > 1:
                fixed[_parameter(name, choices)] = self._candidates.values[column][int(row[column])]
        self._study.enqueue_trial(fixed)
        return self._answer()[0]

    def _answer(self) -> tuple[optuna.Trial, int]:
        with np.errstate(invalid="ignore"):  # GP harmlessly divides by zero if all options promise the same
            trial = self._study.ask()
            return trial, self._suggested(trial)

    def _suggested(self, trial: optuna.Trial) -> int:
        """Returns the candidate with the values that the trial suggests, or the nearest one."""
        matching = np.arange(len(self._candidates))
        row = np.full(len(self._candidates.names), -1, dtype=np.int32)
        for column, name in enumerate(self._candidates.names):
            choices = self._choices(matching, column)
            value = trial.suggest_categorical(_parameter(name, choices), choices) if len(choices) > 1 else choices[0]
            row[column] = self._candidates.values[column].index(value)
            matching = self._narrowed(matching, column, int(row[column]))
        if self._conditional:
            return int(matching[0])
        return self._nearest(row, np.arange(len(self._candidates)))

    def _choices(self, matching: npt.NDArray[np.intp], column: int) -> list[str]:
        values = self._candidates.values[column]
        return [values[code] for code in np.unique(self._candidates.codes[matching, column])]

    def _narrowed(self, matching: npt.NDArray[np.intp], column: int, code: int) -> npt.NDArray[np.intp]:
        return matching[self._candidates.codes[matching, column] == code] if self._conditional else matching

    def _nearest(self, row: npt.NDArray[np.int32], among: npt.NDArray[np.intp]) -> int:
        distance = (self._candidates.codes[among] != row).sum(axis=1)
        return int(self._random.choice(among[distance == distance.min()]))


def _parameter(name: str, choices: list[str]) -> str:
    return f"{name} of {'|'.join(choices)}"
