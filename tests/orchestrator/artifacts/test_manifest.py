"""Manifests as text: they survive a round trip, and no other text is a manifest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cache_samples import artifact, manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts import Entry, Manifest, SigningKey

KEY = SigningKey(b"k" * 32)
MADE = manifest(
    created_at="2026-01-01T00:00:00+00:00",
    entries=(Entry.of(artifact("a/ü\n"), manifest().environment, KEY), Entry.of(artifact("b"), manifest().environment, KEY)),
).signed(KEY)

texts = st.text() | st.sampled_from(["\ud800", "\x1b[31m", "../../etc/passwd", "0" * 64])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def test_a_manifest_comes_back_from_its_text_with_its_signature() -> None:
    back = Manifest.from_json(MADE.to_json())
    assert back == MADE
    assert back.id == MADE.id
    assert back.problem(KEY) is None
    assert [entry.problem(KEY, MADE.environment) for entry in back.entries] == [None, None]


def test_the_signature_of_an_entry_does_not_serve_for_a_manifest() -> None:
    stolen = manifest(entries=MADE.entries, created_at=MADE.created_at, signature=MADE.entries[0].signature)
    assert stolen.problem(KEY) == "does not match its signature"


@settings(deadline=None)
@given(data=st.data())
def test_a_changed_text_is_refused_in_one_sentence_or_not_signed_by_us(data: st.DataObject) -> None:
    values: dict[str, Any] = json.loads(MADE.to_json())
    place = data.draw(st.sampled_from(["manifest", "entry", "facts"]))
    target = {"manifest": values, "entry": values["entries"][0], "facts": values["facts"]}[place]
    name = data.draw(st.sampled_from(sorted(target)) | st.text(max_size=5))
    target[name] = data.draw(anything)
    try:
        changed = Manifest.from_json(json.dumps(values).encode())
    except CacheError as error:
        said: str | None = str(error)
    else:
        said = changed.problem(KEY)
        assert (said is None) == (changed == MADE)
    assert said is None or (len(said) < 150 and said.isascii() and said.isprintable())


@pytest.mark.parametrize("digest", ["../../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n", ""])
def test_what_is_no_digest_names_no_file(digest: str) -> None:
    values = json.loads(MADE.to_json())
    values["entries"][0]["digest"] = digest
    with pytest.raises(CacheError, match="digest is none"):
        Manifest.from_json(json.dumps(values).encode())


def test_a_cost_that_is_no_number_counts_as_unknown() -> None:
    entry = Entry.of(artifact(cost_s=float("nan")), MADE.environment, KEY)
    assert entry.cost_s == 0.0
    assert entry.problem(KEY, MADE.environment) is None
