"""Moves compile caches between processes: gathers artifacts, restores them before anything compiles, and watches their use.

Built from `folders.py` (files), `bundles.py` (torch's bundles), `usage.py` (hits, misses and the seconds that hits save) and
`torch_state.py` (what makes artifacts invalid or wrong in another environment).

Output: `watch_caches` reports how many seconds hits saved; a warm compile time plus `saved_s` approximates the cold one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch._dynamo import config as dynamo_config

from compile_sweep.harness.compile_cache import bundles
from compile_sweep.harness.compile_cache import folders as cache_folders
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.bundles import make_bundle
from compile_sweep.harness.compile_cache.folders import ArtifactKind, CacheFolders, restore_artifacts
from compile_sweep.harness.compile_cache.torch_state import torch_configuration
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


def gather_artifacts(
    folders: CacheFolders, use: CacheUsage | None = None, given: Iterable[Artifact] = (), bundle: bytes | None = None
) -> list[Artifact]:
    """Returns all artifacts that this process, or one that it started, made, used or was given, each only once.

    Two artifacts of the same kind and key, from environments with the same `torch_configuration`, are equally good although their
    bytes differ, because torch writes into each how long it took. A graph compiled under several guards has a key for each.

    Args:
        given: Artifacts that were restored there; they are returned as they were, which avoids packing them again.
    """
    if bundle is None and (saved := torch.compiler.save_cache_artifacts()):
        bundle = saved[0]
    artifacts: dict[tuple[str, str], Artifact] = {}
    for found in (*cache_folders.read_artifacts(folders, given), *(bundles.split_bundle(bundle) if bundle else ())):
        is_named = found.kind not in bundles.GUARDED_KINDS or "/" in found.key
        artifact = found if is_named else bundles.read_graph_entry(found)
        name = (str(artifact.kind), artifact.key)
        cost_s = artifact.cost_s if use is None else use.cost_s.get(name, artifact.cost_s)
        artifacts.setdefault(name, replace(artifact, cost_s=cost_s))
    return list(artifacts.values())


@contextmanager
def enable_precompile(precompile: bool = True) -> Iterator[None]:
    """Makes torch also store Dynamo's traces of functions compiled in the block; call `gather_artifacts` in it, too.

    A process that restores them neither traces nor lowers. It loads a trace where `torch.compile` is called, not at the first
    call of the result, and checks fewer guards: torch drops those that it cannot store, so a module that is replaced between
    calls may go unnoticed. Hence this is off by default.
    """
    with dynamo_config.patch(caching_precompile=precompile):
        yield
