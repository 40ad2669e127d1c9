"""Which entries a trial restores."""

from __future__ import annotations

from typing import Any

import pytest
from cache_samples import FACTS, artifact, manifest

from compile_sweep.harness.compile_cache.artifact import FUNCTION_KEYED_KINDS
from orchestrator.artifacts import Manifest, Selection, SigningKey, select
from orchestrator.artifacts.manifest import Entry

KEY = SigningKey(b"k" * 32)


def made(day: int, *contents: tuple[str, bytes], kind: str = "inductor", **changes: Any) -> Manifest:
    plain = manifest(created_at=f"2026-01-{day:02}T00:00:00+00:00", **changes)
    return manifest(
        created_at=plain.created_at,
        entries=tuple(Entry.of(artifact(name, content, kind), plain.environment, KEY) for name, content in contents),
        **changes,
    )


def selected(*manifests: Manifest, settings_key: str = "scope=full", **changes: Any) -> Selection:
    usual = {"environment": manifest().environment, "workload": "captioning", "size": "tiny", "settings_key": settings_key}
    return select(manifests, **{**usual, **changes})


def keys(selection: Selection) -> list[str]:
    return [entry.key for entry in selection.entries]


def test_another_environment_workload_or_size_is_left_out() -> None:
    others = [{"facts": {**FACTS, "gpu": "B200"}}, {"workload": "other"}, {"size": "base"}]
    assert keys(selected(*(made(1, (str(n), b"1"), **changes) for n, changes in enumerate(others)))) == []


def test_the_same_scope_and_mode_come_first_then_the_newest() -> None:
    manifests = [
        made(2, ("near", b"1"), settings_key="scope=full,dynamic=auto"),
        made(3, ("far", b"1"), settings_key="scope=full,mode=max-autotune"),
        made(4, ("newer far", b"1"), settings_key="scope=regional"),
        made(5, ("unreadable", b"1"), settings_key="colour=blue"),
    ]
    assert keys(selected(*manifests)) == ["near", "unreadable", "newer far", "far"]


def test_of_settings_that_were_compiled_before_there_is_no_need_of_others() -> None:
    manifests = [
        made(1, ("same", b"1")),
        made(2, ("near", b"1"), settings_key="scope=full,dynamic=auto"),
        made(3, ("again", b"1")),
    ]
    assert keys(selected(*manifests)) == ["again", "same"]


def test_each_kind_and_key_is_restored_once_from_the_best() -> None:
    old, new = made(1, ("graph", b"old")), made(2, ("graph", b"new"), ("more", b"x"))
    selection = selected(old, new)
    assert selection.entries == new.entries
    assert selection.hits([("inductor", "graph"), ("inductor", "more"), ("inductor", "made here")]) == {new.id: 2}


@pytest.mark.parametrize("kind", FUNCTION_KEYED_KINDS)
def test_what_dynamo_traced_under_other_settings_is_left_out(kind: str) -> None:
    others = made(2, ("function", b"1"), settings_key="scope=full,mode=max-autotune", kind=kind)
    assert keys(selected(others, made(1, ("graph", b"2"), settings_key="scope=full,mode=max-autotune"))) == ["graph"]
    assert keys(selected(others, settings_key="scope=full,mode=max-autotune")) == ["function"]


def test_a_manifest_beyond_the_budget_is_left_out_whole() -> None:
    first, large, small = made(3, ("a", b"1" * 50)), made(2, ("b", b"2" * 60), ("c", b"3")), made(1, ("d", b"4" * 40))
    assert keys(selected(first, large, small, max_bytes=100)) == ["a", "d"]


def test_contents_that_are_there_already_cost_nothing_of_the_budget() -> None:
    assert keys(selected(made(2, ("a", b"1" * 80)), made(1, ("b", b"1" * 80)), max_bytes=100)) == ["a", "b"]
