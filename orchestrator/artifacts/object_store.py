"""The durable tier: a shelf in a folder, or any file system or object store that pyarrow or fsspec has a URI for.

blobs/<first two digits>/<digest>          contents
manifests/<name>.json
hits/<manifest's name>/<count>-<random>    empty files: the listing says everything
"""

import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from pyarrow.fs import FileInfo, FileSystem, LocalFileSystem

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts.manifest import DIGEST
from orchestrator.artifacts.shelf import BlobInfo, Blobs, Use
from orchestrator.storage import filesystem

AT_ONCE = 8  # number of concurrent requests: an object store answers each in tens of milliseconds, whatever its size
TIMEOUT_S = 60.0  # seconds for all contents of one call: compiling again costs about as much
DEAD = timedelta(hours=1)  # age after which an unfinished part is abandoned

MAX_MANIFEST_BYTES = 64 * 2**20

Result = TypeVar("Result")


normalized = partial(filesystem.normalized, what="artifacts", refused=CacheError)
"""Returns a cache's location in a form that means the same in any folder."""


def refuse_no_folder(location: str) -> None:
    """Raises CacheError if a local path is not a folder and cannot become one."""
    try:
        filesystem.opened(location)
    except Exception as error:  # each library raises its own errors
        raise _unusable(location, error) from None


