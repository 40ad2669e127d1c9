"""What a back-end of the store is: it keeps bytes under names and understands none of them. Folder, object store, cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Blobs:
    """Contents that were read, and why others were not."""

    found: dict[str, bytes] = field(default_factory=dict)
    """By digest; not verified."""
    failed: dict[str, str] = field(default_factory=dict)
    """The end of a sentence, by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """A content that lies in a store."""

    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How often a manifest's entries were hit."""

    hits: int = 0
    last_at: datetime | None = None


class Shelf(Protocol):
    """Blobs by digest, manifests by name, and how often each manifest was hit.

    Any process may call any method at any time. A blob or manifest is seen whole or not at all: it appears under its name at
    once. Names are digests of what they name, so writing one twice, or from two hosts at once, changes nothing.

    Every method raises `CacheError`, in one sentence, if the shelf does not answer at all, and no other exception.
    """

    @property
    def location(self) -> str:
        """Where it is, for sentences; without credentials."""
        ...

    def present(self, sizes: Mapping[str, int]) -> set[str]:
        """Which of these digests are there, with the size that each must have."""
        ...

    def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        """Keeps contents by digest, in place of what is there."""
        ...

    def get_blobs(self, sizes: Mapping[str, int]) -> Blobs:
        """Contents by digest, given the size that each must have: more than that is not read."""
        ...

    def drop_blobs(self, digests: Iterable[str]) -> None:
        """Forgets contents; those that are not there are no mistake."""
        ...

    def blobs(self) -> dict[str, BlobInfo]:
        """Every content there is, by digest."""
        ...

    def put_manifest(self, name: str, text: bytes) -> None:
        """Keeps a manifest."""
        ...

    def manifests(self) -> dict[str, bytes]:
        """Every manifest there is, by name; not verified."""
        ...

    def drop_manifests(self, names: Iterable[str]) -> None:
        """Forgets manifests and their hits; those that are not there are no mistake."""
        ...

    def note_hits(self, hits: Mapping[str, int]) -> None:
        """Adds hits to manifests, by name."""
        ...

    def uses(self) -> dict[str, Use]:
        """Hits so far, by manifest; those never hit are left out."""
        ...
