"""The stages of a sweep, in order: what is left, the front cold, disturbed trials alone, a script as it is again, warm starts."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import CachePolicy, SweepConfig
from orchestrator.environment import Environment
from orchestrator.plan.estimates import expected_s, expected_warm_start_s
from orchestrator.run import remaining
from orchestrator.run.runner import Batch, Runner, make_runner
from orchestrator.run.session import Interrupts
from orchestrator.search import Candidates, Learned
from orchestrator.search.pruning import Pruning, patience_with
from orchestrator.search.search_run import Search
from orchestrator.tracking import Tracking
from orchestrator.view import printed
from orchestrator.view.live import BaselineOf, FrontOf, LiveView

_LEAVING_S = 5.0
"""Seconds past the time budget until a script's first trial, which leaves out the rest of its eager runs, or one that is measured
again, is stopped.
"""


_STOPPING_S = 2.0  # seconds from the decision to stop a trial until the next one may start


class Fronts(NamedTuple):
    """Functions that compute fronts, passed in because this package must not import the analysis."""

    present: FrontOf
    hopeful: FrontOf  # the front if noisy trials were valid and trials that shared their GPU were eligible
    baseline: BaselineOf  # finds the setting that is run today, which gains are relative to


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what is left of it, what that costs, and how it runs."""

    find: Callable[[], list[CompileSettings]]
    """Returns the settings that remain, given the records at the time of the call."""
    expected_s: Callable[[CompileSettings], float]
    undone: Callable[[int], str]
    """Says that this many settings did not run."""
    announcement: Callable[[Sequence[CompileSettings]], str] | None = None
    """Says what runs and why; None for the first stage, which the live view shows from the beginning."""
    most_rounds: int = 1
    """How often to compute the remaining settings again, because the front may have changed."""
    alone: bool = False
    restores: bool = False
    warm_start: bool = False
    is_planned: bool = False
    """Whether the number of planned trials counts its settings from the beginning."""
    is_search: bool = False
    """Whether the search chooses among the settings, and running trials may be stopped early."""


