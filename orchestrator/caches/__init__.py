"""Artifacts of compile caches, shared between trials, hosts and production jobs. See docs/caches.md."""

from orchestrator.caches.entries import Entry, Manifest
from orchestrator.caches.keys import Facts, differences, environment_facts, trial_facts
from orchestrator.caches.opening import open_store
from orchestrator.caches.selecting import Selection, select
from orchestrator.caches.signing import KEY_VARIABLE, SigningKey
from orchestrator.caches.store import ArtifactStore, Fetched, Listing, Published

__all__ = [
    "KEY_VARIABLE",
    "ArtifactStore",
    "Entry",
    "Facts",
    "Fetched",
    "Listing",
    "Manifest",
    "Published",
    "Selection",
    "SigningKey",
    "differences",
    "environment_facts",
    "open_store",
    "select",
    "trial_facts",
]
