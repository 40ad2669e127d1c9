"""Stores for the tests: a folder, fsspec, a real S3-compatible server on the loopback, and a cluster's memory with a folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.artifacts.cluster_memory import ClusterShelf
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.shelf import Shelf
from orchestrator.artifacts.signing import SigningKey
from orchestrator.artifacts.store import ArtifactStore

BUCKET = "artifacts"


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Port of a moto server with a bucket. It does not check credentials, but a client must have some."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        client = S3FileSystem(
            endpoint_override=f"127.0.0.1:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        client.create_dir(BUCKET)
        yield port
    server.stop()


@pytest.fixture(scope="session")
def s3_uri(s3_port: int) -> Callable[..., str]:
    """Makes the URI of an empty store in the bucket, with another port if a proxy is in front of the server."""

    def uri(port: int | None = None, prefix: str | None = None) -> str:
        prefix = prefix or uuid.uuid4().hex
        return f"s3://{BUCKET}/{prefix}?endpoint_override=127.0.0.1:{port or s3_port}&scheme=http&region=us-east-1"

    return uri


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
