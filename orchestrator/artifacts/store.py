"""`ArtifactStore`: artifacts shared by all trials. Everything read is verified, and what we did not sign is refused, never run.

`open_store` turns the value of `--cache-store` into a store.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from compile_sweep.harness.compile_cache.artifact import FUNCTION_KEYED_KINDS, Artifact
from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.manifest import Entry, Manifest
from orchestrator.artifacts.object_store import DurableShelf
from orchestrator.artifacts.shelf import Shelf, Use
from orchestrator.artifacts.signing import SigningKey

GRACE = timedelta(hours=1)
"""How long `collect` keeps a content without a manifest: a publisher writes its manifest last."""

_TRIES = 3  # attempts to publish contents that a concurrent collection removes


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publish added to the store."""

    manifest: Manifest
    new_entries: int
    """Entries whose content was new to the store."""
    new_bytes: int
    """Size of contents that were new to the store."""
    all_bytes: int
    """Size of all artifacts, stored before or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The manifests in a store."""

    manifests: tuple[Manifest, ...]
    """Manifests signed with our key, oldest first."""
    refused: tuple[str, ...]
    """A sentence for each other manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Artifacts that may be restored."""

    artifacts: tuple[Artifact, ...]
    refused: tuple[str, ...]
    """A sentence for each entry that was missing or may not be restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a garbage collection removed and kept."""

    manifests: int
    blobs: int
    freed_bytes: int
    kept_bytes: int
    unread: int  # manifests that cannot be read; while there are any, every content is kept


