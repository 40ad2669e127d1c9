"""Times put and get of a bundle's worth of artifacts: a folder, the cluster's memory on one node, and from another node.

Background: every trial is a new process, so every put and get here runs in a new one, on a Ray cluster of two raylets on this
host, each with an object store of its own; between the two, bytes travel through sockets as they would between hosts, but over
the loopback. Contents are random bytes, new for each round, so that none is in the store already. The timed calls are those of a
trial: `ArtifactStore.publish`, and `manifests` and `fetch`; importing and starting the cluster's actor are timed separately.

Output: seconds of each, the median and range over the rounds, and how many of them were spent in which call of the shelf. The
rest is hashing and signing in the trial's own process.
"""

import contextlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from compile_sweep.harness.compile_cache.artifact import Artifact
from orchestrator.artifacts import ArtifactStore, Manifest, SigningKey
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.shelf import Shelf
from orchestrator.environment import fingerprint
from orchestrator.run.sweep_folder import write_json

GOAL_S = 0.3  # goal in seconds for a put or a get on one node
OBJECT_STORE_BYTES = 400 * 2**20  # size of each raylet's object store; a round needs a few times its artifacts

TASK_LIMIT_S = 120.0

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A put or get to time."""

    name: str
    tier: str  # tier: folder or cluster
    node: str  # node: first, where the cluster's actor runs, or second
    puts: bool
    on_one_node: bool  # whether the goal applies to it


ROUNDS: tuple[tuple[Route, ...], ...] = (
    (
        Route(name="folder: put", tier="folder", node="first", puts=True, on_one_node=True),
        Route(name="folder: get", tier="folder", node="first", puts=False, on_one_node=True),
    ),
    (
        Route(name="cluster: put, on the actor's node", tier="cluster", node="first", puts=True, on_one_node=True),
        Route(name="cluster: get, on the actor's node", tier="cluster", node="first", puts=False, on_one_node=True),
        Route(name="cluster: first get on another node", tier="cluster", node="second", puts=False, on_one_node=False),
        Route(name="cluster: later get on another node", tier="cluster", node="second", puts=False, on_one_node=False),
    ),
    (
        Route(name="cluster: put, from another node", tier="cluster", node="second", puts=True, on_one_node=False),
        Route(name="cluster: get of that on the actor's node", tier="cluster", node="first", puts=False, on_one_node=True),
    ),
)
"""Each round begins with an empty store; its gets read what its put wrote."""


@dataclass(slots=True)
class TimedShelf:
    """A shelf that records the seconds of each call."""

    shelf: Shelf
    seconds: Figures = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        what = getattr(self.shelf, name)
        return self._timed(name, what) if callable(what) else what

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return timed


def transfer(output: Path, *, mb: float, artifacts: int, rounds: int) -> list[Table]:
    """Times all routes and writes the JSON after each round; returns the results as a table.

    Args:
        output: The file.
        mb: Total size of the artifacts in 10⁶ bytes.
        artifacts: Number of artifacts.
        rounds: Number of rounds of each route.
    """
    found: dict[str, list[Figures]] = {}
    described = {"environment": fingerprint().to_dict(), "mb": mb, "artifacts": artifacts, "goal_on_one_node_s": GOAL_S}
    with _cluster() as run_on:
        for number in range(1, rounds + 1):
            for routes in ROUNDS:
                for name, figures in _round(routes, run_on, int(mb * 1e6), artifacts):
                    found.setdefault(name, []).append(figures)
                    print(f"round {number}: {name}: {figures['seconds']:.3f} s", flush=True)
            write_json(output, {**described, "routes": [summed_up(name, each) for name, each in found.items()]})
    return [table([summed_up(name, each) for name, each in found.items()])]


def summed_up(name: str, each: Sequence[Figures]) -> dict[str, Any]:
    """Summarizes a route for the JSON, given its figures by round."""
    seconds = [one["seconds"] for one in each]
    median_s = statistics.median(seconds)
    goal_s = next(GOAL_S if route.on_one_node else None for routes in ROUNDS for route in routes if route.name == name)
    parts = {part: statistics.median(one.get(part, 0.0) for one in each) for part in each[0] if part != "seconds"}
    return {
        "name": name,
        "median_s": median_s,
        "seconds": seconds,
        "parts_s": parts,
        "goal_s": goal_s,
        "met": None if goal_s is None else median_s <= goal_s,
    }


def table(routes: Sequence[dict[str, Any]]) -> Table:
    """Formats routes, as `summed_up` returns them, as a table."""
    shown = Table("route", "median s", "from–to", "goal", "where", box=None)
    for one in routes:
        parts = sorted(one["parts_s"].items(), key=lambda part: -part[1])
        shown.add_row(
            one["name"],
            f"{one['median_s']:.3f}",
            f"{min(one['seconds']):.3f}–{max(one['seconds']):.3f}",
            "–" if one["goal_s"] is None else f"≤ {one['goal_s']} " + ("met" if one["met"] else "MISSED"),
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts if seconds >= 0.001),
        )
    return shown


def put(where: str, tier: str, key: bytes, size_bytes: int, artifacts: int) -> Figures:
    """Publishes from a new process."""
    timed, store = _opened(where, tier, key)
    each = max(1, size_bytes // artifacts)
    made = [Artifact(kind="inductor", key=str(number), content=os.urandom(each), cost_s=1.0) for number in range(artifacts)]
    began = time.perf_counter()
    store.publish(Manifest(facts={}, workload="none", size="none", settings_key="scope=full", maker="benchmark"), made)
    return _figures(timed, time.perf_counter() - began)


def get(where: str, tier: str, key: bytes, size_bytes: int, artifacts: int) -> Figures:
    """Restores in a new process, without passing anything to torch."""
    timed, store = _opened(where, tier, key)
    began = time.perf_counter()
    (manifest,) = store.manifests().manifests
    fetched = store.fetch(manifest.entries, manifest.environment)
    seconds = time.perf_counter() - began
    if len(fetched.artifacts) != artifacts:
        raise RuntimeError(f"{len(fetched.artifacts)} of {artifacts} artifacts came back: {fetched.refused[:1]}")
    return _figures(timed, seconds)


def _opened(where: str, tier: str, key: bytes) -> tuple[TimedShelf, ArtifactStore]:
    timed = TimedShelf(_shelf(where, tier))
    return timed, ArtifactStore(cast(Shelf, timed), SigningKey(key))


def _shelf(where: str, tier: str) -> Shelf:
    if tier == "folder":
        return DurableShelf(where)
    from orchestrator.artifacts.cluster_memory import ClusterShelf

    return ClusterShelf(where)


def _figures(timed: TimedShelf, seconds: float) -> Figures:
    rest = seconds - sum(timed.seconds.values())
    return {"seconds": seconds, **timed.seconds, "hashing and signing": rest}


RunOn = Callable[..., Figures]
"""Calls a function in a new process of a node, given the node's name, the function and its arguments."""


