"""Artifacts of compile caches, shared between trials, hosts and production jobs. See docs/caches.md."""

from orchestrator.artifacts.manifest import Entry, Facts, Manifest, differences, environment_facts, trial_facts
from orchestrator.artifacts.selection import Selection, select
from orchestrator.artifacts.signing import KEY_VARIABLE, SigningKey
from orchestrator.artifacts.store import ArtifactStore, open_store

__all__ = [
    "KEY_VARIABLE",
    "ArtifactStore",
    "Entry",
    "Facts",
    "Manifest",
    "Selection",
    "SigningKey",
    "differences",
    "environment_facts",
    "open_store",
    "select",
    "trial_facts",
]
