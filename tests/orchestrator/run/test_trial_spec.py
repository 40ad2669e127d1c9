"""What a trial is asked to do, and the record it ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile_sweep.schema.outcome import OK, Label, Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from orchestrator.artifacts.manifest import kept_apart
from orchestrator.run.trial_spec import Assignment, TrialPlan


def assignment(settings: str = "scope=full", **plan: Any) -> Assignment:
    """A trial on a CPU, with these fields of its plan changed."""
    usual: dict[str, Any] = {
        "folder": "/sweep",
        "workload": "toy",
        "size": "only",
        "seed": 0,
        "num_workers": 2,
        "use_gpu": False,
        "pipeline": "real",
        "workers_at_once": 1,
        "claimed_cpus": 0.5,
        "compile_deadline_s": 60.0,
        "trial_deadline_s": 60.0,
    }
    return Assignment(plan=TrialPlan(**{**usual, **plan}), trial_id="7", settings=CompileSettings.parse(settings))


def record(one: Assignment, **figures: Any) -> TrialRecord | WarmStart:
    return one.record(OK, phase="done", started_at="now", wall_s=1.0, figures=figures)


def test_an_assignment_crosses_processes_as_plain_values() -> None:
    one = assignment(cache="/cache", restores=True, precompile=True, python_path="/mine:/ours")
    assert Assignment.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@pytest.mark.parametrize(
    ("settings", "plan", "restores"),
    [
        ("scope=full", {"restores": True, "cache": "/cache"}, True),
        ("scope=full", {"restores": False, "cache": "/cache"}, False),
        ("scope=full", {"restores": True, "cache": None}, False),
        ("scope=eager", {"restores": True, "cache": "/cache"}, False),
    ],
)
def test_only_what_compiles_begins_with_artifacts(settings: str, plan: dict[str, Any], restores: bool) -> None:
    one = assignment(settings, **plan)
    assert one.restores is restores
    dead = record(one)
    assert isinstance(dead, TrialRecord)
    assert dead.caches is (Caches.WARM if restores else Caches.COLD)  # a dead trial's caches are not known


def test_what_was_measured_says_whether_a_trial_was_cold() -> None:
    found = record(assignment(cache="/cache", restores=True), caches="cold", compile_s=3.0, samples_per_s=9.0, unheard_of=1)
    assert isinstance(found, TrialRecord)
    assert found.caches is Caches.COLD
    assert (found.compile_s, found.num_workers, found.pipeline) == (3.0, 2, "real")


def test_a_warm_start_has_a_record_of_its_own_kind() -> None:
    found = record(assignment(cache="/cache", restores=True, warm_start=True), caches="warm", warm_start_s=3.0, source="x")
    assert isinstance(found, WarmStart)
    assert (found.warm_start_s, found.workload, found.phase) == (3.0, "toy", "done")


def test_settings_that_torch_does_not_keep_apart_are_named() -> None:
    assert kept_apart(CompileSettings.parse("scope=full")) == {}
    found = kept_apart(CompileSettings.parse("scope=full,matmul_precision=high,autocast=off"))
    assert found == {"settings.matmul_precision": "high", "settings.autocast": "off"}
    bounded = kept_apart(CompileSettings.parse("scope=full,dynamic=mark,dynamic_max=64"))
    assert bounded == {"settings.dynamic_max": "64"}


def test_a_remote_cache_is_told_to_the_worker_only_where_it_begins_with_artifacts() -> None:
    from orchestrator.artifacts.redis import NOBODY
    from orchestrator.run.trial import environment_at_import

    def told(**plan: Any) -> dict[str, str]:
        environment = environment_at_import(assignment(**plan))
        return {name: value for name, value in environment.items() if "REDIS" in name or "TAG" in name}

    shared = told(cache="redis://host:1", restores=True)
    assert shared["TORCHINDUCTOR_REDIS_URL"].startswith(NOBODY)  # the worker itself takes the address, which may hold a password
    assert told(cache="redis://host:1", restores=False) == {}
    assert told(cache="/cache", restores=True) == {}
    other = told(cache="redis://host:1", restores=True, settings="scope=full,matmul_precision=high")
    assert other["TORCH_COMPILE_CACHE_KEY_TAG"] != shared["TORCH_COMPILE_CACHE_KEY_TAG"]


@pytest.mark.parametrize(("cache", "asks"), [(None, "0"), ("/cache", "0"), ("redis://host:1", "1")])
def test_torch_asks_no_server_that_a_users_other_jobs_share_their_caches_by(cache: str | None, asks: str) -> None:
    from orchestrator.run.trial import environment_at_import

    environment = environment_at_import(assignment(cache=cache, restores=True))
    for kind in ("FX_GRAPH", "AUTOGRAD", "AUTOTUNE"):
        assert environment[f"TORCHINDUCTOR_{kind}_REMOTE_CACHE"] == asks
    assert environment["TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE"] == "0"
    assert environment["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO"] == "0"


def test_figures_that_cannot_be_true_are_a_failure_that_says_which() -> None:
    failed = record(assignment(), samples_per_s=640.0, tokens_per_s=-5.0)
    assert isinstance(failed, TrialRecord)
    assert (failed.status, failed.label, failed.samples_per_s) == (Status.FAILED, Label.EXCEPTION, None)
    assert failed.reason is not None
    assert "tokens_per_s is -5" in failed.reason
    assert TrialRecord.from_json(failed.to_json()).reason == failed.reason
