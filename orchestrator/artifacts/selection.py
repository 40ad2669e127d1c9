"""Selects the entries of a store that a trial restores. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from compile_sweep.harness.compile_cache.artifact import FUNCTION_KEYED_KINDS
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.artifacts.manifest import Entry, Manifest

MAX_BYTES = 2 * 2**30  # maximum that a trial restores, in bytes: reading and unpacking more takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Entries to restore, and the manifests they belong to."""

    entries: tuple[Entry, ...]
    """At most one per kind and key."""
    owners: Mapping[tuple[str, str], str]
    """ID of the manifest that each kind and key was taken from."""

    def hits(self, hit: Collection[tuple[str, str]]) -> dict[str, int]:
        """Returns the number of hits by manifest ID, for `note_hits`, given the kinds and keys of the artifacts that were hit."""
        return dict(Counter(self.owners[name] for name in hit if name in self.owners))


def select(
    manifests: Sequence[Manifest],
    *,
    environment: str,
    workload: str,
    size: str,
    settings_key: str,
    max_bytes: int = MAX_BYTES,
) -> Selection:
    """Selects the entries that can help a trial, from manifests with the same environment, workload and size.

    If the same settings were compiled before, only their entries are taken, because nothing else would be used. Otherwise
    manifests of the same scope and mode come first, since they share most graphs; newer ones come first among equals. Dynamo's
    traces of other settings are left out: torch looks them up by function alone and would run code of the wrong mode and options.
    A manifest whose additional contents would exceed the budget is left out as a whole, because entries of one compile need each
    other.
    """
    fitting = [
        manifest
        for manifest in manifests
        if (manifest.environment, manifest.workload, manifest.size) == (environment, workload, size)
    ]
    fitting = [manifest for manifest in fitting if manifest.settings_key == settings_key] or fitting
    fitting.sort(key=lambda manifest: datetime.fromisoformat(manifest.created_at), reverse=True)
    fitting.sort(key=lambda manifest: _distance(settings_key, manifest.settings_key))  # stable sort: newer ones stay first
    chosen: dict[tuple[str, str], Entry] = {}
    owners: dict[tuple[str, str], str] = {}
    contents: dict[str, int] = {}
    for manifest in fitting:
        is_own = manifest.settings_key == settings_key
        further = {
            (entry.kind, entry.key): entry
            for entry in manifest.entries
            if (entry.kind, entry.key) not in chosen and (is_own or entry.kind not in FUNCTION_KEYED_KINDS)
        }
        larger = contents | {entry.digest: entry.size_bytes for entry in further.values()}
        if sum(larger.values()) <= max_bytes:
            contents = larger
            chosen |= further
            owners |= dict.fromkeys(further, manifest.id)
    return Selection(entries=tuple(chosen.values()), owners=owners)


def _distance(wanted: str, made: str) -> int:
    try:
        ours, theirs = CompileSettings.parse(wanted), CompileSettings.parse(made)
    except SettingsError:  # written by another version of this project
        return 2
    return 1 if (ours.scope, ours.mode) == (theirs.scope, theirs.mode) else 2
