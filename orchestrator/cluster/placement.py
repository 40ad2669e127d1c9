"""Where trials run in a cluster: packed on as few hosts as hold them, or each on a host of its own.

Spread rests on a resource that every host has one of. `ray start --resources '{"host": 1}'` declares it, as all the files here
that describe a cluster do, and a session on this machine alone has it too. The workers of one trial share it, so a second trial
finds none left, and a cluster that grows by itself knows what to start.

Keeps packed trials together: Ray places each trial where most is free, which is on a host that no other trial has.

An actor on the head says which host a trial's workers go to: one that holds all of them, has trials already if possible, and of
those the one with the least left over. So hosts fill one after the other, and in a cluster that shrinks by itself the others end.
Where no host has room for all of them now, Ray decides, over several hosts or one that is to be started.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private.state import state
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from compile_sweep.schema.errors import ConfigError
from orchestrator.cluster import head_actors
from orchestrator.config import Device, Placement, SweepConfig
from orchestrator.guard.progress import find_board

HOST = "host"
"""The resource that each host has one of."""

WAIT_S = 1800.0
"""For the first host that can take a trial: on a cloud one is started, and installs what it needs."""

_SAID_AFTER_S = 5.0
_POLL_S = 0.5
_LEFT_CPUS = 0.5
"""Of the cores of each worker, not claimed of Ray: so waiting trials fit beside workers that use all cores."""


def in_cluster() -> bool:
    """Whether trials run on a Ray that is not this command's own."""
    return bool(os.environ.get("RAY_ADDRESS"))


def workers_on_a_host(config: SweepConfig) -> int:
    """Into how many shares a host's cores are divided."""
    trials = 1 if config.placement is Placement.SPREAD else config.max_concurrent
    return trials * config.workers_per_trial


def claimed_cpus(config: SweepConfig, cores: int) -> float:
    """What a worker claims of Ray's CPUs, so that no more trials start than there are cores for.

    Args:
        config: the sweep's.
        cores: of the host that this runs on, which says nothing of other hosts: there GPUs, or the hosts themselves, decide how
            many trials run at once.
    """
    decided_otherwise = config.device is Device.CUDA or config.placement is Placement.SPREAD
    if in_cluster() and decided_otherwise:
        return _LEFT_CPUS
    share = max(_LEFT_CPUS, cores // workers_on_a_host(config) - _LEFT_CPUS)
    fits = (cores - _LEFT_CPUS) / config.workers_per_trial  # a trial with more workers than there are cores would wait for ever
    return min(share, fits)


def claims(placement: Placement, num_workers: int, *, use_gpu: bool, cpus: float) -> dict[str, float]:
    """What each worker of a trial claims of Ray.

    Args:
        placement: the sweep's.
        num_workers: of the trial.
        use_gpu: whether each has a GPU to itself.
        cpus: what `claimed_cpus` returned.
    """
    gpu = {"GPU": 1.0} if use_gpu else {}
    share = math.floor(1e4 / num_workers) / 1e4  # Ray counts in ten-thousandths; together they must not be more than one
    return {"CPU": cpus, **gpu, **({HOST: share} if placement is Placement.SPREAD else {})}


def strategy(placement: Placement) -> str:
    """How Ray places the workers of one trial to each other."""
    return "STRICT_PACK" if placement is Placement.SPREAD else "PACK"


def wait_for_host(
    config: SweepConfig, cores: int, say: Callable[[str], object], stopping: threading.Event, wait_s: float = WAIT_S
) -> None:
    """Returns once a trial could run, or a person asked to stop. Hosts for as many as may run at once are asked for.

    A trial's deadline counts from its own start, so it must not wait for a host to be started and installed.

    Args:
        config: the sweep's.
        cores: of the host that this runs on.
        say: is told what is waited for, if it takes a while.
        stopping: whether a person asked.
        wait_s: how long to wait.

    Raises:
        ConfigError: none came.
    """
    bundle = claims(
        config.placement, config.workers_per_trial, use_gpu=config.device is Device.CUDA, cpus=claimed_cpus(config, cores)
    )
    words = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    waits_for = f"a host of the cluster that can take a trial: {config.workers_per_trial} × ({words})"
    began, said = time.monotonic(), False
    groups: list[PlacementGroup] = []
    try:
        for _ in range(config.max_concurrent):  # one after the other, so that each made is also removed
            groups += [placement_group([bundle] * config.workers_per_trial, strategy=strategy(config.placement))]
        ready = [group.ready() for group in groups]  # once: each asks Ray to tell
        while not stopping.is_set() and not ray.wait(ready, timeout=_POLL_S)[0]:
            waited_s = time.monotonic() - began
            if waited_s > wait_s:
                raise ConfigError(f"waited {wait_s:.0f} s in vain for {waits_for}; {_advice(config)}")
            if waited_s > _SAID_AFTER_S and not said:
                say(f"waiting for {waits_for}")
                said = True
    finally:
        for group in groups:
            remove_placement_group(group)


def _advice(config: SweepConfig) -> str:
    if config.placement is Placement.SPREAD and not any(HOST in node["Resources"] for node in ray.nodes() if node["Alive"]):
        return f"--placement spread needs hosts started with --resources '{{\"{HOST}\": 1}}', and there is none; or use pack"
    return "see `ray status` for what its hosts have"


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
    with head_actors.kept(Packing, NAME):
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
    return head_actors.found(Packing, NAME)
