"""What only a shelf in a folder can show: whole files, whenever a writer is killed, and what killed writers leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
from cache_samples import artifact, manifest
from fsspec.implementations.memory import MemoryFileSystem

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts import KEY_VARIABLE, SigningKey, open_store
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.shelf import BlobInfo
from orchestrator.artifacts.store import ArtifactStore
from orchestrator.storage import filesystem as places

PUBLISHES = """
import os, sys
from orchestrator.artifacts import Manifest, open_store
from compile_sweep.harness.compile_cache.artifact import Artifact
store = open_store(sys.argv[1])
for number in range(10_000):
    made = [Artifact(kind="inductor", key=f"{number} {n}", content=os.urandom(300_000)) for n in range(10)]
    store.publish(Manifest(facts={"a": "b"}, workload="w", size="s", settings_key="scope=full", maker=str(number)), made)
"""


@pytest.mark.slow
def test_a_publisher_killed_at_any_time_leaves_whole_manifests_and_contents(tmp_path: Path, key: SigningKey) -> None:
    environ = {**os.environ, KEY_VARIABLE: key.secret.hex()}
    for delay_s in (0.02, 0.05, 0.09):
        publisher = subprocess.Popen([sys.executable, "-c", PUBLISHES, str(tmp_path)], env=environ)
        before = len(list((tmp_path / "manifests").glob("*")))
        until = time.monotonic() + 60
        while len(list((tmp_path / "manifests").glob("*"))) <= before + 1 and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(delay_s)
        publisher.kill()
        publisher.wait()
    store = open_store(str(tmp_path), key=key)
    listing = store.manifests()
    assert len(listing.manifests) >= 6
    assert listing.refused == ()
    for listed in listing.manifests:
        assert store.fetch(listed.entries, listed.environment).refused == ()


def test_parts_of_the_dead_are_cleaned_up_and_those_of_the_living_are_not(tmp_path: Path, key: SigningKey) -> None:
    store = open_store(str(tmp_path), key=key)
    store.publish(manifest(), [artifact()])
    assert list((tmp_path / "parts").iterdir()) == []
    dead, living = tmp_path / "parts" / "dead", tmp_path / "parts" / "living"
    for part in (dead, living):
        part.write_bytes(b"half")
    os.utime(dead, (time.time() - 7200,) * 2)
    store.collect()
    assert not dead.exists()
    assert living.exists()


def test_files_that_are_not_the_stores_stay(tmp_path: Path, key: SigningKey) -> None:
    store = open_store(str(tmp_path), key=key)
    published = store.publish(manifest(), [artifact()]).manifest
    for name in ("blobs/README", "manifests/notes.txt", f"hits/{published.id}/notes", "other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert store.manifests().refused == ()
    assert store.uses() == {}
    store.collect(max_bytes=10**9)
    assert (tmp_path / "blobs" / "README").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, key: SigningKey) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CacheError, match="cannot be used"):
        open_store(str(tmp_path), key=key).publish(manifest(), [artifact()])


def test_a_file_in_the_folders_place_is_one_sentence(tmp_path: Path, key: SigningKey) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used"):
        ArtifactStore(DurableShelf(str(tmp_path / "file")), key).publish(manifest(), [artifact()])


def test_manifests_in_folders_of_their_own_are_none(tmp_path: Path, key: SigningKey) -> None:
    published = ArtifactStore(DurableShelf(str(tmp_path)), key).publish(manifest(), [artifact()]).manifest
    for folder in "ab":
        (tmp_path / "manifests" / folder).mkdir()
        (tmp_path / "manifests" / folder / "same.json").write_text("{}")
    listing = ArtifactStore(DurableShelf(str(tmp_path)), key).manifests()
    assert (listing.manifests, listing.refused) == ((published,), ())


def test_a_manifest_that_was_read_badly_once_is_read_again(
    tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An actor of the cluster reads for weeks, and `verify --remove` would remove the manifest."""
    published = ArtifactStore(DurableShelf(str(tmp_path)), key).publish(manifest(), [artifact()]).manifest
    shelf = DurableShelf(str(tmp_path))
    store = ArtifactStore(shelf, key)
    with monkeypatch.context() as patch:
        read = shelf._read
        patch.setattr(shelf, "_read", lambda name, most: read(name, most)[:-5])
        assert len(store.manifests().refused) == 1
    assert store.manifests().manifests == (published,)


