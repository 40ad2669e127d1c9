"""A running search: what its proposer sees, what it may spend, and when it has enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device, SearchConfig, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.search import Learned, Searcher
from orchestrator.search.predictions import Left
from orchestrator.search.search_run import MOST_REFUSED, Search, learned_for

SETTINGS = tuple(
    CompileSettings.parse(f"scope={scope},optimizer={optimizer}")
    for scope in ("eager", "regional", "full", "modular")
    for optimizer in ("foreach", "fused", "compiled")
)


def recorded(setting: CompileSettings, samples_per_s: float | None = None, **fields: Any) -> TrialRecord:
    figures = {"samples_per_s": samples_per_s, "compile_s": 10.0, "peak_memory_bytes": 2**30}
    known = {"status": Status.OK, "wall_s": 30.0, "workload": "captioning", "size": "tiny", **(figures if samples_per_s else {})}
    return TrialRecord(trial_id=uuid4().hex, settings=setting.to_dict(), settings_key=setting.key, **{**known, **fields})


def search(
    folder: Path,
    *,
    settings: tuple[CompileSettings, ...] = SETTINGS,
    learned: Learned | None = None,
    expected_s: float = 30.0,
    time_budget_s: float | None = None,
    workers: int = 1,
    **fields: Any,
) -> Search:
    config = SweepConfig(
        recipe="given",
        workload="captioning",
        size="tiny",
        settings=settings,
        time_budget_s=time_budget_s,
        workers_per_trial=workers,
        search=SearchConfig(**{"searcher": Searcher.GRID, **fields}),
    )
    return Search(config, folder, WorkloadFacts(max_length=64), learned or Learned(), lambda setting: expected_s, lambda: False)


def step(asked: Search, folder: Path, samples_per_s: float | None, **fields: Any) -> None:
    """Runs one trial of a search."""
    setting = asked.proposer.propose()
    assert setting is not None
    assert asked.may_start(setting)
    records.append(folder, recorded(setting, samples_per_s, **fields))
    asked.catch_up()


def test_settings_in_order_end_when_none_is_left(tmp_path: Path) -> None:
    asked = search(tmp_path, settings=SETTINGS[:2])
    for speed in (100, 200):
        assert asked.why_enough() is None
        step(asked, tmp_path, speed)
    assert asked.proposer.propose() is None
    assert asked.outcome() == "the search ended after 2 trials of 2 settings: there is nothing left to try"
    assert asked.complaint() is None


def test_a_front_that_stands_still_is_enough_and_what_is_left_to_gain_is_told(tmp_path: Path) -> None:
    asked = search(tmp_path, stop="front stable for 2 trials")
    step(asked, tmp_path, 100, compile_s=5.0, peak_memory_bytes=2**29)
    step(asked, tmp_path, 90)
    assert asked.why_enough() is None
    step(asked, tmp_path, None, status=Status.STOPPED, label="dominated")
    assert asked.why_enough() == "the front has not moved for 2 trials"
    assert (
        "3 trials of 12 settings: the front has not moved for 2 trials; of those not tried the best is expected"
        in asked.outcome()
    )


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            Left(0.031, 0.25),
            "of those not tried the best is expected to add 3.1% to the hypervolume, all of them to add at most 25.0%",
        ),
        (Left(0.5, 28.0), "of those not tried the best is expected to add 50.0% to the hypervolume"),
        (Left(140.0, 9000.0), "of those not tried the best is expected to more than double the hypervolume"),
    ],
)
def test_what_is_left_is_told_as_far_as_it_says_anything(
    left: Left, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = search(tmp_path)
    step(asked, tmp_path, 100)
    monkeypatch.setattr(asked, "left", lambda: left)
    assert asked.outcome().endswith(f"; {said}")


def test_gpu_seconds_count_each_worker_compile_time_and_what_is_under_way(tmp_path: Path) -> None:
    asked = search(tmp_path, gpu_budget_s=170, workers=2)
    step(asked, tmp_path, 100, num_workers=2)  # 60 GPU-seconds
    first, second = asked.proposer.propose(), asked.proposer.propose()
    assert first is not None
    assert second is not None
    assert asked.may_start(first)  # probably 60 more
    assert not asked.may_start(second)
    records.append(tmp_path, recorded(first, 100, num_workers=2, wall_s=20.0))
    list(asked.new_records())
    assert asked.may_start(second)  # it took 40 only


def test_gpu_seconds_count_what_is_measured_again_and_started_warm(tmp_path: Path) -> None:
    asked = search(tmp_path, gpu_budget_s=100, expected_s=30.0)
    step(asked, tmp_path, 100)
    step(asked, tmp_path, 110)  # 60 in all
    first, second, third = SETTINGS[:3]
    assert asked.may_take(first, 30.0)
    assert not asked.may_take(second, 30.0), "beside the first, which is under way"
    records.append(tmp_path, recorded(first, 100, wall_s=10.0))
    asked.count_repeats()
    assert asked.may_take(second, 30.0)
    fields: dict[str, Any] = {"trial_id": "1", "settings": second.to_dict(), "settings_key": second.key, "status": Status.OK}
    records.append(tmp_path, WarmStart(**fields, wall_s=10.0, warm_start_s=5.0, retried_s=5.0))
    asked.count_repeats()
    assert asked.allows(15.0)
    assert not asked.allows(16.0)
    again = search(tmp_path, gpu_budget_s=100)
    again.catch_up()
    assert again.allows(15.0)
    assert not again.allows(16.0), "those of earlier runs count"
    assert asked.proposer.propose() == third, "nothing that was measured again is a proposal"


def test_what_is_measured_again_leaves_it_to_the_search_why_it_ended(tmp_path: Path) -> None:
    asked = search(tmp_path, stop="front stable for 2 trials")
    for speed in (100, 90, 80):
        step(asked, tmp_path, speed)
    records.append(tmp_path, recorded(SETTINGS[1], 200))
    asked.count_repeats()
    assert asked.why_enough() == "the front has not moved for 2 trials"


def test_after_many_proposals_that_do_not_fit_none_is_expected_to(tmp_path: Path) -> None:
    many = tuple(CompileSettings.parse(f"scope=regional,dynamic=mark,pad_multiple={n}") for n in range(1, MOST_REFUSED + 3))
    asked = search(tmp_path, settings=many, expected_s=1000, gpu_budget_s=100)
    refused = 0
    while asked.why_enough() is None and (setting := asked.proposer.propose()) is not None:
        assert not asked.may_start(setting)
        refused += 1
    assert refused == MOST_REFUSED
    assert asked.why_enough() == "no setting fits in what is left of the budget"


def test_where_trials_are_to_be_cold_what_was_measured_warm_is_tried(tmp_path: Path) -> None:
    warm = recorded(SETTINGS[0], 100, caches=Caches.WARM, cold_equivalent_s=20.0)
    records.append(tmp_path, warm)
    asked = search(tmp_path, settings=SETTINGS[:2])
    asked.catch_up()
    for setting in SETTINGS[:2]:
        assert asked.proposer.propose() == setting
        records.append(tmp_path, recorded(setting, 100))
    asked.catch_up()
    assert asked.outcome() == "the search ended after 2 trials of 2 settings: there is nothing left to try"


def test_a_search_whose_budget_nothing_fits_in_says_so(tmp_path: Path) -> None:
    asked = search(tmp_path, gpu_budget_s=5)
    assert asked.outcome() == "the search ended after 0 trials of 12 settings: no setting fits in what is left of the budget"


def test_what_the_machines_ended_is_no_trial_that_left_the_front_as_it_was(tmp_path: Path) -> None:
    asked = search(tmp_path, stop="front stable for 2 trials", gpu_budget_s=1000)
    step(asked, tmp_path, 100)
    for _ in range(2):
        step(asked, tmp_path, None, status=Status.FAILED, label="node-lost")
    assert asked.why_enough() is None
    assert not asked.allows(920), "it costs what it took"


def test_what_was_measured_again_is_no_news_of_the_front_to_a_resumed_search_either(tmp_path: Path) -> None:
    asked = search(tmp_path, stop="front stable for 3 trials", num_trials=2)
    for speed in (100, 90):
        step(asked, tmp_path, speed)
    for setting in SETTINGS[:2]:
        records.append(tmp_path, recorded(setting, 95))
    again = search(tmp_path, stop="front stable for 3 trials", num_trials=4)
    again.catch_up()
    assert again.why_enough() is None
    step(again, tmp_path, 80)
    step(again, tmp_path, 80)
    assert again.why_enough() == "4 trials were asked for"


def test_a_time_budget_begins_when_the_search_does(tmp_path: Path) -> None:
    assert search(tmp_path, time_budget_s=20).may_start(SETTINGS[0]) is False
    assert search(tmp_path, time_budget_s=40).may_start(SETTINGS[0]) is True


def test_a_number_of_trials_counts_those_of_earlier_runs_and_those_under_way(tmp_path: Path) -> None:
    records.append(tmp_path, recorded(SETTINGS[0], 100))
    asked = search(tmp_path, num_trials=3)
    asked.catch_up()
    step(asked, tmp_path, 200)
    assert asked.why_enough() is None
    proposed = asked.proposer.propose()
    assert proposed == SETTINGS[2]  # what is recorded is not proposed again
    assert asked.may_start(proposed)
    assert asked.why_enough() == "3 trials were asked for"


@pytest.mark.parametrize("searcher", Searcher)
def test_what_the_machines_ended_is_proposed_to_the_next_run_and_costs_what_it_took(searcher: Searcher, tmp_path: Path) -> None:
    first = search(tmp_path, settings=SETTINGS[:3], searcher=searcher, num_trials=3, gpu_budget_s=1000)
    begun = [first.proposer.propose() for _ in range(3)]
    for setting, lost in zip(begun, (False, True, False), strict=True):
        assert setting is not None
        assert first.may_start(setting)
        fate = {"status": Status.FAILED, "label": "node-lost"} if lost else {}
        records.append(tmp_path, recorded(setting, None if lost else 100, **fate))
    first.catch_up()
    assert first.proposer.propose() is None, "not twice in a run"
    assert first.outcome().startswith("the search ended after 2 trials of 3 settings")
    again = search(tmp_path, settings=SETTINGS[:3], searcher=searcher, num_trials=3, gpu_budget_s=1000)
    again.catch_up()
    assert again.proposer.propose() == begun[1]
    assert not again.allows(920), "of 1000 s, 90 are spent"


def test_a_constraint_that_no_trial_keeps_is_named(tmp_path: Path) -> None:
    asked = search(tmp_path, constraints=("compile_s<=5",))
    step(asked, tmp_path, 100)
    assert asked.complaint() == "no setting meets the constraint compile_s<=5; the nearest has 10"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of an earlier sweep in this environment."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    for number, setting in enumerate(SETTINGS[:3]):
        records.append(folder, recorded(setting, 100 + number, environment_key=fingerprint().key))
    return folder


def learning(folder: Path, **fields: Any) -> SweepConfig:
    options = SearchConfig(searcher=Searcher.GAIN, learn_from=(str(folder),), **fields)
    return SweepConfig(recipe="given", workload="captioning", size="tiny", settings=SETTINGS, search=options)


def test_what_an_earlier_sweep_tried_is_known_and_not_tried_again(tmp_path: Path, earlier: Path) -> None:
    learned = learned_for(learning(earlier), fingerprint())
    assert [record["settings_key"] for record in learned.records] == [setting.key for setting in SETTINGS[:3]]
    asked = search(tmp_path, learned=learned, num_trials=9)
    assert asked.proposer.propose() == SETTINGS[3]
    assert asked.why_enough() is None  # trials of another sweep do not count here


def test_a_head_without_a_gpu_learns_from_what_gpus_of_one_kind_measured(tmp_path: Path, earlier: Path) -> None:
    head = replace(fingerprint(), gpu=None, num_gpus=0, cpu="another")
    assert len(learned_for(replace(learning(earlier), device=Device.CUDA), head).records) == 3
    with pytest.raises(ConfigError, match=f"environment key {fingerprint().key} instead of {head.key}"):
        learned_for(replace(learning(earlier), device=Device.CPU), head)
    other = tmp_path / "other"
    other.mkdir()
    records.append(other, recorded(SETTINGS[0], 100, environment_key="of-another-gpu"))
    both = replace(learning(earlier).search, learn_from=(str(earlier), str(other)))
    with pytest.raises(ConfigError, match="environment key of-another-gpu instead of"):
        learned_for(replace(learning(earlier), device=Device.CUDA, search=both), head)


def test_another_sizes_best_settings_are_only_tried_first(tmp_path: Path, earlier: Path) -> None:
    config = learning(earlier)
    with pytest.raises(ConfigError, match="size tiny instead of base"):
        learned_for(
            SweepConfig(recipe="given", workload="captioning", size="base", settings=SETTINGS, search=config.search),
            fingerprint(),
        )
    forced = learning(earlier, learn_anyway=True).search
    base = SweepConfig(recipe="given", workload="captioning", size="base", settings=SETTINGS, search=forced)
    learned = learned_for(base, fingerprint())
    assert (learned.records, learned.known_good) == ((), (SETTINGS[2],))


def test_a_log_is_followed_record_by_record_without_reading_it_again(tmp_path: Path) -> None:
    tail = records.follow(tmp_path)
    assert tail.fresh() == []
    records.append(tmp_path, recorded(SETTINGS[0], 100))
    assert [record.settings_key for record in tail.fresh()] == [SETTINGS[0].key]
    assert tail.fresh() == []
    for setting in SETTINGS[1:3]:
        records.append(tmp_path, recorded(setting, 100, reason="naïve –\u2028 line"))
    assert [record.settings_key for record in tail.fresh()] == [setting.key for setting in SETTINGS[1:3]]
