"""What a sweep still has to run, according to its records."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import CachePolicy, SweepConfig
from orchestrator.run.remaining import announced_cold, announced_starts, left, not_started, warm_members

EAGER, FULL, REGIONAL = (CompileSettings.parse(f"scope={scope}") for scope in ("eager", "full", "regional"))


def config(**fields: Any) -> SweepConfig:
    """A sweep of the three settings with a cache."""
    settings = (EAGER, FULL, REGIONAL)
    usual: dict[str, Any] = {"recipe": "given", "workload": "toy", "size": "only", "settings": settings, "cache": "/cache"}
    return SweepConfig(**{**usual, **fields})


def record(settings: CompileSettings, caches: Caches = Caches.COLD, **fields: Any) -> TrialRecord:
    return TrialRecord(
        **{"trial_id": "1", "settings": settings.to_dict(), "settings_key": settings.key, "status": Status.OK, "caches": caches},
        **fields,
    )


def start(settings: CompileSettings, status: Status = Status.OK) -> WarmStart:
    return WarmStart(trial_id="1", settings=settings.to_dict(), settings_key=settings.key, status=status)


@pytest.mark.parametrize(
    ("caches", "expected"),
    [(CachePolicy.COLD, [REGIONAL, FULL]), (CachePolicy.SHARED, [REGIONAL]), (CachePolicy.AUTO, [REGIONAL])],
)
def test_a_warm_record_does_not_count_where_trials_are_to_be_cold(caches: CachePolicy, expected: list[CompileSettings]) -> None:
    done = [record(EAGER), record(FULL, Caches.WARM)]
    assert set(left(config(caches=caches), done)) == set(expected)


def test_settings_are_left_in_their_order() -> None:
    assert left(config(), []) == [EAGER, FULL, REGIONAL]
    assert left(config(), [record(FULL)]) == [EAGER, REGIONAL]


def test_a_fault_of_the_machines_is_no_result_and_runs_again() -> None:
    lost = dataclasses.replace(record(EAGER), status=Status.FAILED, label=Label.NODE_LOST)
    died = dataclasses.replace(lost, label=Label.WORKER_DIED)
    assert EAGER in left(config(), [lost])
    assert EAGER not in left(config(), [died])
    assert EAGER not in left(config(), [lost, record(EAGER)])


def test_members_whose_cold_time_is_estimated_are_found_until_they_are_measured() -> None:
    front = [EAGER.key, FULL.key]
    done = [record(EAGER), record(FULL, Caches.WARM), record(REGIONAL, Caches.WARM)]
    assert warm_members(front, done) == [done[1]]
    assert warm_members(front, [*done, record(FULL)]) == []


def test_what_published_artifacts_is_started_once() -> None:
    front = [EAGER.key, FULL.key, REGIONAL.key]
    done = [record(EAGER), record(FULL, cache_made=3), record(REGIONAL)]
    assert not_started(config(), front, done, []) == [FULL]
    assert not_started(config(), front, done, [start(REGIONAL)]) == [FULL]
    assert not_started(config(), front, done, [start(FULL, Status.FAILED)]) == []
    assert not_started(config(), [REGIONAL.key], done, []) == []


def test_artifacts_of_an_earlier_attempt_serve_for_a_start() -> None:
    done = [record(FULL, Caches.WARM, cache_made=3), record(FULL)]
    assert not_started(config(), [FULL.key], done, []) == [FULL]


def test_what_a_remote_cache_holds_is_known_from_having_been_read() -> None:
    remote = config(cache="redis://h:1", caches=CachePolicy.AUTO)
    done = [record(EAGER), record(FULL, Caches.WARM), record(FULL), record(REGIONAL)]
    assert not_started(remote, [EAGER.key, FULL.key, REGIONAL.key], done, []) == [FULL]


@pytest.mark.parametrize("fields", [{"cache": None}, {"warm_starts": False}])
def test_no_start_without_a_cache_or_where_none_is_wanted(fields: dict[str, Any]) -> None:
    assert not_started(config(**fields), [FULL.key], [record(FULL, cache_made=3)], []) == []


def test_what_is_run_again_is_named() -> None:
    assert announced_cold([FULL]).startswith("measuring 1 member of the front again, cold, because")
    assert announced_cold([FULL]).endswith(FULL.label)
    assert f"starting 2 members of the front in a fresh process each, from its own artifacts: {FULL.label}; " in announced_starts(
        [FULL, REGIONAL]
    )
