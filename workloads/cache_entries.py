"""What torch's pickled entries of compiled graphs say of themselves: guards, seconds taken, and which entries they refer to.

Reading them unpickles, which runs code: only entries that this process made, or would load itself, may be read.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from workloads.artifacts import Artifact
from workloads.cache_folders import ArtifactKind

GUARDED = (ArtifactKind.INDUCTOR, ArtifactKind.AOT_AUTOGRAD)


def with_guards(kind: str, key: str, guards: str | None) -> tuple[str, str]:
    """Kind and key of an entry: torch's own key is one for all that were compiled under different guards, ours is not."""
    return str(kind), f"{key}/{hashlib.sha256(str(guards or '').encode()).hexdigest()[:16]}"


def named(kind: str, key: str, entry: Any) -> tuple[str, str]:
    """Kind and key of an entry as torch holds it."""
    return with_guards(kind, key, getattr(entry, "guards_expr", None))


def seconds_taken(entry: Any) -> float:
    """Seconds that compiling an entry took, as torch has it; 0 where it has not."""
    nanoseconds = getattr(entry, "_time_taken_ns", None)
    if nanoseconds is None:
        nanoseconds = getattr(entry, "forward_time_taken_ns", 0) + getattr(entry, "backward_time_taken_ns", 0)
    return float(nanoseconds) / 1e9


def graphs_of(entry: Any) -> list[tuple[str, str]]:
    """Inductor's entries that one of AOTAutograd's refers to: forward, then backward if there is one."""
    parts: list[Any] = [getattr(entry, "compiled_fw", None), getattr(entry, "compiled_bw", None)]
    return [
        with_guards(ArtifactKind.INDUCTOR, part.fx_graph_cache_info[0], part.fx_graph_guard_expr)
        for part in parts
        if hasattr(part, "fx_graph_cache_info")
    ]


def read(artifact: Artifact) -> tuple[str, float]:
    """The full key of a compiled graph, and the seconds torch says it took."""
    try:
        entry = pickle.loads(artifact.content)
    except Exception:  # torch takes an entry that does not load for a miss, and so loses nothing by its key
        return f"{artifact.key}/{artifact.digest[:16]}", 0.0
    return named(artifact.kind, artifact.key, entry)[1], seconds_taken(entry)
