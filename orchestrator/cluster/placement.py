"""Where trials run in a cluster: packed onto as few hosts as possible, or spread with one trial per host.

Spread relies on a resource that every host has exactly one of. `ray start --resources '{"host": 1}'` declares it, as all cluster
files in this repository do; a local session has it as well. The workers of one trial share it, so a second trial does not fit on
the same host, and an autoscaling cluster knows that it must start another one.

By itself, Ray would place each packed trial where the most is free, which is a host without any trial. So an actor on the head
chooses the host for a trial's workers: one that has room for all of them, preferably one that already runs trials, and among
those the one with the least left over. Hosts fill up one after the other, and an autoscaling cluster can stop the rest. If no
host has room for all workers, Ray decides: it uses several hosts, or starts one.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import ray
from ray._private.state import state
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from compile_sweep.schema.errors import ConfigError
from orchestrator.cluster import head_actors
from orchestrator.config import Device, Placement, SweepConfig
from orchestrator.guard.progress import find_progress_actor

HOST_RESOURCE = "host"

HOST_TIMEOUT_S = 1800.0
"""How long to wait for the first host that can take a trial: a cloud has to start one and install what it needs."""

_QUIET_S = 5.0
_POLL_S = 0.5
_SPARE_CPUS = 0.5
"""Cores per worker that are not claimed from Ray, so that waiting trials fit next to workers that use all cores."""


def in_cluster() -> bool:
    """Tells whether trials run in a Ray cluster that this command did not start."""
    return bool(os.environ.get("RAY_ADDRESS"))


def workers_per_host(config: SweepConfig) -> int:
    """Returns the number of workers that may share a host, and so the number of shares its cores are divided into."""
    trials = 1 if config.placement is Placement.SPREAD else config.max_concurrent
    return trials * config.workers_per_trial


def cpus_per_worker(config: SweepConfig, cores: int) -> float:
    """Returns how many CPUs a worker claims from Ray, so that no more trials start than this host has cores for."""
    decided_otherwise = config.device is Device.CUDA or config.placement is Placement.SPREAD
    if in_cluster() and decided_otherwise:
        return _SPARE_CPUS
    share = max(_SPARE_CPUS, cores // workers_per_host(config) - _SPARE_CPUS)
    fits = (cores - _SPARE_CPUS) / config.workers_per_trial  # otherwise a trial with more workers than cores would wait forever
    return min(share, fits)


def worker_resources(placement: Placement, num_workers: int, *, use_gpu: bool, cpus: float) -> dict[str, float]:
    """Returns the resources that each worker of a trial claims from Ray."""
    gpu = {"GPU": 1.0} if use_gpu else {}
    share = math.floor(1e4 / num_workers) / 1e4  # Ray counts in ten-thousandths, and the sum must not exceed one
    return {"CPU": cpus, **gpu, **({HOST_RESOURCE: share} if placement is Placement.SPREAD else {})}


def placement_strategy(placement: Placement) -> str:
    """Returns Ray's strategy for placing the workers of one trial relative to each other."""
    return "STRICT_PACK" if placement is Placement.SPREAD else "PACK"


def wait_for_host(
    config: SweepConfig, cores: int, say: Callable[[str], object], stopping: threading.Event, wait_s: float = HOST_TIMEOUT_S
) -> None:
    """Waits until a host can take a trial, or until a person asks to stop. Requests hosts for as many trials as may run at once.

    A trial's deadline counts from its own start, so a trial must not have to wait while a host is started and set up.

    Args:
        say: Called with what is being waited for, if it takes a while.

    Raises:
        ConfigError: No host became available.
    """
    bundle = worker_resources(
        config.placement, config.workers_per_trial, use_gpu=config.device is Device.CUDA, cpus=cpus_per_worker(config, cores)
    )
    words = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    waits_for = f"a host in the cluster that can take a trial: {config.workers_per_trial} × ({words})"
    began, said = time.monotonic(), False
    groups: list[PlacementGroup] = []
    try:
        for _ in range(config.max_concurrent):  # one at a time, so that those created are removed if creating another fails
            groups += [placement_group([bundle] * config.workers_per_trial, strategy=placement_strategy(config.placement))]
        ready = [group.ready() for group in groups]  # only once, because each call submits a task
        while not stopping.is_set() and not ray.wait(ready, timeout=_POLL_S)[0]:
            waited_s = time.monotonic() - began
            if waited_s > wait_s:
                raise ConfigError(f"waited {wait_s:.0f} s in vain for {waits_for}; {_advice(config)}")
            if waited_s > _QUIET_S and not said:
                say(f"waiting for {waits_for}")
                said = True
    finally:
        for group in groups:
            remove_placement_group(group)


