"""If Ray does not start, or a cluster does not answer, there is one sentence; also what Ray and a worker learn about GPUs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from compile_sweep.schema.errors import SessionError
from orchestrator.environment import fingerprint
from orchestrator.run import ray_worker_context, session
from orchestrator.run.ray_worker_context import RayParent
from orchestrator.run.session import ray_session


def fails(*arguments: Any, **options: Any) -> None:
    raise Exception("The current node timed out during startup. This could happen because some of the raylet failed")


@pytest.mark.parametrize(
    ("address", "words"),
    [(None, ["did not start on this host", "very busy"]), ("10.0.0.1:6379", ["RAY_ADDRESS=10.0.0.1:6379", "start one or unset"])],
)
def test_it_is_said_what_does_not_answer_and_why(address: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", fails)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SessionError, match="The current node timed out during startup") as refusal, ray_session():
        pytest.fail("there is no session")
    assert all(part in str(refusal.value) for part in words)


@pytest.mark.parametrize("address", ["local", "ray://head:10001"])
def test_an_address_of_no_cluster_that_a_sweep_can_run_in_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SessionError, match=f"RAY_ADDRESS={address} names no cluster .* unset it"), ray_session():
        pytest.fail("there is no session")


def test_ray_is_told_how_many_gpus_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def init(**options: Any) -> None:
        told.update(options)
        fails()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(session, "fingerprint", lambda: replace(fingerprint(), num_gpus=7))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SessionError), ray_session():
        pytest.fail("there is no session")
    assert told["num_gpus"] == 7


@pytest.mark.parametrize(("by_nvml", "by_ray", "shares"), [(1, 7.0, 4), (0, 2.0, 2), (8, 2.0, 4), (0, 0.0, 1)])
def test_cores_are_divided_by_the_workers_that_gpus_or_parts_of_one_take(
    monkeypatch: pytest.MonkeyPatch, by_nvml: int, by_ray: float, shares: int
) -> None:
    here: Any = SimpleNamespace(get_node_id=lambda: "here", get_accelerator_ids=lambda: {"GPU": ["MIG-a"]})
    nodes = [{"NodeID": "here", "Resources": {"GPU": by_ray}}, {"NodeID": "other", "Resources": {"GPU": 16.0}}]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_worker_context.environment, "num_host_gpus", lambda: by_nvml)
    plan: Any = SimpleNamespace(workers_at_once=4, use_gpu=True)
    unused: Any = None
    assert RayParent(unused, rank=0).core_shares(plan) == (shares, None)