class DurableShelf:
    """A `Shelf` at a URI, opened at first use; `timeout_s` limits all contents of one call."""

    def __init__(self, location: str, timeout_s: float = TIMEOUT_S) -> None:
        self._uri = normalized(location)
        self._timeout_s = timeout_s
        self._manifests: dict[str, bytes] = {}  # cache: a manifest never changes, since its name is a digest

    @property
    def location(self) -> str:
        return filesystem.without_credentials(self._uri)

    def present(self, sizes: Mapping[str, int]) -> set[str]:
        # One by one: given a list, pyarrow queries an object store sequentially.
        infos = self._each(lambda digest: self._filesystem.get_file_info(self._path(_blob(digest))), list(sizes))
        return {digest for digest, info in infos.items() if info.is_file and info.size == sizes[digest]}

    def put_blobs(self, blobs: Mapping[str, bytes]) -> None:
        self._each(lambda digest: self._write(_blob(digest), blobs[digest]), list(blobs))

    def get_blobs(self, sizes: Mapping[str, int]) -> Blobs:
        blobs = Blobs()
        with self._reached():
            reads = self._at_once(lambda digest: self._read(_blob(digest), sizes[digest] + 1), list(sizes), must_end=False)
        for digest, future in reads.items():
            if future.cancelled() or not future.done():
                blobs.failed[digest] = f"was not read within {self._timeout_s:.0f} s"
                continue
            error = future.exception()
            if error is None:
                blobs.found[digest] = future.result()
            elif isinstance(error, FileNotFoundError):
                blobs.failed[digest] = "is not in the store any more"
            else:
                blobs.failed[digest] = f"cannot be read ({filesystem.brief(error)})"
        return blobs

    def drop_blobs(self, digests: Iterable[str]) -> None:
        dead = [info.path.rpartition("/")[2] for info in self._files("parts") if datetime.now(UTC) - _modified_at(info) > DEAD]
        # Other processes that clean up here find these, too.
        self._drop([*map(_blob, digests), *(f"parts/{name}" for name in dead)])

    def blobs(self) -> dict[str, BlobInfo]:
        return {
            info.base_name: BlobInfo(size_bytes=info.size, modified_at=_modified_at(info))
            for info in self._files("blobs")
            if DIGEST.fullmatch(info.base_name)
        }

    def put_manifest(self, name: str, text: bytes) -> None:
        with self._reached():
            self._write(_manifest(name), text)

    def manifests(self) -> dict[str, bytes]:
        listed = {info.base_name.removesuffix(".json") for info in self._files("manifests") if info.extension == "json"}
        known = self._manifests
        found = {name: known[name] for name in listed if name in known}
        with self._reached():
            reads = self._at_once(lambda name: self._read(_manifest(name), MAX_MANIFEST_BYTES), sorted(listed - found.keys()))
            for name, future in reads.items():
                with suppress(FileNotFoundError):  # removed since it was listed
                    found[name] = future.result()
        self._manifests = {name: text for name, text in found.items() if hashlib.sha256(text).hexdigest().startswith(name)}
        return found

    def drop_manifests(self, names: Iterable[str]) -> None:
        dropped = set(names)
        hits = [f"hits/{_folder_of(info)}/{info.base_name}" for info in self._files("hits") if _folder_of(info) in dropped]
        self._drop([*map(_manifest, dropped), *hits])

    def note_hits(self, hits: Mapping[str, int]) -> None:
        self._each(lambda name: self._write(f"hits/{name}/{hits[name]}-{uuid.uuid4().hex}", b""), list(hits))

    def uses(self) -> dict[str, Use]:
        uses: dict[str, Use] = {}
        for info in self._files("hits"):
            count = info.base_name.partition("-")[0]
            if not count.isdecimal():  # unfinished, or not ours
                continue
            before, at = uses.get(_folder_of(info), Use()), _modified_at(info)
            uses[_folder_of(info)] = Use(hits=before.hits + int(count), last_at=max(before.last_at or at, at))
        return uses

    @cached_property
    def _opened(self) -> tuple[FileSystem, str]:
        return filesystem.opened(self._uri)

    @property
    def _filesystem(self) -> FileSystem:
        return self._opened[0]

    def _path(self, name: str) -> str:
        return f"{self._opened[1]}/{name}"

    def _write(self, name: str, content: bytes) -> None:
        filesystem.write_whole(*self._opened, name, content)

    def _read(self, name: str, max_bytes: int) -> bytes:
        path = self._path(name)
        if isinstance(self._filesystem, LocalFileSystem) and os.path.exists(path) and not os.path.isfile(path):
            raise OSError(f"{path} is not a regular file")  # reading a pipe would block
        with self._filesystem.open_input_stream(path) as file:
            return bytes(file.read(max_bytes))

    def _drop(self, names: list[str]) -> None:
        def drop(name: str) -> None:
            with suppress(FileNotFoundError):
                self._filesystem.delete_file(self._path(name))

        self._each(drop, names)

    def _each(self, call: Callable[[str], Result], names: list[str]) -> dict[str, Result]:
        """Calls `call` for each name, several at a time; returns the results."""
        with self._reached():
            return {name: future.result() for name, future in self._at_once(call, names).items()}

    def _files(self, folder: str) -> list[FileInfo]:
        with self._reached():
            return filesystem.files(self._filesystem, self._path(folder))

    def _at_once(self, call: Callable[[str], Result], names: list[str], must_end: bool = True) -> dict[str, Future[Result]]:
        """Calls `call` for each name, several at a time; returns the futures, which have all ended unless time ran out."""
        futures: dict[str, Future[Result]] = {name: Future() for name in names}
        left: SimpleQueue[str] = SimpleQueue()
        for name in futures:
            left.put(name)

        def work() -> None:
            with suppress(Empty):
                while True:
                    future = futures[name := left.get_nowait()]
                    if future.set_running_or_notify_cancel():
                        try:
                            future.set_result(call(name))
                        except Exception as error:
                            future.set_exception(error)

        for _ in range(min(AT_ONCE, len(futures))):  # a pool's threads would keep the process alive until the last request ends
            threading.Thread(target=work, name="cache", daemon=True).start()
        _, late = wait(futures.values(), timeout=self._timeout_s)
        for future in late:
            future.cancel()
        if late and must_end:
            raise TimeoutError(f"{len(late)} of {len(names)} requests did not end within {self._timeout_s:.0f} s")
        return futures

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Converts any error of an object store's library to a `CacheError`."""
        try:
            yield
        except Exception as error:  # each library raises its own errors
            raise _unusable(self.location, error) from None


def _unusable(location: str, error: BaseException) -> CacheError:
    return CacheError(f"the cache at {location} cannot be used: {filesystem.brief(error)}")


def _blob(digest: str) -> str:
    return f"blobs/{digest[:2]}/{digest}"


def _manifest(name: str) -> str:
    return f"manifests/{name}.json"


def _folder_of(info: FileInfo) -> str:
    return str(info.path).split("/")[-2]


def _modified_at(info: FileInfo) -> datetime:
    """Returns when a file was last modified; the far future if the file system does not say, so that nothing counts as old."""
    return info.mtime.astimezone(UTC) if info.mtime else datetime.max.replace(tzinfo=UTC)
