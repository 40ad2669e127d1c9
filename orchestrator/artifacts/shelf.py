"""Interface of the store's back-ends (folder, object store, cluster memory): named bytes, which they never interpret."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Blobs:
    """Contents that were read, and why others were not."""

    found: dict[str, bytes] = field(default_factory=dict)  # contents by digest; not verified
    failed: dict[str, str] = field(default_factory=dict)  # reasons by digest, each the end of a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """A content in a store."""

    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How often a manifest's entries were hit."""

    hits: int = 0
    last_at: datetime | None = None


class Shelf(Protocol):
    """Stores blobs by digest, manifests by name, and how often each manifest was hit.

    Any process may call any method at any time. Blobs and manifests appear atomically: readers see all of one or nothing. Names
    are digests of what they name, so writing one twice, or from two hosts at once, changes nothing.

    Every method raises `CacheError`, in one sentence, if the shelf does not answer at all, and no other exception.
    """

    @property
    def location(self) -> str:
        """Where the shelf is, for messages; without credentials."""
        ...

    def present(self, sizes: Mapping[str, int]) -> set[str]:
        """Returns which of these digests are stored with the given sizes."""
        ...

    def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        """Stores contents by digest, replacing existing ones."""
        ...

    def get_blobs(self, sizes: Mapping[str, int]) -> Blobs:
        """Reads contents by digest; at most the given size of each is read."""
        ...

    def drop_blobs(self, digests: Iterable[str]) -> None:
        """Removes contents; missing ones are ignored."""
        ...

    def blobs(self) -> dict[str, BlobInfo]:
        """Returns every stored content by digest."""
        ...

    def put_manifest(self, name: str, text: bytes) -> None:
        """Stores a manifest."""
        ...

    def manifests(self) -> dict[str, bytes]:
        """Returns every manifest by name; not verified."""
        ...

    def drop_manifests(self, names: Iterable[str]) -> None:
        """Removes manifests and their hits; missing ones are ignored."""
        ...

    def note_hits(self, hits: Mapping[str, int]) -> None:
        """Adds hits to manifests, by name."""
        ...

    def uses(self) -> dict[str, Use]:
        """Returns the hits so far, by manifest; manifests without hits are left out."""
        ...
