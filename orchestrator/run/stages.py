"""The stages of a sweep, in order: what is left, the front cold, what neighbours disturbed alone, warm starts of the front."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from compile_sweep.schema import record
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import CachePolicy, SweepConfig
from orchestrator.environment import Environment
from orchestrator.guard.scratch_folders import scratch_folder
from orchestrator.plan.estimates import expected_s, expected_warm_start_s
from orchestrator.run import remaining, sweep_folder
from orchestrator.run.remaining import announcement, disturbed_members, rounds
from orchestrator.run.session import Interrupts, ray_session
from orchestrator.search import Candidates, Learned
from orchestrator.search.pruning import Pruning, patience_with
from orchestrator.search.search_run import Search
from orchestrator.tracking import Tracking
from orchestrator.view import printed

FrontOf = Callable[[Path], list[str]]
"""Settings keys of a folder's present front."""


class Fronts(NamedTuple):
    """Where fronts come from; the analysis is downstream of what is here."""

    present: FrontOf
    hopeful: FrontOf
    """The front there would be if noisy trials were as good as their figures, and those that shared their GPU were usable."""


@dataclass(slots=True, kw_only=True)
class Stages:
    """One run of a sweep."""

    config: SweepConfig
    output: Path
    """The sweep's folder."""
    fronts: Fronts
    max_length: int
    """Of the workload, in tokens."""
    environment: Environment
    """Of the head."""
    min_length: int = 1
    """Of the workload, in tokens."""
    learned: Learned = field(default_factory=Learned)
    """What earlier sweeps teach its search."""
    tracking: Tracking = field(default_factory=Tracking)
    """What trials are logged to besides."""
    _interrupts: Interrupts = field(default_factory=Interrupts)
    _fresh: Callable[[], list[TrialRecord]] = field(init=False)
    _records: list[TrialRecord] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._fresh = record.follow(self.output).fresh

    def left(self) -> list[CompileSettings]:
        """Settings that no record counts for; of a search, those it may still propose."""
        return remaining.left(self.config, self._done())

    def to_measure_cold(self) -> list[TrialRecord]:
        """Members of the front whose cold compile time is only estimated, where it has to be measured."""
        if self.config.caches is not CachePolicy.AUTO:
            return []
        return remaining.warm_members(self.fronts.present(self.output), self._done())

    def disturbed(self) -> list[TrialRecord]:
        """Members of the front, those that noise alone keeps off it included, that have to be measured again alone."""
        if not self.config.confirm:
            return []
        front = self.fronts.hopeful(self.output)
        return disturbed_members(front, self._done(), side_by_side=self.config.max_concurrent > 1)

    def to_start(self) -> list[CompileSettings]:
        """Members of the front that have not been started from their own artifacts."""
        front = self.fronts.present(self.output)
        return remaining.not_started(self.config, front, self._done(), record.read_warm_starts(self.output))

    def undone(self, *, interrupted: bool) -> str | None:
        """What another run would do first, and why this one did not; None if nothing. Of its settings a search tells itself."""
        if self.config.search.searcher is None and (left := self.left()):
            ran_out = "the time budget did not suffice for them" if self.config.time_budget_s else "machines failed"
            why = "stopped" if interrupted else ran_out
            return f"{len(left)} of {len(self.config.settings)} settings did not run ({why})"
        if cold := self.to_measure_cold():
            return f"{len(cold)} of the front were not measured cold"
        if unconfirmed := self.disturbed():
            return f"{len(unconfirmed)} of the front were disturbed by other trials and did not run again alone"
        if starts := self.to_start():
            return f"{len(starts)} of the front were not started from artifacts"
        return None

    def search(self) -> Search | None:
        """What chooses among the settings, told of the records there are; None where they are tried in order."""
        if self.config.search.searcher is None:
            return None
        stopping = self._interrupts.asked.is_set
        search = Search(self.config, self.output, self.max_length, self.learned, self._expected_s, stopping, self.min_length)
        search.catch_up()
        return search

    def run(self, console: Console, search: Search | None = None) -> bool:
        """Runs all of it, as far as the budgets go; returns whether a person stopped it.

        Args:
            console: where to write.
            search: what `search` returned.
        """
        ends_at = time.monotonic() + self.config.time_budget_s if self.config.time_budget_s else float("inf")

        def fits(expected_s: float) -> bool:
            if search is not None:
                search.count_repeats()
            in_time = not self._interrupts.asked.is_set() and time.monotonic() + expected_s < ends_at
            return in_time and (search is None or search.allows(expected_s))

        def start_fits(setting: CompileSettings) -> bool:
            return fits(self._expected_start_s(setting))

        def may_take(expected: Callable[[CompileSettings], float], setting: CompileSettings) -> bool:
            expected_s = expected(setting)
            return fits(expected_s) and (search is None or search.may_take(setting, expected_s))

        may_run, may_start = partial(may_take, self._expected_again_s), partial(may_take, self._expected_start_s)

        def may_try(setting: CompileSettings) -> bool:
            return search.may_start(setting) if search else may_take(self._expected_s, setting)

        def affordable(find: Callable[[], list[TrialRecord]]) -> list[TrialRecord]:
            return [member for member in find() if fits(self._expected_again_s(CompileSettings.parse(member.settings_key)))]

        left = self.left()
        if search is not None and search.why_enough() is not None:
            left = []
        if not (
            any(fits(self._expected_s(setting)) for setting in left)
            or affordable(self.to_measure_cold)
            or affordable(self.disturbed)
            or any(map(start_fits, self.to_start()))
        ):
            return False
        with scratch_folder("compile-sweep-tune-") as scratch:
            try:
                with ray_session(), self._interrupts.handled():  # inside, because Ray installs a handler for SIGTERM itself
                    from orchestrator.cluster.placement import in_cluster, start_placement_actor, wait_for_host
                    from orchestrator.cluster.remote_logs import start_log_actor
                    from orchestrator.guard.progress import (
                        start_progress_actor,  # these import ray, which reads what the session has set
                    )
                    from orchestrator.run.tuning import run_trials
                    from orchestrator.view.live import LiveView

                    view = LiveView(
                        console=console,
                        folder=self.output,
                        title=f"{self.config.recipe}: {self.config.workload} ({self.config.size}) on "
                        f"{printed.machine(self.environment)}",
                        planned=None if search else len(self._done()) + len(left),
                        expected_s={setting.key: self._expected_s(setting) for setting in left},
                        front_of=self.fronts.present,
                        stopping=self._interrupts.asked,
                    )
                    run = partial(
                        run_trials,
                        self.config,
                        environment=self.environment,
                        output=self.output,
                        scratch=scratch,
                        new_trial_id=_new_trial_id(self.output),
                        tracking=self.tracking,
                    )

                    def again(members: Sequence[TrialRecord], why: str) -> list[CompileSettings]:
                        settings = [CompileSettings.parse(member.settings_key) for member in members]
                        view.plan_more({setting.key: self._expected_again_s(setting) for setting in settings}, why)
                        return settings

                    with ExitStack() as opened:
                        opened.enter_context(
                            start_progress_actor()
                        )  # first: a second sweep must not take hosts before it is refused
                        if in_cluster():
                            wait_for_host(self.config, self.environment.cores, console.print, self._interrupts.asked)
                            opened.enter_context(start_log_actor(self.output))
                            opened.enter_context(start_placement_actor())
                        opened.enter_context(view)
                        if left:
                            restores = self.config.caches is not CachePolicy.COLD
                            run(left, may_start=may_try, restores=restores, search=search, pruning=self._pruning())
                            if search is not None:
                                search.catch_up()
                        for members in rounds(partial(affordable, self.to_measure_cold)):
                            run(again(members, remaining.announced_cold(members)), may_start=may_run)
                        for members in rounds(partial(affordable, self.disturbed)):
                            restores = self.config.caches is CachePolicy.SHARED
                            run(again(members, announcement(members)), may_start=may_run, alone=True, restores=restores)
                        if starting := list(filter(start_fits, self.to_start())):
                            expected = {setting.key: self._expected_start_s(setting) for setting in starting}
                            view.expect_starts(expected, remaining.announced_starts(starting))
                            run(starting, may_start=may_start, alone=True, warm_start=True)
            except KeyboardInterrupt:
                if search is not None:
                    search.catch_up()  # with trials that ended since it was last asked
                return True
        return self._interrupts.asked.is_set()

    def _pruning(self) -> Pruning | None:
        if not self.config.search.prune:
            return None
        search = self.config.search
        patience = patience_with(search.searcher)
        lengths = {"max_length": self.max_length, "min_length": self.min_length}
        return Pruning(Candidates(self.config.settings), search.aims, **lengths, patience=patience)

    def _done(self) -> list[TrialRecord]:
        """The folder's records; only what was added since the last call is read, because this is asked for every setting."""
        self._records += self._fresh()
        return self._records

    def _expected_s(self, setting: CompileSettings) -> float:
        return self._at_most_s(setting, cold=self.config.caches is CachePolicy.COLD)

    def _expected_again_s(self, setting: CompileSettings) -> float:
        """Of a member of the front that is measured again: cold, unless trials share artifacts to the end."""
        return self._at_most_s(setting, cold=self.config.caches is not CachePolicy.SHARED)

    def _at_most_s(self, setting: CompileSettings, *, cold: bool) -> float:
        expected = expected_s(setting, self.max_length, self._done(), min_length=self.min_length, cold=cold)
        return min(expected, self.config.whole_trial_s)

    def _expected_start_s(self, setting: CompileSettings) -> float:
        return expected_warm_start_s(setting, self._done())


def _new_trial_id(output: Path) -> Callable[[], str]:
    numbers = count(len(list((output / sweep_folder.LOGS).iterdir())) + 1)
    return lambda: f"{next(numbers):03d}-{uuid.uuid4().hex[:6]}"
