"""A running search: the proposer with what it learns from, what was spent, and when that is enough."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import counted
from orchestrator.config import Device, SweepConfig
from orchestrator.environment import Environment
from orchestrator.plan.estimates import expected_s
from orchestrator.plan.space import padded_length
from orchestrator.run import remaining
from orchestrator.run.sweep_folder import only_drives
from orchestrator.search import (
    Budget,
    Candidates,
    Learned,
    Left,
    Origin,
    Outlook,
    Searcher,
    Spending,
    StableFront,
    learn_from,
    make_proposer,
)
from orchestrator.search.gain_search import good_elsewhere
from orchestrator.search.lever_prior import Prior, shipped_prior
from orchestrator.search.lever_search import LeverSearch, Step

MOST_REFUSED = 20  # number of consecutive proposals over the budget after which no fitting one is expected

_AN_HOUR_S = 3600.0

_TOO_LITTLE_LEFT = "no setting fits in what is left of the budget"
_NOTHING_LEFT = "there is nothing left to try"


def learned_for(config: SweepConfig, environment: Environment) -> Learned:
    """Reads what the sweeps named in a configuration can teach it; raises ConfigError if one does not fit."""
    if not config.search.learn_from:
        return Learned()
    origin = Origin(
        workload=config.workload,
        size=config.size,
        environment_key=None if only_drives(config, environment) else environment.key,
        num_workers=config.workers_per_trial,
        pipeline=str(config.pipeline),
    )
    folders = [Path(folder) for folder in config.search.learn_from]
    try:
        return learn_from(folders, origin, config.search.aims, force=config.search.learn_anyway)
    except ConfigError as error:
        raise ConfigError(str(error).replace("force it to", "add --learn-anyway to")) from None


class Search:
    """One run of a sweep's search."""

    def __init__(
        self,
        config: SweepConfig,
        folder: Path,
        facts: WorkloadFacts,
        learned: Learned,
        expected_s: Callable[[CompileSettings], float],
        stopping: Callable[[], bool],
    ) -> None:
        search = config.search
        assert search.searcher is not None, "a sweep without a searcher tries its settings in order"
        self._search, self._workers, self._expected_s = search, config.workers_per_trial, expected_s
        self._counts = partial(remaining.counts, config)
        self._facts, self._stopping = facts, stopping
        self._candidates = Candidates(config.settings)
        self._fresh = records.follow(folder).fresh
        self._fresh_starts = records.follow_warm_starts(folder).fresh
        self._began = time.monotonic()
        self._tried: set[str] = set()
        self._under_way: dict[str, float] = {}
        self._refused = 0
        self._told = list(learned.records)
        self._spending = Spending(
            search.aims,
            rule=StableFront.parse(search.stop) if search.stop else None,
            budget=Budget(time_s=config.time_budget_s, gpu_s=search.gpu_budget_s),
        )
        self.proposer = make_proposer(
            search.searcher,
            self._candidates,
            search.aims,
            facts,
            seed=config.seed,
            known_good=[*learned.known_good, *good_elsewhere(f"{config.workload} {config.size}")],
            prior=prior_for(config),
            tokens=partial(padded_length, facts=facts),
            fits=lambda setting: self.allows(self._expected_s(setting)),
            left_s=self.left_s,
        )
        for row in learned.records:
            self.proposer.tell(row)

    def new_records(self) -> Iterable[TrialRecord]:
        for record in self._fresh():
            row = asdict(record)
            self._under_way.pop(record.settings_key, None)
            if not self._counts(record):  # its setting will still be tried, in this run or a later one
                self._spending.spend(row)
                continue
            # An earlier run repeated a tried setting: no news for the rule that ends a search.
            (self._spending.spend if record.settings_key in self._tried else self._spending.tell)(row)
            self._told.append(row)
            self._tried.add(record.settings_key)
            yield record

    def why_enough(self) -> str | None:
        if self._stopping():
            return "it was stopped"
        if self._search.num_trials is not None and len(self._tried | self._under_way.keys()) >= self._search.num_trials:
            return f"{self._search.num_trials} trial{'s were' if self._search.num_trials > 1 else ' was'} asked for"
        if self._refused >= MOST_REFUSED:
            return _TOO_LITTLE_LEFT
        return self._spending.reason_to_stop(time.monotonic() - self._began)

    def may_start(self, setting: CompileSettings, reserved_s: float = 0.0) -> bool:
        """Tells whether a proposal fits in the budget, less what is reserved; if so, it counts as running from then on."""
        expected_s = self._expected_s(setting)
        fits = self.allows(expected_s + reserved_s) and self.may_take(setting, expected_s)
        self._refused = 0 if fits else self._refused + 1
        return fits

    def may_take(self, setting: CompileSettings, expected_s: float) -> bool:
        """Tells whether any trial fits in the budget, including repeats and warm starts of the front, which are not proposed."""
        if not self.allows(expected_s):
            return False
        self._under_way[setting.key] = expected_s * self._workers
        return True

    def allows(self, expected_s: float) -> bool:
        """Tells whether a trial of this duration fits in the budget, in addition to the running ones."""
        return expected_s <= self.left_s()

    def left_s(self) -> float:
        """Returns the longest that a trial may take within the budget, in addition to the running ones, in seconds."""
        return self._spending.left_s(
            num_workers=self._workers,
            elapsed_s=time.monotonic() - self._began,
            under_way_gpu_s=sum(self._under_way.values()),
        )

    def catch_up(self) -> None:
        """Passes existing records to the proposer. Call this only while no trial is running."""
        for record in self.new_records():
            self.proposer.tell(asdict(record))
        self._under_way.clear()
        self.count_repeats()

    def count_repeats(self) -> None:
        """Counts what trials took that were not proposed. Call it only while no proposed one runs: the proposer ignores them."""
        repeats: list[TrialRecord | WarmStart] = [*self._fresh(), *self._fresh_starts()]
        for record in repeats:
            self._spending.spend(asdict(record))
            self._under_way.pop(record.settings_key, None)

    def left(self) -> Left | None:
        """Returns what untried settings are expected to add to the hypervolume; None if there are none, or no front."""
        untried = self._untried()
        if not len(untried) or not self._search.aims.usable_losses(self._told):
            return None
        outlook = Outlook(self._candidates, self._search.aims, self._facts)
        for row in self._told:
            outlook.tell(row)
        return outlook.left(untried)

    def _outcome_of_levers(self, search: LeverSearch) -> str:
        """Describes in one line how a search by levers ended."""
        untried = [self._candidates.settings[place] for place in self._untried()]
        num_left = len(untried)
        all_fit = all(self.allows(self._expected_s(setting)) for setting in untried)
        which = "no other setting" if all_fit else "no setting that fits in what is left of the budget"
        nothing = f"{which} is expected to gain anything worth a trial" if num_left else _NOTHING_LEFT
        words = self._ended_because(nothing)
        if not num_left or not np.isfinite(gain := search.forecast(_AN_HOUR_S)):
            return words
        about = f"about {gain:.0%}" if gain >= 0.01 else "less than 1%"
        return f"{words}; {num_left} were not tried, and another hour of trials would probably gain {about}"

    def complaint(self) -> str | None:
        """Says why no trial is of any use, for example because none meets a constraint; None if some are."""
        try:
            self._search.aims.refuse_infeasible(self._told)
        except ConfigError as error:
            return str(error)
        return None

    def _untried(self) -> npt.NDArray[np.intp]:
        place_of = self.proposer.place_of if isinstance(self.proposer, LeverSearch) else self._candidates.index
        told = {place_of(str(row["settings_key"])) for row in self._told}
        return np.array([place for place in range(len(self._candidates)) if place not in told], dtype=np.intp)

    def _is_short_of_budget(self) -> bool:
        """Tells whether proposals did not fit in the budget, or none was requested because none would."""
        untried = [self._candidates.settings[place] for place in self._untried()]
        return self._refused > 0 or (bool(untried) and not any(self.allows(self._expected_s(setting)) for setting in untried))

    def _ended_because(self, otherwise: str) -> str:
        why = self.why_enough() or (_TOO_LITTLE_LEFT if self._is_short_of_budget() else otherwise)
        return f"the search ended after {counted(len(self._tried), 'trial')} of {len(self._candidates)} settings: {why}"

    def outcome(self) -> str:
        """Describes in one line how the search ended."""
        if isinstance(self.proposer, LeverSearch):
            return self._outcome_of_levers(self.proposer)
        words = self._ended_because(_NOTHING_LEFT)
        if (left := self.left()) is not None and np.isfinite(left.by_one):
            adds = f"add {left.by_one:.1%} to" if left.by_one < 1 else "more than double"
            words += f"; of those not tried the best is expected to {adds} the hypervolume"
            # A larger bound is meaningless.
            words += f", all of them to add at most {left.at_most:.1%}" if left.at_most < 1 else ""
        return words


def prior_for(config: SweepConfig) -> Prior | None:
    """Returns what levers gained on other workloads; None for a searcher that does not use it."""
    if config.search.searcher is not Searcher.LEVERS:
        return None
    return shipped_prior().elsewhere(config.workload, has_gpu=config.device is Device.CUDA)


def planned_steps(config: SweepConfig, facts: WorkloadFacts, done: Sequence[TrialRecord]) -> list[Step]:
    """Returns the first settings that recipe auto would try if each met its expectation."""
    search = LeverSearch(
        Candidates(config.settings),
        config.search.aims,
        facts,
        prior=prior_for(config),
        tokens=partial(padded_length, facts=facts),
    )
    for record in done:
        search.tell(asdict(record))
    again = [
        Step(setting, "shows, at the end, how much the machine's speed changes", expected_s(setting, facts, done, cold=True))
        for setting in remaining.baseline_to_repeat(config, done)
    ]
    budgets = (config.time_budget_s, config.search.gpu_budget_s, float("inf"))
    budget = min(budget for budget in budgets if budget is not None) - sum(step.seconds for step in again)
    return [*search.plan(budget)[: config.search.num_trials], *again]
