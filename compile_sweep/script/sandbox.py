"""The folder that a trial's script works in: it can read what the person's folder contains, and its writes stay here.

Background: folders are recreated, small files are copied (a script finds its neighbors by `Path(__file__).resolve()`) and large
ones are links. A link must not be written through: `open` and `torch.save` replace a link about to be written by a copy, or by
nothing. Folders that are too large to recreate are links, too; when something in them is written, they are recreated one level
deep. Some levels above the working directory exist, as links, for a script that reads `../data` or `../../Datasets`, and above
the script's folder, if that is elsewhere, for `Path(__file__).parent.parent / "data"`.
"""

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from compile_sweep.script.job import ScriptJob
from compile_sweep.script.monkeypatch import replaced

COPIED_BYTES = 256 * 2**10  # files up to this size are copied

COPIED_BYTES_IN_ALL = 64 * 2**20

MAX_FOLDERS = 2_000
"""Maximum number of folders recreated at the start; the others are links until something in them is written."""

LEVELS_ABOVE = 4  # number of levels above the working directory that are recreated

MAX_ENTRIES_ABOVE = 1_000  # a folder with more entries, from the second level above on, is recreated without them

_LINKED_WHOLE = {".git", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".tox"}

_MARKS_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
"""What a virtual environment contains, and one of conda, whatever its name: thousands of folders that no script writes to."""

_SCRATCH = "compile-sweep-"  # begins the names of the folders for temporary files of trials

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Makes trackers write to folders of the trial and send nothing; newer versions of MLflow refuse folders otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a job runs."""

    script: str  # path of the script's file there
    folder: str  # its working directory
    environment: Mapping[str, str]


def prepare(job: ScriptJob, base: Path) -> Place:
    """Creates the folder that the job runs in."""
    if job.in_place:
        return Place(script=job.path, folder=job.folder, environment={})
    folder, script = Path(job.folder), Path(job.path)
    mirrored = Mirror(apart=base)
    inside = _recreate(mirrored, folder, base / "above")
    place = inside / script.relative_to(folder) if script.is_relative_to(folder) else None
    if place is None:
        place = _recreate(mirrored, script.parent, base / "script") / script.name
    _own(place)
    return Place(script=str(place), folder=str(inside), environment={**OFFLINE, "MLFLOW_TRACKING_URI": f"file:{base / 'mlruns'}"})


def _recreate(mirrored: "Mirror", folder: Path, inside: Path) -> Path:
    """Recreates a folder below `inside`, with the levels above it; returns where it is."""
    inside.mkdir(parents=True)
    for parent, child in pairwise([*reversed(folder.parents[:LEVELS_ABOVE]), folder]):
        if os.access(parent, os.R_OK):
            mirrored.level(parent, inside, leave_out=child.name, most=None if child == folder else MAX_ENTRIES_ABOVE)
        inside /= child.name
        inside.mkdir()
    mirrored.tree(folder, inside)
    return inside


def size_bytes(base: Path) -> int:
    """Returns the total size of files below the folder, without following links."""
    total = 0
    for folder, _, names in os.walk(base):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total += status.st_blocks * 512
    return total


class Mirror:
    """Creates folders that look like others.

    Args:
        apart: A folder that may lie in those that are recreated, as where TMPDIR is in the working directory. It and the scratch
            folders of trials beside it are left out: they would be recreated in themselves.
    """

    def __init__(self, apart: Path | None = None) -> None:
        self._folders = 0
        self._bytes = 0
        above = () if apart is None else (apart, *apart.parents)
        self._apart = next((one for one in above if one.name.startswith(_SCRATCH)), apart)

    def _is_apart(self, entry: os.DirEntry[str]) -> bool:
        if self._apart is None or not (entry.name == self._apart.name or entry.name.startswith(_SCRATCH)):
            return False
        return os.path.realpath(os.path.dirname(entry.path)) == os.path.realpath(self._apart.parent)

    def tree(self, source: Path, target: Path) -> None:
        """Recreates the folder and its descendants, breadth first, until there are too many."""
        waiting = [(source, target)]
        while waiting:
            origin, made = waiting.pop(0)
            self._folders += 1
            made.mkdir(parents=True, exist_ok=True)
            for entry in _entries(origin):
                if self._is_apart(entry):
                    continue
                place = made / entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder and not _is_linked_whole(entry) and self._folders + len(waiting) < MAX_FOLDERS:
                    waiting.append((Path(entry.path), place))
                else:
                    self._file(entry, place)

    def level(self, source: Path, target: Path, *, leave_out: str = "", most: int | None = None) -> None:
        """Creates links to the folder's entries, unless there are more than `most`."""
        entries = _entries(source)
        for entry in entries if most is None or len(entries) <= most else ():
            if entry.name != leave_out:
                os.symlink(os.path.abspath(entry.path), target / entry.name)

    def _file(self, entry: os.DirEntry[str], place: Path) -> None:
        with suppress(OSError):  # what is not readable there is not readable here
            size = entry.stat().st_size if entry.is_file(follow_symlinks=False) else COPIED_BYTES + 1
            if size <= COPIED_BYTES and self._bytes + size <= COPIED_BYTES_IN_ALL:
                shutil.copy2(entry.path, place)
                self._bytes += size
                return
        os.symlink(os.path.abspath(entry.path), place)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []


