"""A compiler's output for the next process: one artifact, as plain bytes that cross processes and hosts."""

import hashlib
import struct
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

    @property
    def is_cut_short(self) -> bool:
        """Whether it is a part of a compiled library, as a process leaves it that is killed while it compiles."""
        return self.kind == "code" and is_cut_short(self.key, self.content[:ELF_HEAD_BYTES], len(self.content))


ELF_HEAD_BYTES = 64


def is_cut_short(name: str, head: bytes, num_bytes: int) -> bool:
    """Tells whether a compiled file is incomplete: ELF files end with a table that their head, written last, locates."""
    if head[:4] != b"\x7fELF" or len(head) < ELF_HEAD_BYTES:
        return name.endswith((".so", ".o"))
    order = "<" if head[5] == 1 else ">"
    (table_at,) = struct.unpack_from(f"{order}Q", head, 0x28)
    entry_bytes, num_entries = struct.unpack_from(f"{order}HH", head, 0x3A)
    return bool(num_bytes < table_at + entry_bytes * num_entries)
