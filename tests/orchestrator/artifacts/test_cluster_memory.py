"""The in-cluster tier on a real Ray session: contents outlive their publishers, and the actor restarts after a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from cache_samples import artifact, manifest
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from samples import wait_until

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts import Manifest
from orchestrator.artifacts.cluster_memory import ClusterShelf
from orchestrator.artifacts.signing import SigningKey
from orchestrator.artifacts.store import ArtifactStore
from orchestrator.guard import watchdog

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

ENVIRONMENT = manifest().environment
MB = 1_000_000


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[ClusterShelf]:
    """A shelf that holds at most 5 MB."""
    shelf = ClusterShelf(str(tmp_path / "store"), memory_bytes=5 * MB)
    yield shelf
    ray.kill(shelf.holder())


@pytest.fixture
def store(shelf: ClusterShelf, key: SigningKey) -> ArtifactStore:
    return ArtifactStore(shelf, key)


def held_bytes(shelf: ClusterShelf) -> int:
    return int(ray.get(shelf.holder().held_bytes.remote()))


def files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "store" / "blobs").rglob("*") if path.is_file()]


def test_what_a_trial_published_outlives_it(key: SigningKey, tmp_path: Path) -> None:
    """The worker is in a full placement group and carries a marker. Its children would inherit both, and end with them."""
    location = str(tmp_path / "store")

    @ray.remote(num_cpus=0.5, max_calls=1)  # its process ends with it
    def publish(made: Manifest, artifacts: list[Artifact]) -> None:
        ArtifactStore(ClusterShelf(location), SigningKey(b"k" * 32)).publish(made, artifacts)

    group = placement_group([{"CPU": 0.5}])
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    marker = {"env_vars": {watchdog.ATTEMPT_MARKER: "a-trials"}}
    trial = publish.options(scheduling_strategy=inside, runtime_env=marker)
    ray.get(trial.remote(manifest(), [artifact("a", b"1" * MB)]))
    shelf = ClusterShelf(location)
    pid = ray.get(shelf.holder().process_id.remote())
    watchdog.kill_marked("a-trials")
    remove_placement_group(group)
    wait_until(lambda: placement_group_table(group)["state"] == "REMOVED", 30)
    (listed,) = ArtifactStore(shelf, key).manifests().manifests
    (got,) = ArtifactStore(shelf, key).fetch(listed.entries, ENVIRONMENT).artifacts
    assert got.content == b"1" * MB
    assert ray.get(shelf.holder().process_id.remote()) == pid
    ray.kill(shelf.holder())


def test_reads_come_from_memory_and_share_it(shelf: ClusterShelf, store: ArtifactStore, tmp_path: Path) -> None:
    published = store.publish(manifest(), [artifact("a", b"1" * MB), artifact("b", b"2" * MB)]).manifest
    for path in files(tmp_path):
        path.unlink()
    assert store.fetch(published.entries, ENVIRONMENT).refused == ()
    located = ray.get(shelf.holder().locate.remote({entry.digest: entry.size_bytes for entry in published.entries}))
    (slab,) = ray.get(list(located.slabs))  # both contents in one
    assert isinstance(slab, np.ndarray)
    assert not slab.flags.owndata


def test_memory_stays_within_its_bound_and_what_it_forgot_comes_back(shelf: ClusterShelf, store: ArtifactStore) -> None:
    published = [store.publish(manifest(maker=str(n)), [artifact(str(n), bytes([n]) * 2 * MB)]).manifest for n in range(6)]
    assert held_bytes(shelf) <= 5 * MB
    for one in published:
        assert len(store.fetch(one.entries, ENVIRONMENT).artifacts) == 1
    assert held_bytes(shelf) <= 5 * MB


def test_the_longest_unused_is_forgotten_first(store: ArtifactStore, tmp_path: Path) -> None:
    first, second = (store.publish(manifest(maker=str(n)), [artifact(str(n), bytes([n]) * 2 * MB)]).manifest for n in range(2))
    store.fetch(first.entries, ENVIRONMENT)
    store.publish(manifest(maker="2"), [artifact("2", b"2" * 2 * MB)])
    for path in files(tmp_path):
        path.unlink()
    assert len(store.fetch(first.entries, ENVIRONMENT).artifacts) == 1
    assert "not in the store" in store.fetch(second.entries, ENVIRONMENT).refused[0]


def test_more_than_the_bound_in_one_publish_is_served_all_the_same(shelf: ClusterShelf, store: ArtifactStore) -> None:
    published = store.publish(manifest(), [artifact("a", b"1" * 9 * MB)]).manifest
    assert held_bytes(shelf) == 0
    assert len(store.fetch(published.entries, ENVIRONMENT).artifacts) == 1


def test_after_the_actor_was_killed_all_is_there_again(shelf: ClusterShelf, store: ArtifactStore) -> None:
    published = store.publish(manifest(), [artifact("a", b"1" * MB)]).manifest
    store.note_hits({published.id: 3})
    pid = ray.get(shelf.holder().process_id.remote())
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    assert store.manifests().manifests == (published,)
    assert store.fetch(published.entries, ENVIRONMENT).refused == ()
    assert store.uses()[published.id].hits == 3
    assert time.monotonic() - began < 30
    assert ray.get(shelf.holder().process_id.remote()) != pid


def test_a_durable_shelf_that_cannot_be_written_is_one_sentence(tmp_path: Path, key: SigningKey) -> None:
    (tmp_path / "file").write_text("no folder")
    shelf = ClusterShelf(str(tmp_path / "file"))
    with pytest.raises(CacheError, match="cannot be used") as refusal:
        ArtifactStore(shelf, key).publish(manifest(), [artifact()])
    assert "\n" not in str(refusal.value)
    ray.kill(shelf.holder())


@pytest.mark.nightly("measures time, so nothing else may run; the tests above count puts and gets")
def test_35_mb_are_put_and_got_within_a_second(tmp_path: Path, key: SigningKey) -> None:
    """The bound is far above the actual time, which `benchmarks/` measures."""
    shelf = ClusterShelf(str(tmp_path / "large"))
    store = ArtifactStore(shelf, key)
    store.manifests()  # starts the actor
    took_s = []
    for attempt in range(3):
        made = [artifact(f"{attempt}-{number}", os.urandom(100_000)) for number in range(350)]
        began = time.monotonic()
        published = store.publish(manifest(maker=str(attempt)), made).manifest
        put_s, began = time.monotonic() - began, time.monotonic()
        assert len(store.fetch(published.entries, ENVIRONMENT).artifacts) == 350
        took_s.append(max(put_s, time.monotonic() - began))
        if took_s[-1] < 1.0:
            break
    ray.kill(shelf.holder())
    assert min(took_s) < 1.0, took_s
