"""Which of a store's entries a trial restores. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from compile_sweep.harness.compile_cache.artifact import FUNCTION_KEYED_KINDS
from compile_sweep.schema.errors import SettingsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.artifacts.manifest import Entry, Manifest

MAX_BYTES = 2 * 2**30
"""What a trial restores at most: more is read and unpacked for longer than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Entries to restore, and whose they are."""

    entries: tuple[Entry, ...]
    """Each kind and key once."""
    owners: Mapping[tuple[str, str], str]
    """The id of the manifest that each kind and key was taken from."""

    def hits(self, hit: Collection[tuple[str, str]]) -> dict[str, int]:
        """Hits by manifest id, for `note_hits`, from the kinds and keys of the artifacts that were hit."""
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
    """Entries of the manifests that can help a trial: same environment, workload and size.

    Where the same settings were compiled before, theirs alone, which are all that was used. Else those of the same scope and
    mode come first, which share most graphs, then others; the newest first among equals. Of others, what Dynamo traced stays
    out: torch knows it by function alone, and would run the code of their mode and options. A manifest whose further contents
    would exceed the budget is left out whole, because entries of one compile need each other.

    Args:
        manifests: verified.
        environment: digest of the trial's facts.
        workload: its name.
        size: the workload's.
        settings_key: of the trial.
        max_bytes: the budget.
    """
    fitting = [
        manifest
        for manifest in manifests
        if (manifest.environment, manifest.workload, manifest.size) == (environment, workload, size)
    ]
    fitting = [manifest for manifest in fitting if manifest.settings_key == settings_key] or fitting
    fitting.sort(key=lambda manifest: datetime.fromisoformat(manifest.created_at), reverse=True)
    fitting.sort(key=lambda manifest: _distance(settings_key, manifest.settings_key))  # stable: newest first stays
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
    except SettingsError:  # of another version of this project
        return 2
    return 1 if (ours.scope, ours.mode) == (theirs.scope, theirs.mode) else 2
