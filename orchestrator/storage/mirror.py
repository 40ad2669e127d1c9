"""Results at a URI: a cluster's nodes need no common file system, and a sweep outlives the machine that ran it.

The sweep's folder on the head stays what everything reads and writes. While the sweep runs, changed files are copied to the
storage, and a resumed sweep begins by copying back what the folder lacks. The storage holds the same files under the same names,
so `aws s3 cp --recursive` downloads an ordinary sweep folder. Names that begin with a dot are left out.

Only one driver at a time may write. A copy lags the folder by about `EVERY_S`, or by the time that copying takes if that is
longer: losing the head loses at most the trials that ended within that time, and they run again. Nothing is ever removed from a
storage.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from pyarrow.fs import FileSystem

from compile_sweep.schema.errors import CompileSweepError, StorageError, SweepFolderError
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE
from orchestrator.config import AUTO, HIDDEN, NONE
from orchestrator.run.sweep_folder import LOGS, write_durably
from orchestrator.storage import filesystem

VARIABLE = "COMPILE_SWEEP_STORAGE"
"""Environment variable with the URI below which a cluster keeps results, a folder per sweep, and its cache; the command line
overrides it.
"""

EVERY_S = 2.0
LOGS_OF_RECORDS = (TRIALS_FILE, WARM_STARTS_FILE)
_LAST_TRIES = 3
_AT_ONCE = 8
_RESTS = 4
"""The copying thread sleeps this many times as long as its last copy took, so that it takes little from the measurements."""


State = tuple[int, int]  # state of a file when it was copied: its modification time in ns and its size in bytes


normalized = partial(filesystem.normalized, what="results", refused=StorageError)
"""Returns a storage's location in a form that means the same in any folder."""


