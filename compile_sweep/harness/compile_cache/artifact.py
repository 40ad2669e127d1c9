"""What a compiler leaves behind for the next process: one artifact, as plain bytes that cross processes and hosts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

FUNCTION_KEYED_KINDS = ("precompile", "pgo")
"""Kinds whose keys name a function of the model, whatever was made of it: one setting's would be taken for another's."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One piece of a compile cache. Content is code: restore none whose origin is not verified."""

    kind: str
    """What made it, one of `ArtifactKind` in `folders.py`."""
    key: str
    """Its name within the kind: torch's own cache key, or its path within the cache's folder."""
    content: bytes
    cost_s: float = 0.0
    """Seconds of compiling that a hit saves; 0 where another artifact of the same graph carries them."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()
