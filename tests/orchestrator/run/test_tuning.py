"""The Tune searcher on a real Ray session: trials that only write the record of a recorded table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from recorded_tables import TARGET, recorded, settings_of_a_grid, write_sweep

from compile_sweep.schema import record as records
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run.runner import Batch
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.tuning import ProposingSearcher
from orchestrator.search import Candidates, Searcher, make_proposer
from orchestrator.search.proposers import Proposer
from orchestrator.search.pruning import Pruning

AIMS = Aims.parse()
DONE = recorded(settings_of_a_grid(10))
BY_KEY = {record.settings_key: record for record in DONE}
SETTINGS = [CompileSettings.parse(record.settings_key) for record in DONE]


def plan(folder: Path) -> TrialPlan:
    return TrialPlan(
        folder=str(folder),
        workload="captioning",
        size="small",
        seed=0,
        num_workers=1,
        use_gpu=False,
        pipeline="resident",
        workers_at_once=2,
        claimed_cpus=1.0,
        compile_deadline_s=60.0,
        trial_deadline_s=120.0,
    )


class Log:
    """A small version of `records.follow`: the new records of a list."""

    def __init__(self) -> None:
        self.written: list[TrialRecord] = []
        self._told = 0

    def __call__(self) -> list[TrialRecord]:
        new, self._told = self.written[self._told :], len(self.written)
        return new


@dataclass
class Search:
    """A search that learns from what a function returns."""

    new_records: Callable[[], list[TrialRecord]]
    enough: str | None = None
    proposer: Proposer = field(init=False)

    def __post_init__(self) -> None:
        self.proposer = make_proposer(Searcher.GAIN, Candidates(SETTINGS), AIMS, TARGET)

    def why_enough(self) -> str | None:
        return self.enough


def searcher(
    log: Callable[[], list[TrialRecord]],
    *further: Batch,
    folder: Path = Path("sweep"),
    may_start: Callable[[CompileSettings], bool] = lambda setting: True,
    enough: str | None = None,
) -> ProposingSearcher:
    batch = Batch(settings=SETTINGS, may_start=may_start, search=Search(log, enough))
    return ProposingSearcher([batch, *further], plan(folder), iter(map(str, range(99))).__next__)


def test_it_proposes_until_nothing_is_left_and_learns_from_records_alone() -> None:
    log = Log()
    asking = searcher(log)
    proposed = []
    while (suggestion := asking.suggest("tune's own name")) != ProposingSearcher.FINISHED:
        assert suggestion is not None
        assignment = Assignment.from_dict(suggestion)
        proposed.append(assignment.settings.key)
        log.written.append(BY_KEY[assignment.settings.key])
        asking.on_trial_complete("tune's own name", error=True)  # what Tune says of it does not count
    assert sorted(proposed) == sorted(BY_KEY)


def test_what_a_resumed_sweep_has_is_not_proposed_again() -> None:
    log = Log()
    log.written = DONE[:9]
    asking = searcher(log)
    suggestion = asking.suggest("1")
    assert suggestion is not None
    assert suggestion["settings_key"] == DONE[9].settings_key
    assert asking.suggest("2") == ProposingSearcher.FINISHED


def test_a_setting_that_may_not_start_is_passed_over_and_enough_ends_it() -> None:
    asking = searcher(Log(), may_start=lambda setting: setting.scope != "eager")
    first = asking.suggest("1")
    assert first is not None
    assert not first["settings_key"].startswith("scope=eager")
    assert searcher(Log(), enough="the budget is used").suggest("1") == ProposingSearcher.FINISHED


def test_batches_follow_each_other_with_plans_and_early_stopping_of_their_own(tmp_path: Path) -> None:
    log = Log()
    log.written = DONE[:9]
    pruning = Pruning(Candidates(SETTINGS), AIMS, TARGET)

    def batches() -> Iterator[Batch]:
        yield Batch(settings=SETTINGS, may_start=lambda _: True, search=Search(log), restores=True, pruning=pruning)
        assert len(log.written) == 10, "asked for once the first batch has ended"
        yield Batch(settings=SETTINGS[:2], may_start=lambda setting: setting != SETTINGS[0])
        yield Batch(settings=SETTINGS[:1], may_start=lambda _: True, warm_start=True)

    asking = ProposingSearcher(batches(), plan(tmp_path), iter(map(str, range(99))).__next__)
    found, stops = [], []
    while (suggestion := asking.suggest("1")) != ProposingSearcher.FINISHED:
        assert suggestion is not None
        found.append(Assignment.from_dict(suggestion))
        stops.append(asking.early_stopping is not None)
        log.written = DONE[:10]
    assert [one.settings for one in found] == [SETTINGS[9], SETTINGS[1], SETTINGS[0]]
    of_batches = [(one.plan.restores, one.plan.prunes, one.plan.warm_start) for one in found]
    assert of_batches == [(True, True, False), (False, False, False), (True, False, True)]
    shared = [replace(one.plan, restores=False, prunes=False, warm_start=False) for one in found]
    assert shared == [found[1].plan] * 3, "so that one worker group runs them all"
    assert stops == [True, False, False]


def test_no_batch_is_asked_for_once_it_is_over() -> None:
    unasked = iter([Batch(settings=SETTINGS, may_start=lambda _: True)])
    asking = ProposingSearcher(unasked, plan(Path("sweep")), lambda: "1", is_over=lambda: True)
    assert asking.suggest("1") == ProposingSearcher.FINISHED
    assert next(unasked, None) is not None


def trainable() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Defined here so that it is pickled by value, since workers cannot import a test."""
    lines = {record.settings_key: record.to_json() for record in DONE}

    def write_record(config: Mapping[str, Any]) -> dict[str, Any]:
        assignment = Assignment.from_dict(config)
        line = lines[assignment.settings.key]
        records.append(Path(assignment.plan.folder), TrialRecord.from_json(line))
        if "infeasible" in line:
            raise RuntimeError("a trial that dies after its record is written")
        return {"done": True}

    return write_record


@pytest.mark.nightly("one more search with Ray; test_searches.py searches in a sweep")
@pytest.mark.ray
@pytest.mark.slow
def test_tune_runs_a_whole_search_with_it(tmp_path: Path) -> None:
    from ray import tune

    from orchestrator.run.session import ray_session

    folder = write_sweep(tmp_path / "sweep", DONE[:2])
    asking = searcher(records.follow(folder).fresh, folder=folder)
    with ray_session():
        tune.Tuner(
            tune.with_resources(trainable(), {"cpu": 0.5}),
            tune_config=tune.TuneConfig(search_alg=asking, num_samples=-1, max_concurrent_trials=2, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
        ).fit()
    keys = [record.settings_key for record in records.read(folder)]
    assert sorted(keys) == sorted(BY_KEY)