@dataclass(slots=True, kw_only=True)
class Stages:
    """One run of a sweep."""

    config: SweepConfig
    output: Path
    fronts: Fronts
    facts: WorkloadFacts
    environment: Environment
    learned: Learned = field(default_factory=Learned)  # what earlier sweeps teach the search
    tracking: Tracking = field(default_factory=Tracking)
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _fresh: Callable[[], list[TrialRecord]] = field(init=False)
    _records: list[TrialRecord] = field(default_factory=list, init=False)
    _before: int = field(default=0, init=False)  # number of records when this run began

    def __post_init__(self) -> None:
        self._fresh = record.follow(self.output).fresh
        self._before = len(self._done())

    def stages(self, *, interrupted: bool = False) -> list[Stage]:
        """Returns all stages, in order; a stage that the configuration disables has no settings."""
        caches, num_settings = self.config.caches, len(self.config.settings)
        ran_out = "the time budget did not suffice for them" if self.config.time_budget_s else "machines failed"
        why = "stopped" if interrupted else ran_out
        return [
            Stage(
                find=self.left,
                expected_s=self._expected_s,
                undone=lambda number: f"{number} of {num_settings} settings did not run ({why})",
                restores=caches is not CachePolicy.COLD,
                is_search=True,
            ),
            Stage(
                find=self._to_measure_cold,
                expected_s=self._expected_again_s,
                undone=lambda number: f"{number} of the front were not measured cold",
                announcement=remaining.announced_cold,
                most_rounds=remaining.MOST_ROUNDS,
            ),
            Stage(
                find=lambda: [CompileSettings.parse(member.settings_key) for member in self._disturbed()],
                expected_s=self._expected_again_s,
                undone=lambda number: f"{number} of the front were disturbed by other trials and did not run again alone",
                announcement=self._announced_disturbed,
                most_rounds=remaining.MOST_ROUNDS,
                alone=True,
                restores=caches is CachePolicy.SHARED,
            ),
            Stage(
                find=lambda: [] if self.config.script is None else remaining.baseline_again(self._done()),
                expected_s=self._expected_again_s,
                undone=lambda number: (
                    "the script as it is was not measured again, so the usual changes of a machine's speed count"
                ),
                announcement=lambda settings: remaining.BASELINE_AGAIN,
                alone=True,
                is_planned=True,
            ),
            Stage(
                find=self._to_start,
                expected_s=lambda setting: expected_warm_start_s(setting, self._done()),
                undone=lambda number: f"{number} of the front were not started from artifacts",
                announcement=remaining.announced_starts,
                alone=True,
                warm_start=True,
            ),
        ]

    def left(self) -> list[CompileSettings]:
        """Returns the settings without a record that counts; in a search, those it may still propose."""
        return remaining.left(self.config, self._done())

    @property
    def script_failure(self) -> str | None:
        """Why the unchanged script, which is tried first, could not be measured in this run; None if it ever was."""
        if any(one.settings.get("as_written") and one.status is Status.OK for one in self._done()):
            return None
        return next(filter(None, map(remaining.script_failure, self._done()[self._before :])), None)

    def undone(self, *, interrupted: bool) -> str | None:
        """Says what another run would do first, and why this one did not; None if nothing. A search reports its own settings."""
        for stage in self.stages(interrupted=interrupted):
            if stage.is_search and self.config.search.searcher is not None:
                continue
            if found := stage.find():
                return stage.undone(len(found))
        return None

    def search(self) -> Search | None:
        """Returns the search, after it has seen the existing records; None if settings run in order."""
        if self.config.search.searcher is None:
            return None
        stopping = self._interrupts.asked.is_set
        search = Search(self.config, self.output, self.facts, self.learned, self._expected_s, stopping)
        search.catch_up()
        return search

    def run(self, console: Console, search: Search | None = None) -> bool:
        """Runs all stages as far as the budgets allow; returns whether a person stopped them."""
        ends_at = time.monotonic() + self.config.time_budget_s if self.config.time_budget_s else float("inf")
        baseline = next((one for one in self.config.settings if one.is_unchanged_script), None)

        def reserved_s(stage: Stage, setting: CompileSettings) -> float:
            """Returns the seconds that are kept for measuring the unchanged script once more at the end."""
            return 0.0 if baseline is None or setting.as_written or not stage.is_search else self._expected_again_s(baseline)

        def fits(stage: Stage, setting: CompileSettings) -> bool:
            expected_s = stage.expected_s(setting)
            if search is not None:
                search.count_repeats()
            if self.script_failure is not None:
                return False
            in_time = not self._interrupts.asked.is_set() and time.monotonic() + expected_s + reserved_s(stage, setting) < ends_at
            return in_time and (search is None or search.allows(expected_s))

        def may_start(stage: Stage, setting: CompileSettings) -> bool:
            # Of a search's settings, which may be hundreds, only what runs is shown.
            view.expect({one.key: self._expected_s(one) for one in ([setting] if search else self.left())})
            if search is not None and stage.is_search:
                return self.script_failure is None and search.may_start(setting, reserved_s(stage, setting))
            return fits(stage, setting) and (search is None or search.may_take(setting, stage.expected_s(setting)))

        def stops_at(stage: Stage) -> float:
            """Returns when a trial that still runs is stopped.

            Without the first one there is nothing to tell: a workload's runs to its end, and a script's may leave out eager runs.
            """
            measured = [one for one in self._done() if one.status is Status.OK]
            if not measured:
                return ends_at + _LEAVING_S if baseline is not None else float("inf")
            has_others = any(not one.settings.get("as_written") for one in measured)
            if baseline is not None and stage.is_search and has_others:
                return ends_at - self._expected_again_s(baseline) - _STOPPING_S
            return ends_at if stage.is_search else ends_at + _LEAVING_S

        def affordable(stage: Stage) -> list[CompileSettings]:
            if stage.is_search and search is not None and search.why_enough() is not None:
                return []
            settings = stage.find()
            fitting = [setting for setting in settings if fits(stage, setting)]
            # In a search, a setting that does not fit now may fit later.
            return settings if fitting and stage.is_search else fitting

        def batches(view: LiveView) -> Iterator[Batch]:
            for stage in stages:
                for settings in remaining.rounds(partial(affordable, stage), stage.most_rounds):
                    if stage.announcement is not None:
                        expected = {setting.key: stage.expected_s(setting) for setting in settings}
                        are_trials = not (stage.warm_start or stage.is_planned)
                        view.plan_more(expected, stage.announcement(settings), are_trials=are_trials)
                    yield Batch(
                        settings=settings,
                        may_start=partial(may_start, stage),
                        alone=stage.alone,
                        restores=stage.restores,
                        warm_start=stage.warm_start,
                        search=search if stage.is_search else None,
                        pruning=self._pruning() if stage.is_search else None,
                        ends_at=partial(stops_at, stage) if self.config.time_budget_s else None,
                    )
                    if search is not None and stage.is_search:
                        search.catch_up()

        stages = self.stages()
        if not any(map(affordable, stages)):
            return False
        try:
            runner = make_runner(self.config, self.environment, self.output, self.tracking)
            with (
                runner.session(console.print, self._interrupts),
                self._view(console, runner, search) as view,
            ):
                runner.run(batches(view))
        except KeyboardInterrupt:
            if search is not None:
                search.catch_up()  # with trials that ended since the search was last asked
            return True
        return self._interrupts.asked.is_set()

    def _view(self, console: Console, runner: Runner, search: Search | None) -> LiveView:
        left = self.left()
        again = remaining.baseline_to_repeat(self.config, self._done())
        return LiveView(
            console=console,
            folder=self.output,
            title=f"{self.config.recipe}: {self.config.workload} ({self.config.size}) on {printed.machine(self.environment)}",
            planned=None if search else len(self._done()) + len(left) + len(again),
            expected_s={setting.key: self._expected_s(setting) for setting in left}
            | {f"{setting.key} again": self._expected_again_s(setting) for setting in again},
            front_of=self.fronts.present,
            baseline_of=self.fronts.baseline,
            stopping=self._interrupts.asked,
            running=runner.running,
        )

    def _to_measure_cold(self) -> list[CompileSettings]:
        """Returns the members of the front whose cold compile time is only estimated, if the sweep has to measure it."""
        if self.config.caches is not CachePolicy.AUTO:
            return []
        members = remaining.warm_members(self.fronts.present(self.output), self._done())
        return [CompileSettings.parse(member.settings_key) for member in members]

    def _disturbed(self) -> list[TrialRecord]:
        """Returns the members of the front, including those that only noise keeps off it, that must be measured again alone."""
        if not self.config.confirm:
            return []
        front = self.fronts.hopeful(self.output)
        return remaining.disturbed_members(front, self._done(), side_by_side=self.config.max_concurrent > 1)

    def _announced_disturbed(self, settings: Sequence[CompileSettings]) -> str:
        keys = {setting.key for setting in settings}
        return remaining.announcement([member for member in self._disturbed() if member.settings_key in keys])

    def _to_start(self) -> list[CompileSettings]:
        front = self.fronts.present(self.output)
        return remaining.not_started(self.config, front, self._done(), record.read_warm_starts(self.output))

    def _pruning(self) -> Pruning | None:
        if not self.config.search.prune:
            return None
        search = self.config.search
        return Pruning(Candidates(self.config.settings), search.aims, self.facts, patience=patience_with(search.searcher))

    def _done(self) -> list[TrialRecord]:
        """Returns the folder's records. Reads only those added since the last call, because this is called for every setting."""
        self._records += self._fresh()
        return self._records

    def _expected_s(self, setting: CompileSettings) -> float:
        return printed.expected_trial_s(self.config, setting, self.facts, self._done())

    def _expected_again_s(self, setting: CompileSettings) -> float:
        """Estimates the seconds for measuring a front member again: cold, unless trials share artifacts to the end."""
        is_cold = self.config.caches is not CachePolicy.SHARED
        return min(expected_s(setting, self.facts, self._done(), cold=is_cold), self.config.whole_trial_s)
