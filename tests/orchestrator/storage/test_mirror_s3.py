"""Results on S3, as a server on the loopback speaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compile_sweep.schema.errors import StorageError
from orchestrator.storage.mirror import Storage, below

pytestmark = pytest.mark.slow


@pytest.fixture
def base(s3_uri: Callable[..., str]) -> str:
    """The URI of an empty folder in a bucket, with its options at the end."""
    return s3_uri()


def sweep(folder: Path) -> Path:
    (folder / "logs" / "001-a").mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    (folder / "trials.jsonl").write_text("one\n")
    (folder / "logs" / "001-a" / "worker-0.log").write_text("up\n")
    return folder


def test_a_sweep_goes_on_elsewhere_from_its_bucket(base: str, tmp_path: Path) -> None:
    place = below(base, "captioning")
    mine = sweep(tmp_path / "mine")
    with Storage(place, mine).copying(), (mine / "trials.jsonl").open("a") as log:
        log.write("two\n")
    elsewhere = Storage(place, tmp_path / "elsewhere")
    assert elsewhere.holds_sweep()
    assert elsewhere.bring_back() == 3
    assert (tmp_path / "elsewhere" / "trials.jsonl").read_text() == "one\ntwo\n"
    assert (tmp_path / "elsewhere" / "logs" / "001-a" / "worker-0.log").read_text() == "up\n"


def test_sweeps_of_one_bucket_do_not_meet(base: str, tmp_path: Path) -> None:
    Storage(below(base, "first"), sweep(tmp_path / "first")).copy()
    assert not Storage(below(base, "fir"), tmp_path / "x").holds_sweep()
    assert Storage(below(base, "fir"), tmp_path / "x").bring_back() == 0


def test_a_bucket_that_is_none_is_said_in_one_sentence(base: str, tmp_path: Path) -> None:
    missing = Storage(base.replace("s3://artifacts", "s3://nobodys"), sweep(tmp_path / "mine"))
    with pytest.raises(StorageError, match=r"the storage at s3://nobodys/\w+ cannot be used: "):
        missing.copy()
