"""What torch's pickled entries of compiled graphs say of themselves: guards, seconds taken, and which entries they refer to.

Reading them unpickles, which runs code: only entries that this process made, or would load itself, may be read.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from typing import Any

from workloads import cache_kernels
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


def read(artifact: Artifact) -> Artifact:
    """A compiled graph under its full key, with the seconds torch says it took, and without choices that were made since."""
    try:
        entry = pickle.loads(artifact.content)
    except Exception:  # torch takes an entry that does not load for a miss, and so loses nothing by its key
        return replace(artifact, key=f"{artifact.key}/{artifact.digest[:16]}")
    key = named(artifact.kind, artifact.key, entry)[1]
    return replace(artifact, key=key, cost_s=seconds_taken(entry), content=_settled(entry) or artifact.content)


def _settled(entry: Any) -> bytes | None:
    """An entry of Inductor's whose kernels were tuned since it was written, with their best configuration alone; else None.

    torch writes an entry before its kernels first run. Of each it keeps all configurations, and a path of this host where to
    look for the best: elsewhere, a process that imports only torch would tune them all again.
    """
    bundle = getattr(entry, "_triton_bundle", None)
    kernels = [held.kernel for held in getattr(bundle, "static_autotuners", None) or ()]
    try:
        settled = [cache_kernels.settle(kernel) for kernel in kernels]
        return pickle.dumps(entry) if any(settled) else None
    except Exception:  # as torch wrote it, it serves as well, if more slowly
        return None
