"""The folder for a sweep's own disposable state, which a killed driver cannot remove: the next one on the host does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "compile-sweep-tune-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder that is there while the block lasts. Those of drivers that are gone are removed first."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def remove_abandoned() -> None:
    """Removes what drivers of this user left that are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            is_mine = folder.stat().st_uid == os.getuid()
        except OSError:
            continue  # gone meanwhile
        if owner.isdigit() and is_mine and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
