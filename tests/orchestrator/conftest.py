"""Fixtures of tests that run the sweep's command without starting a sweep."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from begun_sweeps import SETTINGS

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append
from orchestrator import sweep
from orchestrator.artifacts.signing import SigningKey
from orchestrator.config import Device, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.run import sweep_folder
from orchestrator.run.session import ray_session
from orchestrator.run.stages import Stages

_RAY = ExitStack()

_BUCKET = "artifacts"


@pytest.fixture(scope="module")
def local_ray() -> None:
    """A session of Ray on this host, for all tests that use one in a row: starting it takes ten seconds."""
    import ray

    if not ray.is_initialized():
        _RAY.enter_context(ray_session())


@pytest.hookimpl(trylast=True)  # after fixtures, which may use Ray when they end
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends the session of Ray before a test that does not use it."""
    uses_it = nextitem is not None and ("local_ray" in nextitem.fixturenames or _has_a_shelf_on_ray(nextitem))
    if not uses_it:
        _RAY.close()


def pytest_sessionfinish() -> None:
    """Ends the session of Ray if pytest stops at a failure."""
    _RAY.close()


def _has_a_shelf_on_ray(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("shelf") == "cluster"


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
        client.create_dir(_BUCKET)
        yield port
    server.stop()


@pytest.fixture(scope="session")
def s3_uri(s3_port: int) -> Callable[..., str]:
    """Makes the URI of an empty folder in the bucket, with another port if a proxy is in front of the server."""

    def uri(port: int | None = None, prefix: str | None = None) -> str:
        prefix = prefix or uuid.uuid4().hex
        return f"s3://{_BUCKET}/{prefix}?endpoint_override=127.0.0.1:{port or s3_port}&scheme=http&region=us-east-1"

    return uri


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The folder of a `tiny` captioning sweep with one recorded trial."""
    config = SweepConfig(
        recipe="quickstart", workload="captioning", size="tiny", settings=SETTINGS, device=Device.CPU, cache=None
    )
    sweep_folder.begin(tmp_path / "theirs", config, replace(fingerprint(), gpu=None, num_gpus=0), None)
    eager = SETTINGS[0]
    done = TrialRecord(trial_id="001-a", settings=eager.to_dict(), settings_key=eager.key, status=Status.OK, samples_per_s=5.0)
    append(tmp_path / "theirs", done)
    return tmp_path / "theirs"


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to an empty folder; an unnoticed mistake fails here instead of starting Ray."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working folder
    monkeypatch.setattr(Stages, "run", lambda *arguments: pytest.fail("the sweep was started"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every machine look as if it had no GPU."""
    without = replace(fingerprint(), gpu=None, num_gpus=0)
    monkeypatch.setattr(sweep, "fingerprint", lambda: without)


@pytest.fixture
def key() -> SigningKey:
    """A key that signs artifacts in tests."""
    return SigningKey(b"k" * 32)
