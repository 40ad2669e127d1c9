"""Stores for the tests: a folder, fsspec, a real S3-compatible server on the loopback, and a cluster's memory with a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.artifacts.cluster_memory import ClusterShelf
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.shelf import Shelf
from orchestrator.artifacts.signing import SigningKey
from orchestrator.artifacts.store import ArtifactStore


@pytest.fixture(scope="module")
def cluster_location(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the shelf of a cluster is that all tests of a file use: its actor takes seconds to start."""
    import ray

    location = str(tmp_path_factory.mktemp("cluster") / "store")
    yield location
    if ray.is_initialized():  # the session ends before the file does if the next test does not use it; a call would start one
        ray.kill(ClusterShelf(location).holder())


@pytest.fixture(
    params=[
        "folder",
        "fsspec",
        pytest.param("s3", marks=pytest.mark.slow),
        pytest.param("cluster", marks=[pytest.mark.ray, pytest.mark.slow]),
    ]
)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """An empty shelf of each kind."""
    match request.param:
        case "folder":
            yield DurableShelf(str(tmp_path / "store"))
        case "fsspec":
            yield DurableShelf(f"fsspec+file://{tmp_path}/store")
        case "s3":
            yield DurableShelf(request.getfixturevalue("s3_uri")())
        case _:
            location = request.getfixturevalue("cluster_location")
            yield ClusterShelf(location)
            used = ClusterShelf(location)  # not the test's, of which it may have replaced parts
            used.drop_manifests([*used.manifests(), *used.uses()])
            used.drop_blobs(used.blobs())


@pytest.fixture
def store(shelf: Shelf, key: SigningKey) -> ArtifactStore:
    return ArtifactStore(shelf, key)
