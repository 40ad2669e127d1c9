"""The host that a packed trial is placed on."""

from __future__ import annotations

import pytest

from orchestrator.cluster.placement import best_host

HOSTS = {"a": {"CPU": 16.0, "GPU": 4.0}, "b": {"CPU": 16.0, "GPU": 4.0}, "head": {"CPU": 4.0}}
ONE, TWO = {"CPU": 0.5, "GPU": 1.0}, {"CPU": 1.0, "GPU": 2.0}


def free(**gpus: float) -> dict[str, dict[str, float]]:
    return {name: {**host, "GPU": gpus.get(name, host.get("GPU", 0.0))} for name, host in HOSTS.items()}


def test_the_first_trial_takes_a_host_and_others_follow_until_it_is_full() -> None:
    taken: list[tuple[str, dict[str, float]]] = []
    for _ in range(5):
        host = best_host(HOSTS, free(), list(taken), ONE)  # Ray does not know of any yet
        assert host is not None
        taken.append((host, ONE))
    assert [host for host, _ in taken] == ["a", "a", "a", "a", "b"]


def test_of_hosts_with_trials_the_fuller_one_is_taken() -> None:
    assert best_host(HOSTS, free(a=3, b=2), [("a", ONE), ("b", TWO)], ONE) == "b"
    assert best_host(HOSTS, free(a=3, b=1), [("a", ONE), ("b", {**TWO, "GPU": 3.0})], TWO) == "a"


def test_a_host_that_others_use_is_not_overfilled() -> None:
    assert best_host(HOSTS, free(a=0), [], ONE) == "b"


def test_workers_that_no_host_can_hold_together_are_left_to_ray() -> None:
    assert best_host(HOSTS, free(), [], {"CPU": 2.5, "GPU": 5.0}) is None
    assert best_host({}, {}, [], ONE) is None


def test_without_gpus_processors_decide() -> None:
    cpus = {name: {"CPU": host["CPU"]} for name, host in HOSTS.items()}
    assert best_host(cpus, cpus, [], {"CPU": 3.5}) == "head"
    assert best_host(cpus, cpus, [("b", {"CPU": 8.0})], {"CPU": 3.5}) == "b"


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_host_of_which_ray_says_nothing_has_nothing_free(missing: str) -> None:
    known = {name: host for name, host in free().items() if name != missing}
    assert best_host(HOSTS, known, [], ONE) != missing
