"""Artifacts such as a trial would publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_sweep.harness.compile_cache.artifact import Artifact
from orchestrator.artifacts import Entry, Manifest

_HEAD = b"\x7fELF\x02\x01" + bytes(34) + (1000).to_bytes(8, "little") + bytes(10) + bytes([64, 0, 2, 0]) + bytes(2)
LIBRARY = _HEAD + bytes(1000 + 2 * 64 - len(_HEAD))
"""A whole library, as far as its head says: two sections, whose table begins at byte 1000."""

FACTS = {"torch": "2.13.0", "gpu": "NVIDIA H200", "python": "3.11.7"}


def manifest(**changes: Any) -> Manifest:
    usual = {"facts": FACTS, "workload": "captioning", "size": "tiny", "settings_key": "scope=full", "maker": "001-a"}
    return Manifest(**{**usual, **changes})


def artifact(key: str = "graph", content: bytes = b"code", kind: str = "inductor", cost_s: float = 1.5) -> Artifact:
    return Artifact(kind=kind, key=key, content=content, cost_s=cost_s)


def all_entries(manifests: Sequence[Manifest]) -> list[Entry]:
    return [entry for one in manifests for entry in one.entries]