def _advice(config: SweepConfig) -> str:
    if config.placement is Placement.SPREAD and not any(
        HOST_RESOURCE in node["Resources"] for node in ray.nodes() if node["Alive"]
    ):
        return (
            f"--placement spread needs hosts started with --resources '{{\"{HOST_RESOURCE}\": 1}}', and there are none; "
            "or use --placement pack"
        )
    return "`ray status` shows what its hosts have"


PLACEMENT_ACTOR = "compile-sweep-packing"
NODE_ID = "ray.io/node-id"  # A label of every Ray node

_TIMEOUT_S = 20.0

Resources = Mapping[str, float]  # amount of each resource, by name


class PlacementActor:
    """Chooses hosts for trials. `start_placement_actor` starts it; if its process dies, Ray restarts it empty."""

    def __init__(self) -> None:
        self._taken: dict[str, tuple[str, Resources]] = {}

    def choose(self, trial_id: str, claimed: Resources) -> str | None:
        """Returns the host for all workers of a trial, given what they claim together; None if no host has room."""
        self._taken.pop(trial_id, None)  # left by an earlier attempt whose process died
        with suppress(RayError, ValueError):  # without a progress actor, other dead trials cannot be recognized
            asked: Any = find_progress_actor().running.remote()
            running = {progress.trial_id for progress in ray.get(asked, timeout=_TIMEOUT_S / 2)}
            self._taken = {name: taken for name, taken in self._taken.items() if name in running}
        hosts = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        chosen = best_host(hosts, state.available_resources_per_node(), list(self._taken.values()), claimed)
        if chosen is not None:
            self._taken[trial_id] = (chosen, claimed)
        return chosen

    def leave(self, trial_id: str) -> None:
        """Records that a trial's workers are gone."""
        self._taken.pop(trial_id, None)


def best_host(
    hosts: Mapping[str, Resources], available: Mapping[str, Resources], taken: list[tuple[str, Resources]], claimed: Resources
) -> str | None:
    """Returns the host for a trial; None if none has room. `available` still includes what starting trials will take."""

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


def start_placement_actor() -> AbstractContextManager[ActorHandle[PlacementActor]]:
    """Runs the placement actor while the block lasts; used in clusters only."""
    # Ray knows what running trials hold. If this actor dies, only the claims of trials that are just starting are lost.
    return head_actors.start_actor(PlacementActor, PLACEMENT_ACTOR)


def host_label(trial_id: str, claimed: Resources, num_workers: int) -> dict[str, str] | None:
    """Returns the node label by which a trial's workers find their host; None if Ray decides."""
    together = {name: num_workers * amount for name, amount in claimed.items()}
    with suppress(RayError, ValueError):  # without the actor, trials still run, only on more hosts
        asked: Any = head_actors.find_actor(PlacementActor, PLACEMENT_ACTOR).choose.remote(trial_id, together)
        host: str | None = ray.get(asked, timeout=_TIMEOUT_S)
        return {NODE_ID: host} if host is not None else None
    return None


def release_host(trial_id: str) -> None:
    """Tells the placement actor that a trial's workers are gone."""
    with suppress(RayError, ValueError):
        ray.get(head_actors.find_actor(PlacementActor, PLACEMENT_ACTOR).leave.remote(trial_id), timeout=_TIMEOUT_S)
