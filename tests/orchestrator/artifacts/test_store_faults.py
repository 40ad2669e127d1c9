"""A faulty store: whatever it does, the result is one prompt sentence, and nothing that was not published comes out of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from cache_samples import artifact, manifest
from faulty_proxy import SLOW_S, Fault, FaultyProxy, faulty_proxy

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.signing import SigningKey
from orchestrator.artifacts.store import ArtifactStore

pytestmark = pytest.mark.slow

ENVIRONMENT = manifest().environment
MADE = [artifact(str(number), bytes([number]) * 50_000) for number in range(4)]


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultyProxy]:
    with faulty_proxy(s3_port) as server:
        yield server


@pytest.fixture
def store(proxy: FaultyProxy, s3_uri: Callable[..., str], key: SigningKey) -> ArtifactStore:
    """A store through the proxy, with one trial's artifacts in it, and nothing cached by the reading process."""
    uri = s3_uri(proxy.port)
    ArtifactStore(DurableShelf(uri), key).publish(manifest(), MADE)
    return ArtifactStore(DurableShelf(uri, timeout_s=5), key)


@pytest.fixture
def shelf(proxy: FaultyProxy, s3_uri: Callable[..., str]) -> DurableShelf:
    return DurableShelf(s3_uri(proxy.port))


def is_one_sentence(text: str) -> bool:
    return len(text) < 400 and "\n" not in text and "Traceback" not in text


def test_a_slow_store_still_serves(store: ArtifactStore, proxy: FaultyProxy) -> None:
    proxy.fault = Fault.SLOW
    (listed,) = store.manifests().manifests
    fetched = store.fetch(listed.entries, ENVIRONMENT)
    assert {one.key for one in fetched.artifacts} == {one.key for one in MADE}
    assert fetched.refused == ()


def test_what_is_there_is_asked_about_side_by_side(shelf: DurableShelf, proxy: FaultyProxy) -> None:
    contents = {f"{number:064x}": bytes([number]) for number in range(24)}
    shelf.put_blobs(contents)
    proxy.fault, before, began = Fault.SLOW, proxy.requests, time.monotonic()
    assert shelf.present(dict.fromkeys(contents, 1)) == contents.keys()
    assert time.monotonic() - began < SLOW_S * len(contents) / 2
    assert proxy.requests - before == len(contents)


def test_a_small_content_is_one_request(shelf: DurableShelf, proxy: FaultyProxy) -> None:
    before = proxy.requests
    shelf.put_blobs({f"{number:064x}": bytes([number]) for number in range(4)})
    assert proxy.requests - before == 4


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.HANGING])
def test_a_store_that_does_not_answer_is_one_sentence(store: ArtifactStore, proxy: FaultyProxy, fault: Fault) -> None:
    proxy.fault = fault
    calls: list[Callable[[], object]] = [store.manifests, lambda: store.publish(manifest(), MADE)]
    if fault is Fault.ERROR_500:
        calls += [store.uses, lambda: store.note_hits({"a": 1}), store.collect, lambda: store._shelf.drop_manifests(["a"])]

    def refused_s(call: Callable[[], object]) -> float:
        began = time.monotonic()
        with pytest.raises(CacheError, match="cannot be used") as refusal:
            call()
        assert is_one_sentence(str(refusal.value))
        return time.monotonic() - began

    with ThreadPoolExecutor(len(calls)) as pool:  # they wait for the same server, as trials do
        assert max(pool.map(refused_s, calls)) < 30


@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.HANGING, Fault.TRUNCATED, Fault.FLIPPED])
def test_contents_that_cannot_be_read_are_refused_one_by_one(store: ArtifactStore, proxy: FaultyProxy, fault: Fault) -> None:
    (listed,) = store.manifests().manifests
    proxy.fault, proxy.only_blobs = fault, True
    began = time.monotonic()
    fetched = store.fetch(listed.entries, ENVIRONMENT)
    assert time.monotonic() - began < 40
    assert fetched.artifacts == ()
    assert len(fetched.refused) == len(MADE)
    assert all(map(is_one_sentence, fetched.refused))
    if fault is Fault.HANGING:  # by the limit of a call; without it the client would give up too, after 12 s
        assert all("was not read within 5 s" in reason for reason in fetched.refused)

    proxy.fault = Fault.NONE  # it recovers
    store.publish(manifest(maker="002-b"), MADE)
    assert store.fetch(listed.entries, ENVIRONMENT).refused == ()


def test_truncated_manifests_are_never_taken_for_whole_ones(store: ArtifactStore, proxy: FaultyProxy) -> None:
    proxy.fault = Fault.TRUNCATED
    with suppress(CacheError):
        assert store.manifests().manifests == ()
    proxy.fault = Fault.NONE
    assert len(store.manifests().manifests) == 1


def test_a_refused_connection_is_one_sentence(s3_uri: Callable[..., str], key: SigningKey) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and nobody listens
        store = ArtifactStore(DurableShelf(s3_uri(nobody.getsockname()[1]), timeout_s=8), key)
        began = time.monotonic()
        calls: list[Callable[[], object]] = [store.manifests, lambda: store.publish(manifest(), MADE)]
        for call in calls:
            with pytest.raises(CacheError, match="cannot be used") as refusal:
                call()
            assert is_one_sentence(str(refusal.value))
        assert time.monotonic() - began < 60


def test_a_bucket_that_is_not_there_is_one_sentence(s3_uri: Callable[..., str], key: SigningKey) -> None:
    store = ArtifactStore(DurableShelf(s3_uri().replace("s3://artifacts", "s3://never-made")), key)
    with pytest.raises(CacheError, match="never-made"):
        store.publish(manifest(), MADE)


def test_credentials_in_a_uri_are_in_no_sentence(key: SigningKey) -> None:
    store = ArtifactStore(DurableShelf("s3://user:secret@bucket/x?endpoint_override=127.0.0.1:1&scheme=http&region=r"), key)
    with pytest.raises(CacheError) as refusal:
        store.manifests()
    assert "secret" not in str(refusal.value) + store.location
