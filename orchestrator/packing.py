"""Keeps packed trials together: Ray places each trial where most is free, which is on a host that no other trial has.

An actor on the head says which host a trial's workers go to: one that holds all of them, has trials already if possible, and of
those the one with the least left over. So hosts fill one after the other, and in a cluster that shrinks by itself the others end.
Where no host has room for all of them now, Ray decides, over several hosts or one that is to be started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private.state import state
from ray.actor import ActorHandle
from ray.exceptions import RayError

from orchestrator import on_head
from orchestrator.board import find_board

NAME = "compile-sweep-packing"
NODE_ID = "ray.io/node-id"
"""A label that each of Ray's nodes has."""

_TIMEOUT_S = 20.0

Amounts = Mapping[str, float]
"""By resource."""


class Packing:
    """The actor. Ray calls it; `open_packing` makes it, and Ray makes it again, empty, if its process dies."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[str, Amounts]] = {}

    def choose(self, trial_id: str, claimed: Amounts) -> str | None:
        """The host for all workers of a trial, which claim that much together; None if none has room."""
        self._taken.pop(trial_id, None)  # of an earlier attempt, whose process died
        with suppress(RayError, ValueError):  # without a board nobody knows who else died
            asked: Any = find_board().running.remote()
            running = {progress.trial_id for progress in ray.get(asked, timeout=_TIMEOUT_S / 2)}
            self._taken = {name: taken for name, taken in self._taken.items() if name in running}
        hosts = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        chosen = best(hosts, state.available_resources_per_node(), list(self._taken.values()), claimed)
        if chosen is not None:
            self._taken[trial_id] = (chosen, claimed)
        return chosen

    def leave(self, trial_id: str) -> None:
        """A trial's workers are gone."""
        self._taken.pop(trial_id, None)


def best(
    hosts: Mapping[str, Amounts], available: Mapping[str, Amounts], taken: list[tuple[str, Amounts]], claimed: Amounts
) -> str | None:
    """Where a trial goes.

    Args:
        hosts: all that each has.
        available: what Ray says is free of it; not yet less what trials claim that are only starting.
        taken: host and claim of each trial that runs or starts.
        claimed: by all workers of the trial.
    """

    def left(host: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, amount in claimed.items():
            of_ours = sum(claim.get(name, 0.0) for where, claim in taken if where == host)
            free = min(available.get(host, {}).get(name, 0.0), hosts[host].get(name, 0.0) - of_ours)
            found[name] = free - amount
        return found

    def rank(host: str) -> tuple[bool, float, str]:
        has_ours = any(where == host for where, _ in taken)
        return (not has_ours, left(host).get("GPU", left(host)["CPU"]), host)

    able = [host for host in hosts if all(amount > -1e-6 for amount in left(host).values())]
    return min(able, key=rank, default=None)


@contextmanager
def open_packing() -> Iterator[None]:
    """Keeps the actor while the block lasts, in a cluster."""
    # What trials hold that have started, Ray knows; what one claims that starts this moment is lost if this dies.
    with on_head.kept(Packing, NAME):
        yield


def chosen_label(trial_id: str, claimed: Amounts, num_workers: int) -> dict[str, str] | None:
    """By which label a trial's workers find their host; None where Ray decides.

    Args:
        trial_id: of the trial.
        claimed: by each worker.
        num_workers: of the trial.
    """
    together = {name: num_workers * amount for name, amount in claimed.items()}
    with suppress(RayError, ValueError):  # without the actor trials run all the same, only spread
        asked: Any = _find().choose.remote(trial_id, together)
        host: str | None = ray.get(asked, timeout=_TIMEOUT_S)
        return {NODE_ID: host} if host is not None else None
    return None


def leave(trial_id: str) -> None:
    """A trial's workers are gone."""
    with suppress(RayError, ValueError):
        ray.get(_find().leave.remote(trial_id), timeout=_TIMEOUT_S)


def _find() -> ActorHandle[Packing]:
    return on_head.found(Packing, NAME)