class ArtifactStore:
    """Content-addressed artifacts on a shelf, signed and verified here.

    Any process may publish, fetch and collect at any time. A publish writes contents before the manifest that names them, so
    a visible manifest is complete; an interrupted publish leaves contents that `collect` removes. Nothing is locked: names are
    digests.

    Every method raises `CacheError`, in one sentence, if the store does not answer, and nothing else. Faults of single manifests
    or entries raise nothing; the result's `refused` has a sentence for each.
    """

    def __init__(self, shelf: Shelf, key: SigningKey) -> None:
        self._shelf = shelf
        self._key = key

    @property
    def location(self) -> str:
        """Where the store is, for messages; without credentials."""
        return self._shelf.location

    def publish(self, manifest: Manifest, artifacts: Sequence[Artifact]) -> Published:
        """Adds artifacts, and the manifest that lists them.

        If the store has an artifact of the same kind, key and facts, its content is reused: compilers write into each artifact
        how long it took, so two artifacts of one graph differ in bytes and in nothing else. Exceptions are artifacts that are
        keyed by a function of the model alone (`OF_FUNCTIONS`): each trial keeps its own.

        Args:
            manifest: Maker and facts; the entries, time and signature are filled in here.
            artifacts: Only the first of each kind and key is used.
        """
        named: dict[tuple[str, str], Artifact] = {}
        for artifact in artifacts:
            named.setdefault((artifact.kind, artifact.key), artifact)
        environment = manifest.environment
        own = {name: Entry.of(artifact, environment, self._key) for name, artifact in named.items()}
        theirs = self._entries(environment)
        wanted = {entry.digest: entry.size_bytes for entry in [*own.values(), *(theirs[n] for n in own if n in theirs)]}
        there, put = self._shelf.present(wanted), dict[str, int]()
        signed: Manifest | None = None
        for _ in range(_TRIES):
            entries = {name: theirs[name] if name in theirs and theirs[name].digest in there else own[name] for name in own}
            new = {entry.digest: named[name].content for name, entry in entries.items() if entry.digest not in there}
            if new:
                self._shelf.put_blobs(new)
                put |= {digest: len(content) for digest, content in new.items()}
            named_by = tuple(entries.values())
            if signed is None or signed.entries != named_by:
                before, made_at = signed, datetime.now(UTC).isoformat()
                signed = replace(manifest, entries=named_by, created_at=made_at).signed(self._key)
                self._shelf.put_manifest(signed.id, signed.to_json())
                if before is not None:
                    self._shelf.drop_manifests([before.id])
            there, mine = self._shelf.present(wanted), {entry.digest for entry in named_by}
            # A collection that started before this manifest was visible removes contents that only its removed manifests named.
            # So existing contents are relied on only while another manifest names them; otherwise they are written again, which
            # protects them.
            if not mine <= put.keys():
                there &= put.keys() | self._named_by_others(signed.id)
            if there >= mine:
                break
        else:
            if signed is not None:
                self._shelf.drop_manifests([signed.id])
            raise CacheError(f"the cache at {self.location} loses what is published; see that no `gc` runs there over and over")
        return Published(
            manifest=signed,
            new_entries=sum(entry.digest in put for entry in signed.entries),
            new_bytes=sum(put.values()),
            all_bytes=sum(len(artifact.content) for artifact in artifacts),
        )

    def manifests(self) -> Listing:
        """Returns every manifest signed with our key, and a sentence for each other one."""
        manifests, refused = [], []
        for name, manifest in self._read().items():
            if isinstance(manifest, Manifest) and self._problem(manifest) is None:
                manifests.append(manifest)
            else:
                refused.append(f"manifest {ascii(name[:32])[1:-1]} {self._problem(manifest)}")
        manifests.sort(key=lambda manifest: (datetime.fromisoformat(manifest.created_at), manifest.id))
        return Listing(manifests=tuple(manifests), refused=tuple(refused))

    def fetch(self, entries: Sequence[Entry], environment: str) -> Fetched:
        """Reads the entries' artifacts and verifies them.

        A content that does not match its digest, or is half a library, is also removed, so that the next publish writes it anew.
        """
        artifacts, refused, damaged = [], [], set()
        trusted = []
        for entry in entries:
            if problem := entry.problem(self._key, environment):
                refused.append(f"{entry} {problem}")
            else:
                trusted.append(entry)
        blobs = self._shelf.get_blobs({entry.digest: entry.size_bytes for entry in trusted})
        for entry in trusted:
            content = blobs.found.get(entry.digest)
            if content is None:
                refused.append(f"{entry} {blobs.failed.get(entry.digest, 'is not in the store any more')}")
            elif hashlib.sha256(content).hexdigest() != entry.digest:
                damaged.add(entry.digest)
                refused.append(f"{entry} is damaged: its content is not what was published")
            elif (artifact := Artifact(kind=entry.kind, key=entry.key, content=content, cost_s=entry.cost_s)).is_cut_short:
                damaged.add(entry.digest)
                refused.append(f"{entry} is damaged: it was cut short before it was published, as by a process that was killed")
            else:
                artifacts.append(artifact)
        if damaged:
            self._shelf.drop_blobs(damaged)
        return Fetched(artifacts=tuple(artifacts), refused=tuple(refused))

    def note_hits(self, hits: Mapping[str, int]) -> None:
        """Adds hits to manifests, by ID: `list` shows them, and `collect` keeps what is used."""
        self._shelf.note_hits({name: count for name, count in hits.items() if count > 0})

    def uses(self) -> dict[str, Use]:
        """Returns the hits so far, by manifest ID; manifests without hits are left out."""
        return self._shelf.uses()

    def remove_refused(self) -> int:
        """Removes every manifest not signed with our key; returns how many."""
        gone = [name for name, manifest in self._read().items() if self._problem(manifest) is not None]
        self._shelf.drop_manifests(gone)
        return len(gone)

    def collect(self, *, max_age: timedelta | None = None, max_bytes: int | None = None, grace: timedelta = GRACE) -> Collected:
        """Removes old or excess manifests and contents, whoever signed them.

        Args:
            max_age: Manifests that were neither made nor hit for longer than this are removed.
            max_bytes: Size to shrink the contents to; manifests that were longest neither made nor hit are removed first.
            grace: How long contents that never had a manifest are kept. While any manifest cannot be read, all contents are kept,
                because it may name any of them.
        """
        now = datetime.now(UTC)
        uses, found, blobs = self._shelf.uses(), self._read(), self._shelf.blobs()
        readable = {name: manifest for name, manifest in found.items() if isinstance(manifest, Manifest)}

        def last_used(name: str) -> datetime:
            use = uses.get(name, Use()).last_at
            made = datetime.fromisoformat(readable[name].created_at)
            return max(made, use) if use else made

        users: dict[str, int] = {}
        for manifest in readable.values():
            for digest in {entry.digest for entry in manifest.entries}:
                users[digest] = users.get(digest, 0) + 1
        held = sum(blob.size_bytes for digest, blob in blobs.items() if digest in users)
        gone = []
        for name in sorted(readable, key=last_used):
            is_old = max_age is not None and now - last_used(name) > max_age
            is_too_much = max_bytes is not None and held > max_bytes
            if not (is_old or is_too_much):
                break
            gone.append(name)
            for digest in {entry.digest for entry in readable[name].entries}:
                users[digest] -= 1
                if not users[digest]:
                    del users[digest]
                    held -= blobs[digest].size_bytes if digest in blobs else 0
        let_go = {entry.digest for name in gone for entry in readable[name].entries}
        self._shelf.drop_manifests(gone)
        left = self._read()  # read again, since others publish in the meantime
        unread = sum(not isinstance(manifest, Manifest) for manifest in left.values())
        named = {entry.digest for manifest in left.values() if isinstance(manifest, Manifest) for entry in manifest.entries}
        untouched = {digest for digest, blob in self._shelf.blobs().items() if blob == blobs.get(digest)}
        swept = [
            digest for digest in untouched - named if not unread and (digest in let_go or now - blobs[digest].modified_at > grace)
        ]
        self._shelf.drop_blobs(swept)
        freed = sum(blobs[digest].size_bytes for digest in swept)
        total = sum(blob.size_bytes for blob in blobs.values())
        return Collected(manifests=len(gone), blobs=len(swept), freed_bytes=freed, kept_bytes=total - freed, unread=unread)

    def _problem(self, manifest: Manifest | str) -> str | None:
        return manifest if isinstance(manifest, str) else manifest.problem(self._key)

    def _entries(self, environment: str) -> dict[tuple[str, str], Entry]:
        """Returns the trusted entries made under these facts that serve any trial, the oldest of each kind and key."""
        entries: dict[tuple[str, str], Entry] = {}
        for manifest in self.manifests().manifests:
            if manifest.environment == environment:
                for entry in manifest.entries:
                    if entry.kind not in FUNCTION_KEYED_KINDS and entry.problem(self._key, environment) is None:
                        entries.setdefault((entry.kind, entry.key), entry)
        return entries

    def _named_by_others(self, manifest_id: str) -> set[str]:
        others = [one for name, one in self._read().items() if isinstance(one, Manifest) and name != manifest_id]
        return {entry.digest for manifest in others for entry in manifest.entries}

    def _read(self) -> dict[str, Manifest | str]:
        """Returns every manifest by name, or why it cannot be read."""
        return {name: _read(name, text) for name, text in self._shelf.manifests().items()}


def _read(name: str, text: bytes) -> Manifest | str:
    try:
        manifest = Manifest.from_json(text)
    except CacheError as error:
        return str(error)
    return manifest if manifest.id == name else "is damaged: its name is not that of its content"


def open_store(location: str, *, in_cluster: bool = False, key: SigningKey | None = None) -> ArtifactStore:
    """Opens the store at a folder or URI.

    Args:
        location: A folder, `s3://bucket/prefix`, `gs://…`, or any URI that pyarrow knows, or fsspec behind `fsspec+`.
        in_cluster: Whether to keep contents in the cluster's memory, too; only where Ray runs. The first process to open the
            store decides which folder the actor uses, and only the actor's host needs to reach it.
        key: By default the user's key, created at first use.

    Raises:
        CacheError: The location is not valid, or the key cannot be used.
    """
    key = key or SigningKey.load()
    if in_cluster:
        from orchestrator.artifacts.cluster_memory import ClusterShelf  # only where it is asked for: it needs Ray

        return ArtifactStore(ClusterShelf(location), key)
    return ArtifactStore(DurableShelf(location), key)
