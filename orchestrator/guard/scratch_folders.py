"""Folders for what a sweep needs only while it runs. A killed driver cannot remove its own: the next one on the host does.

Whoever uses a folder holds a lock on it, which goes with its process, in whatever container that is. A folder made here has a
mark in it, written once it is locked and removed last: a name alone may be anybody's.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compile_sweep.schema.errors import ConfigError

_ABANDONED_AFTER_S = 60.0
"""Age from which a folder without a lock is nobody's: one that is being made has none for a moment."""

_MARK = ".compile-sweep"
"""File by which a folder made here is told from others."""


@contextmanager
def own_folder(prefix: str, base: Path | None = None) -> Iterator[Path]:
    """A new folder that nobody else may read and that is there while the block lasts.

    Those of the same prefix that killed drivers left are removed first.

    Args:
        prefix: how its name begins.
        base: where it is made; by default among temporary files.
    """
    base = base or Path(tempfile.gettempdir())
    _remove_abandoned(prefix, base)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            (Path(folder) / _MARK).touch()
            yield Path(folder)
        finally:
            _remove(Path(folder))
            os.close(descriptor)


def refuse_unfit() -> None:
    """Refuses to keep temporary files where nothing compiles: torch splits the compiler's command as a shell does (2.13).

    Raises:
        ConfigError: there is a blank, a quote or a backslash in the folder's path.
    """
    folder = tempfile.gettempdir()
    if re.search(r"[\s'\"\\]", folder):
        raise ConfigError(
            f"temporary files go to {folder!r}, and no C++ compiles in a folder whose path has a blank, a quote or a backslash; "
            "set TMPDIR to one without"
        )


def of_attempt(marker: str) -> Path:
    """Where the workers of an attempt keep what they compile: among the temporary files of whichever host they are on.

    Args:
        marker: what tells the attempt from others.
    """
    return Path(tempfile.gettempdir()) / f"compile-sweep-{marker}"


def compile_caches(folder: Path) -> dict[str, str]:
    """The environment in which torch and Triton have their compile caches in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def _remove_abandoned(prefix: str, base: Path) -> None:
    for folder in base.glob(f"{prefix}*"):
        try:
            status = folder.lstat()
            is_old = time.time() - status.st_ctime > _ABANDONED_AFTER_S
            if not (re.fullmatch(r"[a-z0-9_]{8}", folder.name.removeprefix(prefix)) and is_old and status.st_uid == os.getuid()):
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or no folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG((folder / _MARK).lstat().st_mode):
                _remove(folder)
        except OSError:
            continue  # in use, or not made here
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder, its mark last: what is killed meanwhile leaves one that is still known to be made here."""
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _MARK:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
