"""A compiler's output for the next process: one artifact, as plain bytes that cross processes and hosts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

FUNCTION_KEYED_KINDS = ("precompile", "pgo")
"""Kinds keyed by a function of the model alone, so that one setting's artifact would be mistaken for another's."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One piece of a compile cache. The content is code: restore only artifacts whose origin is verified."""

    kind: str
    """What made the artifact, one of `ArtifactKind` in `folders.py`."""
    key: str
    """Name within the kind: torch's own cache key, or the path within the cache's folder."""
    content: bytes
    cost_s: float = 0.0
    """Seconds of compile time that a hit saves; 0 if another artifact of the same graph carries them."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()