def test_manifests_that_are_gone_are_forgotten(tmp_path: Path, key: SigningKey) -> None:
    shelf = DurableShelf(str(tmp_path))
    store = ArtifactStore(shelf, key)
    store._shelf.drop_manifests([store.publish(manifest(maker=str(number)), [artifact()]).manifest.id for number in range(3)])
    assert store.manifests().manifests == ()
    assert shelf._manifests == {}


def test_a_content_that_was_published_again_meanwhile_is_not_collected(
    tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, published after the collection's last look at manifests. S3 times are too coarse to show this."""
    shelf = DurableShelf(str(tmp_path))
    store = ArtifactStore(shelf, key)
    store.publish(manifest(), [artifact()])
    blobs, looks = shelf.blobs, list[int]()

    def looked() -> dict[str, BlobInfo]:
        looks.append(len(looks))
        if len(looks) == 2:
            store.publish(manifest(maker="002-b"), [artifact()])
        return blobs()

    monkeypatch.setattr(shelf, "blobs", looked)
    collected = store.collect(max_age=timedelta(0))
    assert (collected.manifests, collected.blobs) == (1, 0)
    (left,) = store.manifests().manifests
    assert store.fetch(left.entries, left.environment).refused == ()


def test_requests_that_hang_keep_no_process(tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    ArtifactStore(DurableShelf(str(tmp_path)), key).publish(manifest(), [artifact()])
    shelf, answered = DurableShelf(str(tmp_path), timeout_s=0.05), threading.Event()
    monkeypatch.setattr(shelf, "_read", lambda name, most: answered.wait(60))
    with pytest.raises(CacheError, match="1 of 1 requests did not end"):
        shelf.manifests()
    asking = [thread for thread in threading.enumerate() if thread.name.startswith("cache")]
    assert [thread.daemon for thread in asking] == [True]
    answered.set()


class OddFileSystem(MemoryFileSystem):
    """A file system whose client has errors of its own, like those of https, Azure and Google."""

    protocol = "odd"

    def fails(self, *arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError("the server said 500")

    info = ls = find = exists = makedirs = mkdir = open = fails


def test_whatever_a_file_system_of_fsspec_raises_is_one_sentence(key: SigningKey) -> None:
    fsspec.register_implementation("odd", OddFileSystem, clobber=True)
    store = ArtifactStore(DurableShelf("fsspec+odd://host/store"), key)
    for call in (store.manifests, store.uses, store.collect, lambda: store.publish(manifest(), [artifact()])):
        with pytest.raises(CacheError, match=r"cannot be used: .*the server said 500"):
            call()


class BusyFileSystem(MemoryFileSystem):
    """A file system in which somebody creates a folder between two queries about it."""

    protocol = "busy"
    store, pseudo_dirs = {}, [""]

    def isdir(self, path: str) -> bool:
        there = super().isdir(path)
        if not there and not super().exists(path):
            self.pipe(f"{path}/file", b"made meanwhile")
        return there


def test_a_folder_made_while_it_is_listed_is_a_folder_and_a_file_is_none(key: SigningKey) -> None:
    """This happens when several trials publish first: a process that lists manifests then must not fail."""
    fsspec.register_implementation("busy", BusyFileSystem, clobber=True)
    filesystem, root = places.opened("fsspec+busy://host/store")
    assert [info.base_name for info in places.files(filesystem, root)] == ["file"]
    assert ArtifactStore(DurableShelf("fsspec+busy://host/other"), key).uses() == {}
    with pytest.raises(NotADirectoryError):
        places.files(filesystem, f"{root}/file")


@pytest.mark.parametrize(
    ("options", "seconds"), [("", 12), ("?endpoint_override=127.0.0.1:1", 12), ("?retry_limit_seconds=3", 3)]
)
def test_googles_library_tries_again_for_seconds_not_for_minutes(options: str, seconds: int) -> None:
    filesystem, root = places.opened(f"gs://anonymous@bucket/prefix{options}")
    assert root == "bucket/prefix"
    _, (opened_with, *_) = filesystem.__reduce__()
    assert opened_with["retry_time_limit"].total_seconds() == seconds


def test_contents_that_are_a_pipe_are_refused_and_not_waited_for(tmp_path: Path, key: SigningKey) -> None:
    store = ArtifactStore(DurableShelf(str(tmp_path / "store")), key)
    published = store.publish(manifest(), [artifact("a"), artifact("b", b"other")]).manifest
    path = next(one for one in (tmp_path / "store" / "blobs").rglob("*") if one.is_file())
    path.unlink()
    os.mkfifo(path)
    fetched = store.fetch(published.entries, manifest().environment)
    assert len(fetched.artifacts) == 1
    assert len(fetched.refused) == 1