def _is_linked_whole(folder: os.DirEntry[str]) -> bool:
    return folder.name in _LINKED_WHOLE or any(os.path.lexists(Path(folder.path, mark)) for mark in _MARKS_OF_ENVIRONMENTS)


def _own(path: Path) -> None:
    """Replaces a link by a copy."""
    if path.is_symlink() and path.is_file():
        origin = os.path.realpath(path)
        path.unlink()
        shutil.copy2(origin, path)


@contextmanager
def keeping_writes(base: Path) -> Iterator[None]:
    """Keeps Python and torch, in the block, from writing through links that lead out of the folder."""
    root = os.path.realpath(base)

    def own_parents(path: str) -> None:
        """Recreates folders on the way to a path that are links."""
        relative = os.path.relpath(path, root)
        if relative.startswith(".."):
            return
        at = root
        for part in relative.split(os.sep)[:-1]:
            at = os.path.join(at, part)
            if os.path.islink(at) and os.path.isdir(at):
                origin = Path(os.path.realpath(at))
                os.unlink(at)
                make_folder(at)
                Mirror().level(origin, Path(at))

    def own(path: Any, *, emptied: bool) -> None:
        if isinstance(path, int):
            return
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return
        own_parents(full)
        if full.startswith(root + os.sep) and os.path.islink(full):
            if emptied or not os.path.exists(full):
                os.unlink(full)
            else:
                _own(Path(full))

    make_folder = os.mkdir

    def opening(open_: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if isinstance(mode, str) and set(mode) & set("wax+"):
                own(file, emptied="w" in mode or "x" in mode)
            return open_(file, mode, *rest, **named)

        return opened

    def opening_by_number(open_: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and "dir_fd" not in named:
                own(path, emptied=bool(flags & os.O_TRUNC))
            return open_(path, flags, *rest, **named)

        return opened

    def making(make: Callable[..., None]) -> Callable[..., None]:
        def made(path: Any, *rest: Any, **named: Any) -> None:
            if "dir_fd" not in named:
                with suppress(TypeError):
                    own_parents(os.path.abspath(os.fsdecode(path)))
            make(path, *rest, **named)

        return made

    def saving(save: Callable[..., None]) -> Callable[..., None]:
        def saved(obj: Any, f: Any, *rest: Any, **named: Any) -> None:
            if isinstance(f, str | os.PathLike):  # opened by name, in C++
                own(f, emptied=True)
            save(obj, f, *rest, **named)

        return saved

    import torch

    with (
        replaced(builtins, "open", opening),
        replaced(io, "open", opening),
        replaced(os, "open", opening_by_number),
        replaced(os, "mkdir", making),
        replaced(torch, "save", saving),
    ):
        yield
