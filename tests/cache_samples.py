"""Artifacts such as a trial would publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_sweep.harness.compile_cache.artifact import Artifact
from orchestrator.artifacts import Entry, Manifest

FACTS = {"torch": "2.13.0", "gpu": "NVIDIA H200", "python": "3.11.7"}


def manifest(**changes: Any) -> Manifest:
    usual = {"facts": FACTS, "workload": "captioning", "size": "tiny", "settings_key": "scope=full", "maker": "001-a"}
    return Manifest(**{**usual, **changes})


def artifact(key: str = "graph", content: bytes = b"code", kind: str = "inductor", cost_s: float = 1.5) -> Artifact:
    return Artifact(kind=kind, key=key, content=content, cost_s=cost_s)


def all_entries(manifests: Sequence[Manifest]) -> list[Entry]:
    return [entry for one in manifests for entry in one.entries]