def _round(routes: Sequence[Route], run_on: RunOn, size_bytes: int, artifacts: int) -> Iterator[tuple[str, Figures]]:
    import ray

    from orchestrator.artifacts.cluster_memory import ClusterShelf

    key = os.urandom(32)
    with tempfile.TemporaryDirectory(prefix="compile-sweep-transfer-") as where:
        holder = None
        if routes[0].tier == "cluster":
            shelf = ClusterShelf(where)
            shelf.manifests()  # starts the actor, which runs already for all trials except a sweep's first
            holder = shelf.holder()
        for route in routes:
            yield route.name, run_on(route.node, put if route.puts else get, where, route.tier, key, size_bytes, artifacts)
        if holder is not None:
            ray.kill(holder)  # frees what it holds


@contextlib.contextmanager
def _cluster() -> Iterator[RunOn]:
    """Runs two raylets on 127.0.0.1 while the block lasts."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported; see `orchestrator/run/session.py`
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    usual: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**usual, "include_dashboard": False, "resources": {"first": 1}})
    try:
        cluster.add_node(**usual, resources={"second": 1})
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1")

        def run_on(node: str, call: Callable[..., Figures], *arguments: Any) -> Figures:
            fresh = ray.remote(num_cpus=0, resources={node: 0.1}, max_calls=1)(call)  # its process ends with the call
            return cast(Figures, ray.get(fresh.remote(*arguments), timeout=TASK_LIMIT_S))

        yield run_on
    finally:
        ray.shutdown()
        cluster.shutdown()
