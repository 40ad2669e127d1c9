"""Append-only logs: one strict JSON object per line, with the fields of one frozen dataclass and their checksum.

A line is written with a single `write` under a lock and fsynced. If the writer is killed within that call, or the power fails,
part of a line can remain: its beginning without a line break, or zeros in its middle if the disk wrote only some of its pages.
JSON text has no zeros, so both can be recognized. Readers skip such an end; the next `append`, or `recover`, moves it to a file
of its own.
"""

import errno
import fcntl
import json
import math
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Generic, TypeVar, get_args, get_origin

from compile_sweep.schema import redact
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.setting_text import quote_value

Record = TypeVar("Record")

_INTERVAL = tuple[float, float] | None
_MEMBERS: Mapping[Any, set[type]] = {str: {str}, float: {float, int}, int: {int}}
"""Types that JSON lists and objects may hold, by the type of their members."""
_DEEPEST = 16
_CHECKSUM = re.compile(r',"checksum":"([0-9a-f]{8})"\}$')
_OTHER_CHECKSUM = "its checksum does not match; if the line was edited on purpose, remove the checksum"
_TORN = ".torn"  # suffix of the file that keeps what was torn off the end of a log

_SHOWN = 40  # characters of a line that is not a record

_BLOCK_BYTES = 1 << 20

MOST_BYTES = 1 << 28  # largest file that `read_regular` reads by default; no description, script or page is that large

_MOST_LOG_BYTES = 1 << 31
"""Largest log that is read, of tens of thousands of records. A file with holes may claim any size."""

NOT_REGULAR = "it is not a regular file"
"""`strerror` of the error that `open_regular` raises for a pipe, a device or a socket."""


