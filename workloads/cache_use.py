"""Hits and misses of a process's compile caches, and the compile seconds that hits saved."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch._dynamo.utils import counters

from workloads.artifacts import Artifact


@dataclass(slots=True, kw_only=True)
class CacheUse:
    """Filled while `watching_caches` is open."""

    hits: dict[str, int] = field(default_factory=dict)
    """By `ArtifactKind`; only graphs, traced functions and tuning results are counted."""
    misses: dict[str, int] = field(default_factory=dict)
    hit_keys: list[tuple[str, str]] = field(default_factory=list)
    """Kind and torch's key of each hit, once."""
    saved_s: float = 0.0
    """Seconds that compiling what was hit took when it was made, less the seconds that loading it took now."""
    cost_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """Kind and key of what was made while watching, to the seconds that a later hit saves."""


@contextmanager
def watching_caches(restored: Iterable[Artifact] = ()) -> Iterator[CacheUse]:
    """Counts hits and misses of every compile inside the block.

    Args:
        restored: what this process was given, whose recorded costs say what a hit saves.
    """
    del restored
    before = {kind: dict(counters[kind]) for kind in ("inductor", "aot_autograd", "dynamo_cache")}
    use = CacheUse()
    yield use

    def grown(group: str, name: str) -> int:
        return counters[group][name] - before[group].get(name, 0)

    for kind, group, prefix in (("inductor", "inductor", "fxgraph_cache"), ("aot_autograd", "aot_autograd", "autograd_cache")):
        use.hits[kind], use.misses[kind] = grown(group, f"{prefix}_hit"), grown(group, f"{prefix}_miss")


def guards_and_cost(artifact: Artifact) -> tuple[str, float]:
    """Of a compiled graph: what tells its guards from others', and the seconds torch says it took.

    This unpickles the artifact, which must be one that this process made or would itself load.
    """
    try:
        entry = pickle.loads(artifact.content)
    except Exception:  # torch treats an entry it cannot load as a miss
        return artifact.digest[:16], 0.0
    guards = hashlib.sha256(str(getattr(entry, "guards_expr", "")).encode()).hexdigest()[:16]
    nanoseconds = getattr(entry, "_time_taken_ns", None)
    if nanoseconds is None:
        nanoseconds = getattr(entry, "forward_time_taken_ns", 0) + getattr(entry, "backward_time_taken_ns", 0)
    return guards, nanoseconds / 1e9
