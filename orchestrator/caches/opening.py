"""From what `--cache` says to a store."""

from __future__ import annotations

from orchestrator.caches.durable import DurableShelf
from orchestrator.caches.signing import SigningKey
from orchestrator.caches.store import ArtifactStore


def open_store(location: str, *, in_cluster: bool = False, key: SigningKey | None = None) -> ArtifactStore:
    """The store at a folder or URI.

    Args:
        location: a folder, `s3://bucket/prefix`, `gs://…`, or any URI that pyarrow knows, or fsspec behind `fsspec+`.
        in_cluster: with the cluster's memory before it; only where Ray runs. The first to open it decides on which folder
            the cluster's actor keeps it, and only the actor's host needs to reach that.
        key: by default the user's, made at first use.

    Raises:
        CacheError: the location is none, or the key cannot be used.
    """
    key = key or SigningKey.load()
    if in_cluster:
        from orchestrator.caches.cluster import ClusterShelf  # only where it is asked for: it needs Ray

        return ArtifactStore(ClusterShelf(location), key)
    return ArtifactStore(DurableShelf(location), key)
