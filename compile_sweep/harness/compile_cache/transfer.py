"""Moves compile caches between processes: gathers artifacts, restores them before anything compiles, and watches their use.

Built from `folders.py` (files), `bundles.py` (torch's bundles), `usage.py` (hits, misses and the seconds that hits save) and
`facts.py` (what makes artifacts invalid or wrong in another environment).

Output: `watch_caches` reports what hits saved, so that a warm compile time plus `saved_s` is about the cold one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._dynamo import config as dynamo_config

from compile_sweep.harness.compile_cache import bundles
from compile_sweep.harness.compile_cache import folders as cache_folders
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.facts import torch_configuration
from compile_sweep.harness.compile_cache.folders import ArtifactKind, CacheFolders
from compile_sweep.harness.compile_cache.usage import CacheUsage, watch_caches

__all__ = [
    "ArtifactKind",
    "CacheFolders",
    "CacheUsage",
    "enable_precompile",
    "gather_artifacts",
    "make_bundle",
    "restore_artifacts",
    "torch_configuration",
    "watch_caches",
]


def gather_artifacts(folders: CacheFolders, use: CacheUsage | None = None, given: Iterable[Artifact] = ()) -> list[Artifact]:
    """All that this process made, used or was given, each artifact once.

    Two artifacts of the same kind and key, from environments with the same `configuration`, serve equally, though their bytes
    differ: torch writes into each how long it took. Of one graph compiled under different guards, each has a key of its own.

    Args:
        folders: those the process compiled with.
        use: what `watch_caches` saw, which knows costs better than torch's entries do.
        given: what was restored there; it comes as it was, which spares packing it again.
    """
    saved = torch.compiler.save_cache_artifacts()
    artifacts: dict[tuple[str, str], Artifact] = {}
    for found in (*cache_folders.read_artifacts(folders, given), *(bundles.split_bundle(saved[0]) if saved else ())):
        is_named = found.kind not in bundles.GUARDED_KINDS or "/" in found.key
        artifact = found if is_named else bundles.read_graph_entry(found)
        name = (str(artifact.kind), artifact.key)
        cost_s = artifact.cost_s if use is None else use.cost_s.get(name, artifact.cost_s)
        artifacts.setdefault(name, replace(artifact, cost_s=cost_s))
    return list(artifacts.values())


def restore_artifacts(artifacts: Iterable[Artifact], folders: CacheFolders) -> None:
    """Writes artifacts into the folders of this process, or of one to be started, before anything compiles there.

    Nothing of them is run or unpickled here; torch does that when it compiles. Restore only what is verified.

    Raises:
        ValueError: an artifact that names no cache file.
    """
    cache_folders.write_artifacts(artifacts, folders)


def make_bundle(artifacts: Iterable[Artifact]) -> bytes:
    """One file for `torch.compiler.load_cache_artifacts`, for a process that imports only torch."""
    return bundles.join_bundle(artifacts)


@contextmanager
def enable_precompile(precompile: bool = True) -> Iterator[None]:
    """Has torch keep what Dynamo traced, too, for functions given to `torch.compile` within; gather within as well.

    A process to which that is restored neither traces nor lowers. It loads it where `torch.compile` is called, not at the first
    call of what that returns, and checks fewer guards: torch leaves out those it cannot keep, so that a module swapped between
    calls may go unnoticed. Hence it is nobody's default.
    """
    with dynamo_config.patch(caching_precompile=precompile):
        yield
