"""Scratch folders of a sweep. A driver that is killed cannot remove its own; its reaper or the next sweep on the host does.

The process that uses a folder holds a lock on it, which ends with the process even in another container. Each folder contains a
marker file, written after the lock is taken and removed last, because a matching name alone does not show that the folder is
ours.
"""

import fcntl
import glob
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
"""Age in seconds after which an unlocked folder is abandoned. A folder has no lock for a moment while it is being created."""

_MARK = ".compile-sweep"  # the marker file that identifies a folder created here


@contextmanager
def scratch_folder(prefix: str, base: Path | None = None) -> Iterator[Path]:
    """Creates a private folder that exists while the block lasts, after removing those of its prefix that killed drivers left."""
    base = base or Path(tempfile.gettempdir())
    remove_abandoned(prefix, base)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=base, ignore_cleanup_errors=True) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            (Path(folder) / _MARK).touch()
            yield Path(folder)
        finally:
            _remove(Path(folder))
            os.close(descriptor)


def check_temp_folder() -> None:
    """Refuses a temporary folder with a space, a quote or a backslash: torch 2.13 splits the compiler's command like a shell."""
    folder = tempfile.gettempdir()
    if re.search(r"[\s'\"\\]", folder):
        raise ConfigError(
            f"temporary files go to {folder!r}, and C++ does not compile in a folder whose path contains whitespace, a quote "
            "or a backslash; set TMPDIR to another folder"
        )


def attempt_folder(marker: str) -> Path:
    """Returns the folder, among this host's temporary files, in which the workers of an attempt keep compiled code."""
    return Path(tempfile.gettempdir()) / f"compile-sweep-{marker}"


def use_own_temp_folder(folder: Path) -> None:
    """Sends the temporary files of this process, and of those it starts, to a new folder in the given one, which need not exist.

    A workload that empties its folder for temporary files then harms neither other trials nor the sweep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix="t", dir=folder))  # a short name: paths of sockets have 107 bytes at most
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)


def compile_cache_env(folder: Path) -> dict[str, str]:
    """Returns the environment variables that place the compile caches of torch and Triton in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def remove_abandoned(prefix: str, base: Path, older_than_s: float | None = None) -> None:
    """Removes folders that killed processes left behind; folders that are in use stay."""
    least_s = _ABANDONED_AFTER_S if older_than_s is None else older_than_s
    for folder in base.glob(f"{glob.escape(prefix)}*"):
        try:
            status = folder.lstat()
            is_old = time.time() - status.st_ctime >= least_s
            is_named_so = re.fullmatch(r"([a-z0-9_]{8})?", folder.name.removeprefix(prefix))
            if not (is_named_so and is_old and status.st_uid == os.getuid()):
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed by someone else, or not a folder
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG((folder / _MARK).lstat().st_mode):
                _remove(folder)
        except OSError:
            continue  # in use, or not created here
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder, its marker file last, so that a half-removed one can still be identified and removed later."""
    for path in folder.glob("*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _MARK:
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
