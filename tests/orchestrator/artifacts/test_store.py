"""The contract of `ArtifactStore`, on every kind of shelf."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from cache_samples import FACTS, LIBRARY, all_entries, artifact, manifest

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.shelf import Shelf
from orchestrator.artifacts.signing import SigningKey
from orchestrator.artifacts.store import ArtifactStore

ENVIRONMENT = manifest().environment
FOREIGN = SigningKey(b"f" * 32)


def test_an_empty_store_has_nothing(store: ArtifactStore) -> None:
    assert store.manifests().manifests == ()
    assert store.manifests().refused == ()
    assert store.uses() == {}
    assert store.fetch((), ENVIRONMENT).artifacts == ()


def test_what_was_published_comes_back_with_its_cost(store: ArtifactStore) -> None:
    made = [artifact("a", b"1" * 1000, cost_s=0.25), artifact("b", b"", kind="pgo", cost_s=0.0), artifact("dir/ü b", b"3")]
    published = store.publish(manifest(), made)
    assert (published.new_entries, published.new_bytes, published.all_bytes) == (3, 1001, 1001)
    (listed,) = store.manifests().manifests
    assert listed == published.manifest
    assert (listed.workload, listed.maker, dict(listed.facts)) == ("captioning", "001-a", FACTS)
    fetched = store.fetch(listed.entries, ENVIRONMENT)
    assert sorted(fetched.artifacts, key=lambda one: one.key) == made
    assert fetched.refused == ()


def test_the_same_again_adds_a_manifest_and_no_bytes(store: ArtifactStore) -> None:
    made = [artifact("a", b"one"), artifact("b", b"two")]
    store.publish(manifest(), made)
    again = store.publish(manifest(maker="002-b"), made)
    assert (again.new_entries, again.new_bytes, again.all_bytes) == (0, 0, 6)
    assert [one.maker for one in store.manifests().manifests] == ["001-a", "002-b"]


def test_half_a_library_is_not_restored_and_makes_room_for_a_whole_one(store: ArtifactStore) -> None:
    published = store.publish(manifest(), [artifact("ab/f.so", LIBRARY[:600], kind="code"), artifact("graph", b"entry")])
    fetched = store.fetch(published.manifest.entries, ENVIRONMENT)
    assert [one.key for one in fetched.artifacts] == ["graph"]
    assert "cut short" in fetched.refused[0]
    again = store.publish(manifest(maker="002-b"), [artifact("ab/f.so", LIBRARY, kind="code")])
    assert [one.content for one in store.fetch(again.manifest.entries, ENVIRONMENT).artifacts] == [LIBRARY]


def test_two_keys_of_one_content_are_kept_once(store: ArtifactStore) -> None:
    published = store.publish(manifest(), [artifact("a", b"same"), artifact("b", b"same")])
    assert (published.new_entries, published.new_bytes, published.all_bytes) == (2, 4, 8)
    assert {one.key for one in store.fetch(published.manifest.entries, ENVIRONMENT).artifacts} == {"a", "b"}


def test_a_graph_that_another_trial_compiled_is_not_kept_twice(store: ArtifactStore) -> None:
    first = store.publish(manifest(), [artifact("graph", b"took 1.5 s", cost_s=1.5)])
    second = store.publish(manifest(maker="002-b"), [artifact("graph", b"took 1.7 s", cost_s=1.7)])
    assert second.new_bytes == 0
    assert second.manifest.entries == first.manifest.entries
    elsewhere = store.publish(manifest(facts={**FACTS, "torch": "2.11.0"}), [artifact("graph", b"took 1.9 s")])
    assert elsewhere.new_bytes == 10


def test_of_a_traced_function_each_trial_has_its_own(store: ArtifactStore) -> None:
    store.publish(manifest(), [artifact("forward", b"traced with defaults", kind="precompile")])
    tuned = manifest(settings_key="scope=full,mode=max-autotune")
    published = store.publish(tuned, [artifact("forward", b"traced and tuned", kind="precompile")])
    assert [one.content for one in store.fetch(published.manifest.entries, ENVIRONMENT).artifacts] == [b"traced and tuned"]


def test_two_trials_published_apart_lose_nothing(store: ArtifactStore) -> None:
    store.publish(manifest(), [artifact("a", b"1"), artifact("both", b"2")])
    store.publish(manifest(maker="002-b"), [artifact("b", b"3"), artifact("both", b"2")])
    fetched = store.fetch(all_entries(store.manifests().manifests), ENVIRONMENT)
    assert {one.key: one.content for one in fetched.artifacts} == {"a": b"1", "b": b"3", "both": b"2"}


def test_publishers_at_once_do_each_other_no_harm(store: ArtifactStore) -> None:
    made = [artifact(str(number), bytes([number]) * 5000) for number in range(20)]

    def publish(number: int) -> None:
        store.publish(manifest(maker=str(number)), made)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish, range(8)))
    listing = store.manifests()
    assert sorted(one.maker for one in listing.manifests) == [str(number) for number in range(8)]
    assert listing.refused == ()
    fetched = store.fetch(listing.manifests[-1].entries, ENVIRONMENT)
    assert sorted(fetched.artifacts, key=lambda one: int(one.key)) == made


def test_a_manifest_signed_with_another_key_is_refused(store: ArtifactStore, shelf: Shelf) -> None:
    theirs = ArtifactStore(shelf, FOREIGN).publish(manifest(), [artifact()]).manifest
    listing = store.manifests()
    assert listing.manifests == ()
    (sentence,) = listing.refused
    assert "another key" in sentence
    assert FOREIGN.id in sentence
    fetched = store.fetch(theirs.entries, ENVIRONMENT)
    assert fetched.artifacts == ()
    assert "another key" in fetched.refused[0]


def test_an_unsigned_manifest_is_refused(store: ArtifactStore, shelf: Shelf) -> None:
    published = store.publish(manifest(), [artifact()]).manifest
    unsigned = replace(published, maker="mallory", signature="")
    shelf.put_manifest(unsigned.id, unsigned.to_json())
    listing = store.manifests()
    assert listing.manifests == (published,)
    assert len(listing.refused) == 1
    assert "not signed" in listing.refused[0]


def test_a_changed_manifest_is_refused(store: ArtifactStore, shelf: Shelf) -> None:
    published = store.publish(manifest(), [artifact()]).manifest
    shelf.put_manifest(published.id, published.to_json().replace(b'"tiny"', b'"base"'))
    changed = replace(published, size="base")
    shelf.put_manifest(changed.id, changed.to_json())
    for text in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version":1}', published.to_json()[:-20]):
        shelf.put_manifest(f"broken{len(text)}", text)
    fresh = store.manifests()
    assert published not in fresh.manifests or fresh.manifests == (published,)  # a shelf may remember what it read
    assert changed not in fresh.manifests
    assert any("does not match its signature" in sentence for sentence in fresh.refused)


def test_an_entry_of_another_environment_is_refused(store: ArtifactStore) -> None:
    published = store.publish(manifest(facts={**FACTS, "gpu": "NVIDIA B200"}), [artifact()]).manifest
    fetched = store.fetch(published.entries, ENVIRONMENT)
    assert fetched.artifacts == ()
    assert "another environment" in fetched.refused[0]


def test_a_changed_entry_is_refused(store: ArtifactStore) -> None:
    (entry,) = store.publish(manifest(), [artifact("a", b"good")]).manifest.entries
    (other,) = store.publish(manifest(), [artifact("b", b"evil")]).manifest.entries
    swapped = replace(entry, digest=other.digest)
    moved = replace(other, environment="0" * 64)
    fetched = store.fetch([swapped, moved, replace(entry, signature="")], ENVIRONMENT)
    assert fetched.artifacts == ()
    assert len(fetched.refused) == 3
    assert store.fetch([moved], "0" * 64).artifacts == ()


def test_damaged_contents_are_refused_alone_and_published_afresh(store: ArtifactStore, shelf: Shelf) -> None:
    made = [artifact(name, name.encode() * 3000) for name in ("flipped", "short", "long", "gone", "good")]
    published = store.publish(manifest(), made).manifest
    digests = {entry.key: entry.digest for entry in published.entries}
    flipped = bytearray(made[0].content)
    flipped[1234] ^= 1
    shelf.drop_blobs(digests.values())
    shelf.put_blobs({digests["flipped"]: bytes(flipped), digests["short"]: made[1].content[:100]})
    shelf.put_blobs({digests["long"]: made[2].content + b"more", digests["good"]: made[4].content})
    fetched = store.fetch(published.entries, ENVIRONMENT)
    assert [one.key for one in fetched.artifacts] == ["good"]
    assert len(fetched.refused) == 4
    assert sum("is damaged" in sentence for sentence in fetched.refused) == 3
    assert sum("not in the store" in sentence for sentence in fetched.refused) == 1

    assert store.publish(manifest(maker="002-b"), made).new_entries == 4
    assert store.fetch(published.entries, ENVIRONMENT).refused == ()


def test_hits_add_up_by_manifest(store: ArtifactStore) -> None:
    first, second = (store.publish(manifest(maker=maker), [artifact()]).manifest for maker in "ab")
    store.note_hits({first.id: 3})
    store.note_hits({first.id: 2, second.id: 0})
    uses = store.uses()
    assert {name: use.hits for name, use in uses.items()} == {first.id: 5}


def test_collecting_without_bounds_removes_nothing(store: ArtifactStore) -> None:
    store.publish(manifest(), [artifact("a", b"12345")])
    collected = store.collect()
    assert (collected.manifests, collected.blobs, collected.freed_bytes, collected.kept_bytes) == (0, 0, 0, 5)


def test_collecting_by_size_keeps_the_newest_and_what_it_shares(store: ArtifactStore) -> None:
    store.publish(manifest(maker="old"), [artifact("a", b"a" * 100), artifact("both", b"s" * 100)])
    store.publish(manifest(maker="new"), [artifact("b", b"b" * 100), artifact("both", b"s" * 100)])
    collected = store.collect(max_bytes=250)
    assert (collected.manifests, collected.blobs, collected.freed_bytes, collected.kept_bytes) == (1, 1, 100, 200)
    (kept,) = store.manifests().manifests
    assert kept.maker == "new"
    assert store.fetch(kept.entries, ENVIRONMENT).refused == ()


def test_collecting_by_age_removes_what_nobody_used_for_so_long(store: ArtifactStore) -> None:
    first = store.publish(manifest(), [artifact("a", b"12345")]).manifest
    assert store.collect(max_age=timedelta(hours=1)).manifests == 0
    store.note_hits({first.id: 1})
    collected = store.collect(max_age=timedelta(seconds=-2))  # S3 times are in whole seconds
    assert (collected.manifests, collected.freed_bytes, collected.kept_bytes) == (1, 5, 0)
    assert store.manifests().manifests == ()
    assert store.uses() == {}


def test_contents_of_a_publisher_that_was_killed_go_after_a_while(store: ArtifactStore, shelf: Shelf) -> None:
    kept = store.publish(manifest(), [artifact("a", b"kept")]).manifest
    orphan = artifact("b", b"orphan")
    shelf.put_blobs({orphan.digest: orphan.content})
    assert store.collect().blobs == 0  # the publisher may be still running
    collected = store.collect(grace=timedelta(seconds=-2))  # S3 times are in whole seconds
    assert (collected.manifests, collected.freed_bytes) == (0, 6)
    assert store.fetch(kept.entries, ENVIRONMENT).refused == ()


def test_while_a_manifest_cannot_be_read_every_content_stays(store: ArtifactStore, shelf: Shelf) -> None:
    store.publish(manifest(), [artifact("a", b"12345")])
    later = store.publish(manifest(maker="002-b"), [artifact("a", b"12345")]).manifest
    store._shelf.drop_manifests([later.id])
    name = "f" * 32
    shelf.put_manifest(name, later.to_json().replace(b'"version":1', b'"version":2'))
    collected = store.collect(max_age=timedelta(seconds=-2), grace=timedelta(seconds=-2))
    assert (collected.manifests, collected.blobs, collected.kept_bytes, collected.unread) == (1, 0, 5, 1)
    assert store.fetch(later.entries, ENVIRONMENT).refused == ()
    store._shelf.drop_manifests([name])
    collected = store.collect(grace=timedelta(seconds=-2))
    assert (collected.blobs, collected.kept_bytes, collected.unread) == (1, 0, 0)


@pytest.mark.parametrize("content", [b"took 1.5 s", b"took 1.7 s"])
def test_what_a_collection_takes_from_a_publisher_is_put_back(
    store: ArtifactStore, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """This includes reusing another trial's content, whose bytes this publisher does not have."""
    store.publish(manifest(), [artifact("a", b"took 1.5 s"), artifact("b", b"kept")])
    put, collections = shelf.put_manifest, []

    def late(name: str, text: bytes) -> None:
        if not collections:
            collections.append(store.collect(max_age=timedelta(0)))
        put(name, text)

    monkeypatch.setattr(shelf, "put_manifest", late)
    published = store.publish(manifest(maker="002-b"), [artifact("a", content)])
    assert collections[0].blobs == 2
    assert (published.new_entries, published.new_bytes) == (1, len(content))
    assert store.manifests().manifests == (published.manifest,)
    fetched = store.fetch(published.manifest.entries, ENVIRONMENT)
    assert fetched.refused == ()
    assert [one.content for one in fetched.artifacts] == [content]


