"""Untrusted manifests in a store: they are listed as refused, in text that a terminal can show, and nothing more."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fuzzing import HOSTILE, flipped, nested, nothing_runs, numbers, said, texts, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.schema.errors import CacheError
from orchestrator import cache
from orchestrator.artifacts import Manifest, SigningKey, select
from orchestrator.artifacts.explain import Side, explain, nearest, sentences
from orchestrator.artifacts.manifest import Entry
from orchestrator.artifacts.shelf import BlobInfo, Blobs, Use
from orchestrator.artifacts.store import ArtifactStore

OURS, THEIRS = SigningKey(b"k" * 32), SigningKey(b"t" * 32)


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("planted_payload",)


ARTIFACT = Artifact(kind="inductor", key="graph", content=pickle.dumps(Bomb()))


class Shelf:
    """An in-memory shelf that anybody can write to."""

    location = "memory"

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.texts: dict[str, bytes] = {}

    def present(self, sizes: Mapping[str, int]) -> set[str]:
        return {digest for digest, size in sizes.items() if len(self.contents.get(digest, b"")) == size}

    def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        self.contents |= blobs

    def get_blobs(self, sizes: Mapping[str, int]) -> Blobs:
        return Blobs(found={digest: self.contents[digest] for digest in sizes if digest in self.contents})

    def drop_blobs(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.contents.pop(digest, None)

    def blobs(self) -> dict[str, BlobInfo]:
        now = Manifest.from_json(next(iter(GOOD.values()))).created_at
        return {
            digest: BlobInfo(size_bytes=len(content), modified_at=datetime.fromisoformat(now))
            for digest, content in self.contents.items()
        }

    def put_manifest(self, name: str, text: bytes) -> None:
        self.texts[name] = text

    def manifests(self) -> dict[str, bytes]:
        return dict(self.texts)

    def drop_manifests(self, names: Iterable[str]) -> None:
        for name in names:
            self.texts.pop(name, None)

    def note_hits(self, hits: Mapping[str, int]) -> None:
        return None

    def uses(self) -> dict[str, Use]:
        return {}


def published() -> dict[str, bytes]:
    shelf = Shelf()
    about = Manifest(facts={"torch": "2.13.0"}, workload="captioning", size="tiny", settings_key="scope=full", maker="001-a")
    ArtifactStore(shelf, OURS).publish(about, [ARTIFACT])
    return shelf.texts


GOOD = published()
((NAME, TEXT),) = GOOD.items()
VALUES: dict[str, Any] = json.loads(TEXT)
TIMES = ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-01", "2026-01-01T00:00:00Z", "now", "1e9"]

worth = (
    values
    | numbers
    | st.sampled_from(TIMES)
    | st.lists(st.dictionaries(st.sampled_from(sorted(VALUES["entries"][0])) | texts, values), max_size=2)
)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """The good manifest with a few values changed, signed by no key or by another one."""
    found = json.loads(TEXT)
    for _ in range(draw(st.integers(1, 3))):
        target = draw(
            st.sampled_from(
                [found, found["entries"][0] if isinstance(found.get("entries"), list) and found["entries"] else found]
            )
        )
        if isinstance(target, dict):
            target[draw(st.sampled_from(sorted(target) or ["x"]) | texts)] = draw(worth)
    try:
        text = json.dumps(found).encode()
        manifest = Manifest.from_json(text)
    except (CacheError, ValueError):
        return json.dumps(found).encode()
    return manifest.signed(THEIRS).to_json() if draw(st.booleans()) else text


hostile_texts = st.binary(max_size=80) | flipped(TEXT) | changed() | values.map(lambda value: json.dumps(value).encode())


def store_with(names_and_texts: Mapping[str, bytes]) -> ArtifactStore:
    shelf = Shelf()
    shelf.contents[ARTIFACT.digest] = ARTIFACT.content
    shelf.texts = {**GOOD, **names_and_texts}
    return ArtifactStore(shelf, OURS)


@thoroughly
@given(hostile_texts)
def test_any_text_is_a_manifest_or_one_sentence(text: bytes) -> None:
    with nothing_runs():
        try:
            found = Manifest.from_json(text)
        except CacheError as error:
            said(error)
            return
        assert Manifest.from_json(found.to_json()) == found
        assert found.problem(OURS) is None if found.to_json() == TEXT else True


@thoroughly
@given(st.dictionaries(texts | st.sampled_from([NAME, "0" * 32]), hostile_texts, min_size=1, max_size=3))
def test_what_others_put_into_a_store_is_refused_and_ours_is_still_found(theirs: dict[str, bytes]) -> None:
    theirs.pop(NAME, None)
    store = store_with(theirs)
    with nothing_runs():
        listing = store.manifests()
        fetched = store.fetch(
            [entry for manifest in listing.manifests for entry in manifest.entries], listing.manifests[0].environment
        )
    assert [manifest.id for manifest in listing.manifests] == [NAME]
    assert len(listing.refused) == len(theirs)
    assert [artifact.content for artifact in fetched.artifacts] == [ARTIFACT.content]
    assert all(sentence.isprintable() and len(sentence) < 300 for sentence in listing.refused), listing.refused


@thoroughly
@given(changed(), st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 2**40))
def test_a_collection_goes_through_whatever_is_there(text: bytes, days: int | None, most: int | None) -> None:
    try:
        name = Manifest.from_json(text).id
    except CacheError:
        name = "0" * 32
    with nothing_runs():
        collected = store_with({name: text}).collect(max_age=None if days is None else timedelta(days=days), max_bytes=most)
    assert collected.kept_bytes >= 0


@thoroughly
@given(changed(), texts)
def test_manifests_of_others_can_be_compared_and_selected_from(text: bytes, key: str) -> None:
    try:
        found = Manifest.from_json(text)
    except CacheError:
        return
    good = Manifest.from_json(TEXT)
    with nothing_runs():
        sides = Side.of(good, "ours"), Side.of(found, "theirs")
        assert sentences(*sides, explain(*sides))
        nearest(good, [found])
        select([good, found], environment=good.environment, workload="captioning", size="tiny", settings_key=key)


@thoroughly
@given(st.dictionaries(st.sampled_from([*Entry.__dataclass_fields__]), worth, min_size=1, max_size=3))
def test_an_entry_that_was_changed_is_not_fetched(edits: dict[str, Any]) -> None:
    values_of = {**json.loads(TEXT), "entries": [{**VALUES["entries"][0], **edits}]}
    try:
        found = Manifest.from_json(json.dumps(values_of).encode())
    except CacheError as error:
        said(error)
        return
    with nothing_runs():
        fetched = store_with({}).fetch(found.entries, found.environment)
    same = json.dumps(values_of["entries"], sort_keys=True) == json.dumps(VALUES["entries"], sort_keys=True)
    assert [artifact.content for artifact in fetched.artifacts] == ([ARTIFACT.content] if same else [])


@pytest.mark.parametrize("text", [nested(100_000), nested(100_000, '{"a":', "}"), "1" * 5000, '{"version": NaN}'])
def test_what_a_reader_chokes_on_is_one_sentence(text: str) -> None:
    with pytest.raises(CacheError, match="is not a manifest"):
        Manifest.from_json(text.encode())


def test_file_names_of_others_reach_a_terminal_as_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPILE_SWEEP_CACHE_KEY", "ab" * 32)
    (tmp_path / "manifests").mkdir()
    for hostile in HOSTILE:
        name = (
            hostile.replace("/", "")
            .replace("\0", "")[:50]
            .encode("utf-8", "surrogateescape" if hostile != "\ud800" else "replace")
        )
        (Path(os.fsdecode(os.fsencode(tmp_path) + b"/manifests/x" + name + b".json"))).write_text("{}")
    for command in (["list"], ["verify"], ["verify", "--remove"], ["gc"]):
        assert cache.main([*command, "--cache-store", str(tmp_path)]) in (0, 1)
    captured = capsys.readouterr()
    assert all(line.isprintable() for line in (captured.out + captured.err).split("\n"))


@thoroughly
@given(values | st.dictionaries(texts, texts), texts)
def test_a_file_of_components_is_compared_or_one_sentence(tmp_path: Path, components: Any, name: str) -> None:
    file = tmp_path / "components.json"
    file.write_text(json.dumps(components), encoding="utf-8", errors="replace")
    (tmp_path / "store").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILE_SWEEP_CACHE_KEY", "ab" * 32)
        assert cache.main(["explain", str(file), str(file), "--cache-store", str(tmp_path / "store")]) in (0, 2)
        if not name.startswith("-"):
            assert cache.main(["show", "--cache-store", str(tmp_path / "store"), "--", name]) == 2