def below(base: str, name: str) -> str:
    """Returns a folder below a storage's URI, with the URI's options at the end."""
    path, mark, options = base.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def chosen(asked: str | None, output: Path, environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns where a sweep's results are kept; None for nowhere. Raises StorageError if they cannot be kept there."""
    if asked is None or asked == NONE:
        return None
    if HIDDEN in asked:
        raise StorageError(f"the password of {asked} was not written down; give --storage again")
    if asked != AUTO:
        return _apart(normalized(asked), output)
    base = environ.get(VARIABLE)
    location = below(normalized(base), output.absolute().name) if base else None
    if location is None or _place(location) == _place(str(output)):  # the sweep's folder lies where the cluster keeps results
        return None
    return _apart(location, output)


def _apart(location: str, output: Path) -> str:
    """Returns the location, which must not lie in the sweep's own folder, however either is spelled."""
    place = _place(location)
    if place is not None and place.is_relative_to(os.path.realpath(output)):
        raise StorageError(f"{location} lies in the sweep's own folder, whose copy it would be; name another --storage")
    return location


def _place(location: str) -> Path | None:
    """Resolves a location to a folder of this host, through all links; None if it is not on this host."""
    scheme, colon, rest = location.partition("://")
    if colon and scheme.removeprefix(filesystem.FSSPEC) != "file":
        return None
    return Path(os.path.realpath(unquote(rest.partition("?")[0]) if colon else location))  # realpath ends on a loop of links


class Storage:
    """The copy of one sweep's folder."""

    def __init__(self, location: str, folder: Path) -> None:
        self.uri, self._folder = normalized(location), folder  # the URI may contain credentials
        self._copied: dict[str, State] = {}

    @property
    def location(self) -> str:
        """The URI without credentials, for display."""
        return filesystem.without_credentials(self.uri)

    def holds_sweep(self) -> bool:
        """Tells whether the storage holds a sweep; raises StorageError if it does not answer."""
        try:
            return bool(self._filesystem.get_file_info(f"{self._root}/{SWEEP_FILE}").is_file)
        except Exception as error:  # each library raises its own errors
            raise self._unusable(error) from None

    def refuse_another(self) -> None:
        """Raises SweepFolderError if a new sweep would replace another, StorageError if nothing can be written."""
        try:
            filesystem.refuse_no_folder(*self._opened, to_write=True)
        except Exception as error:  # each library raises its own errors
            raise self._unusable(error) from None
        if self.holds_sweep():
            raise SweepFolderError(
                f"{self.location} holds a sweep already; add --resume to go on with it, or name another --storage or --output"
            )

    def bring_back(self) -> int:
        """Copies the files that the folder lacks from the storage; returns how many. SweepFolderError if records differ."""
        try:
            sizes = self._sizes()
            if SWEEP_FILE not in sizes:
                return 0
            names = list(sizes)
            behind = [name for name in LOGS_OF_RECORDS if name in names and self._is_behind(name)]
            lacking = [name for name in names if name not in LOGS_OF_RECORDS and not (self._folder / name).exists()]
            if behind and SWEEP_FILE not in lacking:
                lacking.append(SWEEP_FILE)  # another head continued the sweep
            with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="storage") as pool:
                list(pool.map(self._fetch, [name for name in lacking if name != SWEEP_FILE]))
            # Last what makes the folder look like a sweep.
            for name in (*[name for name in lacking if name == SWEEP_FILE], *behind):
                self._fetch(name)
            self._note_logs(sizes)
        except CompileSweepError:
            raise
        except Exception as error:  # each library raises its own errors
            raise self._unusable(error) from None
        return len(lacking) + len(behind)

    def copy(self) -> int:
        """Copies files that changed since the last call; returns how many. After a StorageError the next call copies the rest."""
        count = 0
        try:
            for name in self._local_names():
                path = self._folder / name
                with suppress(FileNotFoundError):  # replaced or removed in the meantime: the next call sees the result
                    state = _state(path)
                    if self._copied.get(name) == state:
                        continue
                    content = _content(path)
                    filesystem.write_whole(self._filesystem, self._root, name, content)
                    self._copied[name] = state
                    count += 1
        except Exception as error:  # each library raises its own errors
            raise self._unusable(error) from None
        return count

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies again and again in the block, and once more at its end; only then a storage that does not answer is an error."""
        ended = threading.Event()

        def follow() -> None:
            took_s = 0.0
            while not ended.wait(max(EVERY_S, _RESTS * took_s)):
                began = time.monotonic()
                self._try()
                took_s = time.monotonic() - began

        thread = threading.Thread(target=follow, name="storage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._finish()

    def _finish(self) -> None:
        for _ in range(_LAST_TRIES - 1):
            if self._try():
                return
        try:
            self.copy()
        except StorageError as error:
            raise StorageError(f"{error}; the sweep is whole in {self._folder}, and --resume copies it again") from None

    def _try(self) -> bool:
        try:
            self.copy()
        except StorageError:
            return False
        return True

    @cached_property
    def _opened(self) -> tuple[FileSystem, str]:
        return filesystem.opened(self.uri)

    @property
    def _filesystem(self) -> FileSystem:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def _sizes(self) -> dict[str, int]:
        """Returns the size of each file in the storage, by its path below the root."""
        files = filesystem.files(self._filesystem, self._root)
        sizes = {str(info.path)[len(self._root) :].lstrip("/"): int(info.size) for info in files}
        for name in sizes:
            if not _is_inside(name):
                raise StorageError(f"{self.location} names a file {name!r}, which no sweep has; nothing was brought back")
        return {name: size for name, size in sizes.items() if _is_copied(name)}

    def _note_logs(self, sizes: Mapping[str, int]) -> None:
        """Marks logs that are as long in the storage as here as copied: logs only grow, and a sweep has thousands."""
        for name, size in sizes.items():
            path = self._folder / name
            if name.startswith(f"{LOGS}/") and path.is_file() and path.stat().st_size == size:
                self._copied[name] = _state(path)

    def _local_names(self) -> list[str]:
        """Lists the folder's files that are copied; first those that a resumed sweep needs."""
        found = [path.relative_to(self._folder) for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink()]
        names = [path.as_posix() for path in found if _is_copied(path.as_posix())]
        first = (SWEEP_FILE, *LOGS_OF_RECORDS)
        return sorted(names, key=lambda name: (first.index(name) if name in first else len(first), name))

    def _is_behind(self, name: str) -> bool:
        """Tells whether the storage's log continues the folder's with more records."""
        path = self._folder / name
        mine = path.read_bytes() if path.exists() else b""
        theirs = self._read(name)
        if theirs.startswith(mine):
            return len(theirs) > len(mine) or not path.exists()
        if mine.startswith(theirs):
            return False
        raise SweepFolderError(
            f"{self._folder} and {self.location} hold different records in {name}; name another --output, or another --storage"
        )

    def _read(self, name: str) -> bytes:
        with self._filesystem.open_input_stream(f"{self._root}/{name}") as file:
            return bytes(file.read())

    def _fetch(self, name: str) -> None:
        content, path = self._read(name), self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)

    def _unusable(self, error: BaseException) -> StorageError:
        return StorageError(f"the storage at {self.location} cannot be used: {filesystem.brief(error)}")


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _content(path: Path) -> bytes:
    """Returns a file's content; of a log of records, only whole lines."""
    with path.open("rb") as file:
        if path.name in LOGS_OF_RECORDS:
            fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()


def _is_copied(name: str) -> bool:
    """Tells whether a file belongs to the sweep's results, unlike temporary files and Ray Train's state."""
    parts = PurePosixPath(name).parts
    return not any(part.startswith(".") for part in parts) and parts[0] != "parts"


def _is_inside(name: str) -> bool:
    """Tells whether a name from a listing stays in the folder that it is joined to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