def written(values: Mapping[str, Any], as_is: Collection[str] = ()) -> str:
    """Returns one line of strict JSON: NaN and infinity become null, no line break, no secret but in the fields `as_is`."""
    clear = redact.redact_json({name: value for name, value in values.items() if name not in as_is})
    ordered = {name: values[name] if name in as_is else clear[name] for name in values}
    return json.dumps(_writable(ordered), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def sealed(text: str) -> str:
    """Adds a field to the JSON object: the CRC-32 of the text before it."""
    return f'{text[:-1]},"checksum":"{zlib.crc32(text.encode()):08x}"}}'


def unsealed(line: str) -> str:
    """Returns the JSON object that `sealed` was given; RecordsError if its checksum differs. Older lines have no checksum."""
    line = line.removeprefix("\ufeff").removesuffix("\r")  # of a copy with Windows' mark or line ends
    if (found := _CHECKSUM.search(line)) is None:
        return line
    text = line[: found.start()] + "}"
    if sealed(text) != line:
        raise RecordsError(_OTHER_CHECKSUM)
    return text


def parsed(line: str, version: int, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a line and returns its fields, without the schema version; raises RecordsError for a damaged or invalid one."""
    line = unsealed(line)
    try:
        values = json.loads(line, parse_constant=_refuse, parse_int=_integer, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        begin = f"; it begins {quote_value(line[:_SHOWN])}" if line else ""
        raise RecordsError(f"not a whole JSON object ({error}){begin}") from None
    if not isinstance(values, dict):
        raise RecordsError("not a JSON object")
    if "checksum" in values:  # the line was written again by another program
        raise RecordsError(_OTHER_CHECKSUM)
    found = values.pop("schema_version", None)
    if found != version:
        other = f"schema version {quote_value(found)}, and this version reads {version}"
        raise _OtherVersionError(other) if isinstance(found, int) else RecordsError(other)
    if unknown := sorted(values.keys() - kinds.keys()):
        raise RecordsError(f"unknown field {unknown[0]!r}")
    return values


def checked(values: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Validates the values and returns them, with intervals as tuples; raises TypeError or ValueError."""
    for name, kind in kinds.items():
        if kind == _INTERVAL and values.get(name) is not None:
            low, high = values[name]
            if not all(_is_of(end, float | None) for end in (low, high)):
                raise TypeError(f"{name} is {quote_value(values[name])}")
            # null: the value was not finite, such as the upper end of an interval that the steps do not bound
            values[name] = None if low is None else (float(low), math.inf if high is None else float(high))
    for name, value in values.items():
        if not _is_of(value, kinds[name]) or (isinstance(value, dict) and not _is_sound(value, _DEEPEST)):
            raise TypeError(f"{name} is {quote_value(value)}")
    return values


def append(path: Path, text: str, unique: str = "") -> None:
    """Appends a line to the log, durably and safely from several processes; raises RecordsError if one holds `unique`."""
    line = sealed(text).encode() + b"\n"
    is_new = not path.exists()
    with _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, lock=fcntl.LOCK_EX) as descriptor:
        _set_torn_end_aside(path, descriptor)
        if unique and _holds(descriptor, unique.encode()):
            raise RecordsError(f"{path} already has a record with {unique}, so none is added")
        count = os.write(descriptor, line)
        try:
            if count != len(line):
                raise OSError(errno.ENOSPC, f"only {count} of {len(line)} bytes of a record fitted on the disk")
            os.fsync(descriptor)  # some file systems report a full disk only here
        except OSError:  # undo the write, so that the log holds whole lines, and no duplicates if the caller tries again
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
            raise
        if is_new:
            sync_folder(path.parent)


def recover(path: Path) -> str | None:
    """Moves a torn last line out of the log; returns a sentence, or None if nothing was torn."""
    if not path.exists():
        return None
    with _opened(path, os.O_RDWR | os.O_APPEND, lock=fcntl.LOCK_EX) as descriptor:
        return _set_torn_end_aside(path, descriptor)


def sync_folder(folder: Path) -> None:
    """Makes files' creation or renaming in the folder durable, where the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, parse: Callable[[str], Record], what: str) -> list[Record]:
    """Reads every record of the log, in order; empty if there is no log yet. A RecordsError names the line that is not whole."""
    *lines, rest = _content(path).decode("utf-8", "replace").split("\n")  # splitlines would also cut at U+2028
    if _is_whole(rest):
        lines.append(rest)
    elif not rest and lines and "\0" in lines[-1]:
        lines.pop()
    return list(_records(path, lines, parse, what))


def _content(path: Path, offset: int = 0) -> bytes:
    """Returns what a log holds from this byte on; nothing if there is no log yet."""
    try:
        if not path.exists() and not path.is_symlink():  # a link to nothing is refused: its records are elsewhere
            return b""
        if offset and path.stat().st_size == offset:
            return b""
        with _opened(path, lock=fcntl.LOCK_SH) as descriptor:  # readers see all of a record or nothing
            _check_format(path, descriptor)
            os.lseek(descriptor, offset, os.SEEK_SET)
            with os.fdopen(descriptor, "rb", closefd=False) as log:
                return _whole(log, path, _MOST_LOG_BYTES)
    except OSError as error:
        raise RecordsError(f"{path} cannot be read ({error.strerror}); name a folder whose records can be") from None


class Tail(Generic[Record]):
    """Follows a log; reads each line only once, however long the log."""

    def __init__(self, path: Path, parse: Callable[[str], Record], what: str) -> None:
        self._path, self._parse, self._what = path, parse, what
        self._offset = 0

    def fresh(self) -> list[Record]:
        """Returns the records added since the last call, in order.

        Raises:
            RecordsError: A line is not a whole record, or the log cannot be read any more.
        """
        added = _content(self._path, self._offset)
        added = added[: added.rfind(b"\n") + 1]  # the rest is an unfinished line
        self._offset += len(added)
        return list(_records(self._path, added.decode("utf-8", "replace").split("\n")[:-1], self._parse, self._what))


_NAME_CHARS = 40
"""Number of characters of a file's name in its temporary name: the file's name may already have the maximum length."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives the block a temporary path, and renames it once all is written: readers see the old file or the new one."""
    temporary = path.parent / f".{path.name[:_NAME_CHARS]}.{uuid.uuid4().hex}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # if there is no folder, there is nothing to remove
            temporary.unlink(missing_ok=True)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Returns a regular file's descriptor, else raises OSError: opening a pipe would block, and a device may have no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def read_regular(path: Path, max_bytes: int = MOST_BYTES) -> bytes:
    """Reads a file as `open_regular` opens it; raises OSError, also for more than `max_bytes` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        return _whole(file, path, max_bytes)


def _whole(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    if (size := os.fstat(file.fileno()).st_size) > max_bytes:
        raise OSError(
            errno.EFBIG, f"it has {size / 1e6:,.0f} MB, more than the {max_bytes / 1e6:,.0f} MB that it may have", str(path)
        )
    return file.read()


@contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY, *, lock: int | None = None) -> Iterator[int]:
    try:
        descriptor = open_regular(path, flags)
    except OSError as error:
        if error.strerror == NOT_REGULAR:
            raise RecordsError(f"{path} is not a regular file; name a folder that a sweep wrote") from None
        raise
    try:
        if lock is not None:
            fcntl.flock(descriptor, lock)
        yield descriptor
    finally:
        os.close(descriptor)


def _set_torn_end_aside(path: Path, descriptor: int) -> str | None:
    """Makes the log end with a line break; returns what was done. The caller holds the lock."""
    _check_format(path, descriptor)
    size = os.fstat(descriptor).st_size
    begin = _begin_of_last_line(descriptor, size)
    rest = os.pread(descriptor, size - begin, begin)
    if not rest or (rest.endswith(b"\n") and b"\0" not in rest):
        return None
    if _is_whole(rest.decode("utf-8", "replace")):  # the line lacks only its line break
        os.write(descriptor, b"\n")
        os.fsync(descriptor)
        return None
    aside = path.with_name(path.name + _TORN)
    with _opened(aside, os.O_RDWR | os.O_APPEND | os.O_CREAT) as copy:
        os.write(copy, rest.removesuffix(b"\n") + b"\n")
        os.fsync(copy)
    os.ftruncate(descriptor, begin)
    os.fsync(descriptor)
    sync_folder(path.parent)
    return f"{path} ended in the middle of a line, which is now in {aside.name}; the lines before it are intact"


_FORMATS = (
    (rb"version https://git-lfs", "a pointer of Git LFS, not the records; fetch them with git lfs pull"),
    (rb"\x1f\x8b", "compressed by gzip; unpack it with gunzip"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it with unzstd"),
    (rb"PK\x03\x04", "a zip archive; unpack it"),
    (rb"\xff\xfe|\xfe\xff|\{\0|\0\{", "text in UTF-16; write it as UTF-8, as iconv -f UTF-16 -t UTF-8 does"),
    (rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]", "one JSON array; write one record a line, as jq -c '.[]' does"),
    (rb"(\xef\xbb\xbf)?\{[ \r]*\n", "JSON with records of several lines; write one record a line, as jq -c . does"),
)
"""How files begin that hold no log, with what they are and what to do."""


def _check_format(path: Path, descriptor: int) -> None:
    """Refuses a file in a format of its own, which is no damaged log."""
    begin = os.pread(descriptor, _SHOWN, 0)
    if what := next((what for pattern, what in _FORMATS if re.match(pattern, begin)), None):
        raise RecordsError(f"{path} is {what}")


def _begin_of_last_line(descriptor: int, size: int) -> int:
    end = size - 1  # the line break at its end is its own
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        if (found := os.pread(descriptor, end - begin, begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def _holds(descriptor: int, part: bytes) -> bool:
    offset, before = 0, b""
    while block := os.pread(descriptor, _BLOCK_BYTES, offset):
        if part in before + block:
            return True
        offset, before = offset + len(block), block[1 - len(part) :]
    return False


def _is_whole(line: str) -> bool:
    """Tells whether a line is a JSON object although it lacks its line break; a part of one never is."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class _OtherVersionError(RecordsError):
    """A record that another version of this project wrote."""


def _records(path: Path, lines: Sequence[str], parse: Callable[[str], Record], what: str) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield parse(line)
        except RecordsError as error:
            before = "the line before it is" if number == 2 else f"the {number - 1} lines before it are"
            intact = f"{before} intact, and " if number > 1 else ""
            remedy = f"its {what} runs again once the line is removed"
            if isinstance(error, _OtherVersionError):
                remedy = "the version of compile-sweep that wrote it can read it; to measure with this one, name a new folder"
            raise RecordsError(f"{path} line {number} is not a {what} record: {error}; {intact}{remedy}") from None


def _is_of(value: Any, kind: Any) -> bool:
    """Tells whether a JSON value has a field's type, including the members of a list or an object."""
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if kind is float:  # 1e999 is an infinity that JSON's grammar allows
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, get_origin(kind) or kind):
        return False
    member = _MEMBERS.get(get_args(kind)[-1] if get_args(kind) else None)
    if member is None or isinstance(value, tuple):
        return True
    if isinstance(value, dict):  # figures by name; null if not finite
        value = [one for one in value.values() if one is not None]
    # a record can have thousands of steps, so avoid a Python call for each
    return set(map(type, value)) <= member and (str in member or all(map(math.isfinite, value)))


def _is_sound(value: Any, levels: int) -> bool:
    """Tells whether a value is nested no deeper than recursion allows and contains no infinite number."""
    if not isinstance(value, dict | list):
        return not isinstance(value, float) or math.isfinite(value)
    return levels > 0 and all(_is_sound(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value))


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (found := int(digits)) < 2**63:
        raise ValueError(f"an integer of {len(digits)} digits")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"a bare {constant}")


def _writable(value: Any) -> Any:
    if isinstance(value, str):  # surrogates, which stand for bytes that are not UTF-8, cannot be written
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
