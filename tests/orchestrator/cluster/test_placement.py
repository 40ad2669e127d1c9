"""What a trial's workers claim from a cluster, and the number of shares that a host's cores are divided into."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.cluster import placement
from orchestrator.cluster.placement import (
    HOST_RESOURCE,
    cpus_per_worker,
    placement_strategy,
    wait_for_host,
    worker_resources,
    workers_per_host,
)
from orchestrator.config import Device, Placement, SweepConfig
from orchestrator.guard import progress


def config(**fields: Any) -> SweepConfig:
    settings = (CompileSettings.parse("scope=eager"),)
    usual: dict[str, Any] = {"recipe": "given", "workload": "captioning", "size": "tiny", "settings": settings}
    usual["max_concurrent"] = 1
    return SweepConfig(**{**usual, **fields})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 8])
def test_the_workers_of_a_spread_trial_share_one_host_and_leave_none_for_another(num_workers: int) -> None:
    share = worker_resources(Placement.SPREAD, num_workers, use_gpu=True, cpus=0.5)[HOST_RESOURCE]
    assert num_workers * share <= 1
    assert 1 - num_workers * share < share
    assert placement_strategy(Placement.SPREAD) == "STRICT_PACK"


def test_a_packed_trial_claims_no_host() -> None:
    assert worker_resources(Placement.PACK, 2, use_gpu=False, cpus=3.5) == {"CPU": 3.5}
    assert worker_resources(Placement.PACK, 2, use_gpu=True, cpus=3.5) == {"CPU": 3.5, "GPU": 1.0}
    assert placement_strategy(Placement.PACK) == "PACK"


def test_on_one_machine_the_trials_that_run_at_once_divide_its_cores() -> None:
    assert workers_per_host(config(max_concurrent=2, workers_per_trial=2)) == 4
    assert cpus_per_worker(config(max_concurrent=2, workers_per_trial=2), cores=16) == 3.5
    assert cpus_per_worker(config(max_concurrent=2), cores=1) == 0.5
    assert cpus_per_worker(config(workers_per_trial=2), cores=1) == 0.25, "a trial's workers fit beside the trial"


@pytest.mark.usefixtures("cluster")
def test_the_heads_cores_do_not_decide_where_gpus_or_hosts_do() -> None:
    assert cpus_per_worker(config(device=Device.CUDA), cores=64) == 0.5
    assert cpus_per_worker(config(placement=Placement.SPREAD), cores=64) == 0.5
    assert cpus_per_worker(config(max_concurrent=2), cores=64) == 31.5


def test_a_spread_trial_has_its_hosts_cores_to_itself() -> None:
    assert workers_per_host(config(max_concurrent=4, workers_per_trial=2, placement=Placement.SPREAD)) == 2


@pytest.mark.usefixtures("cluster")
def test_ray_is_asked_once_to_tell_of_a_host_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    clock = itertools.count(step=100.0)
    monkeypatch.setattr(
        placement, "placement_group", lambda *bundles, **how: SimpleNamespace(ready=lambda: asked.append("ready"))
    )
    monkeypatch.setattr(placement, "remove_placement_group", lambda group: asked.append("removed"))
    monkeypatch.setattr(placement.ray, "wait", lambda told, timeout: ([], told))
    monkeypatch.setattr(placement.time, "monotonic", lambda: next(clock))
    with pytest.raises(ConfigError, match="waited 1800 s in vain"):
        wait_for_host(config(max_concurrent=2), 8, lambda words: None, threading.Event())
    assert asked == ["ready"] * 2 + ["removed"] * 2


def test_a_board_that_never_answers_holds_up_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: None, timeout: float | None = None) -> None:
        assert timeout == 30.0
        raise GetTimeoutError

    monkeypatch.setattr(progress, "find_progress_actor", lambda: SimpleNamespace(running=SimpleNamespace(remote=lambda: None)))
    monkeypatch.setattr(ray, "get", get)
    assert progress.trial_progress("7") is None