def test_what_a_collection_is_about_to_take_is_not_relied_on(
    store: ArtifactStore, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection looks last before the publisher's manifest exists, and removes contents after the publisher has ended."""
    store.publish(manifest(), [artifact("a", b"took 1.5 s")])
    put, drop, about_to_go = shelf.put_manifest, shelf.drop_blobs, list[str]()

    def late(name: str, text: bytes) -> None:
        if not about_to_go:
            store.collect(max_age=timedelta(0))
        put(name, text)

    monkeypatch.setattr(shelf, "drop_blobs", about_to_go.extend)
    monkeypatch.setattr(shelf, "put_manifest", late)
    published = store.publish(manifest(maker="002-b"), [artifact("a", b"took 1.7 s")])
    drop(about_to_go)
    assert store.manifests().manifests == (published.manifest,)
    fetched = store.fetch(published.manifest.entries, ENVIRONMENT)
    assert [one.content for one in fetched.artifacts] == [b"took 1.7 s"]


def test_a_publisher_from_whom_everything_is_taken_again_and_again_gives_up(
    store: ArtifactStore, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = shelf.put_blobs
    monkeypatch.setattr(shelf, "put_blobs", lambda blobs: (put(blobs), shelf.drop_blobs(blobs)))
    with pytest.raises(CacheError, match="loses what is published"):
        store.publish(manifest(), [artifact()])
    assert store.manifests().manifests == ()


def test_a_collection_looks_again_before_it_takes_contents(
    store: ArtifactStore, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(manifest(), [artifact("a", b"12345")])
    drop, published = shelf.drop_manifests, []

    def meanwhile(names: Iterable[str]) -> None:
        if not published:
            published.append(store.publish(manifest(maker="002-b"), [artifact("a", b"12345")]).manifest)
        drop(names)

    monkeypatch.setattr(shelf, "drop_manifests", meanwhile)
    collected = store.collect(max_age=timedelta(0))
    assert (collected.manifests, collected.blobs) == (1, 0)
    assert store.fetch(published[0].entries, ENVIRONMENT).refused == ()


def test_a_removed_manifest_is_gone(store: ArtifactStore) -> None:
    first = store.publish(manifest(), [artifact("a", b"1")]).manifest
    store._shelf.drop_manifests([first.id, "never-there"])
    assert store.manifests().manifests == ()
