"""Files that take their name when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME_CHARS = 40
"""Of a file's name in that of its unfinished form: the name may have all the bytes that a name can have."""


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Gives what the block writes its own name once it is whole; readers see the old file or the new one.

    Yields:
        Where to write.

    Raises:
        OSError: it cannot be written there.
    """
    temporary = path.parent / f".{path.name[:_NAME_CHARS]}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # where there is no folder, there is nothing to remove
            temporary.unlink(missing_ok=True)
