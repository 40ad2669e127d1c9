"""Append-only logs: one strict JSON object a line, each the fields of one frozen dataclass, and a checksum of them.

A line is written with a single `write` under a lock and fsynced. A writer that is killed within that call, or a power failure,
can leave part of a line: its beginning without a line break, or zeros in its middle if the disk wrote only some of its pages.
JSON text has no zeros, so both can be recognized. Readers leave such an end out; the next `append`, or `recover`, sets it aside.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from compile_sweep.schema import redact
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.setting_text import quote_value

Record = TypeVar("Record")

_INTERVAL = tuple[float, float] | None
_MEMBERS: Mapping[Any, set[type]] = {str: {str}, float: {float, int}, int: {int}}
"""Of lists and objects, the types whose values JSON may hold, by the type of their members."""
_DEEPEST = 16
_CHECKSUM = re.compile(r',"checksum":"([0-9a-f]{8})"\}$')
_TORN = ".torn"
"""Ends the name of the file that keeps what was torn off the end of a log."""

_BLOCK_BYTES = 1 << 20


def written(values: Mapping[str, Any]) -> str:
    """One line of strict JSON: no bare NaN or infinity (they become null), no line break, no secret."""
    return json.dumps(_writable(redact.redact_json(values)), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def sealed(text: str) -> str:
    """The JSON object with one more field, the CRC-32 of its text before."""
    return f'{text[:-1]},"checksum":"{zlib.crc32(text.encode()):08x}"}}'


def unsealed(line: str) -> str:
    """The JSON object as `sealed` was given it. A line without a checksum is returned as it is: an older version wrote it.

    Raises:
        RecordsError: The text is not the one that the checksum was made of.
    """
    if (found := _CHECKSUM.search(line)) is None:
        return line
    text = line[: found.start()] + "}"
    if sealed(text) != line:
        raise RecordsError("its checksum does not match; if the line was edited on purpose, remove the checksum")
    return text


def parsed(line: str, version: int, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line, less its schema version.

    Raises:
        RecordsError: not JSON, not what was written, another schema version, or a field that is none.
    """
    line = unsealed(line)
    try:
        values = json.loads(line, parse_constant=_refuse, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"not a whole JSON object ({error})") from None
    if not isinstance(values, dict):
        raise RecordsError("not a JSON object")
    found = values.pop("schema_version", None)
    if found != version:
        raise RecordsError(f"schema version {found!r}, and this version reads {version}")
    if unknown := sorted(values.keys() - kinds.keys()):
        raise RecordsError(f"unknown field {unknown[0]!r}")
    return values


def checked(values: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values, intervals as tuples.

    Raises:
        TypeError, ValueError: a value is not of its field's kind.
    """
    for name, kind in kinds.items():
        if kind == _INTERVAL and values.get(name) is not None:
            low, high = values[name]
            if not all(_is_of(end, float | None) for end in (low, high)):
                raise TypeError(f"{name} is {quote_value(values[name])}")
            # null: it was not finite, which an upper end is that the steps do not bound
            values[name] = None if low is None else (float(low), math.inf if high is None else float(high))
    for name, value in values.items():
        if not _is_of(value, kinds[name]) or (isinstance(value, dict) and not _is_sound(value, _DEEPEST)):
            raise TypeError(f"{name} is {quote_value(value)}")
    return values


def append(path: Path, text: str, unique: str = "") -> None:
    """Adds a line to the log, durable when this returns; safe from several processes of one host.

    Args:
        path: The log.
        text: A JSON object.
        unique: A part of the text that no line of the log may have yet.

    Raises:
        RecordsError: A line of the log has that part, or the log is not a regular file.
    """
    line = sealed(text).encode() + b"\n"
    is_new = not path.exists()
    descriptor = _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _set_torn_end_aside(path, descriptor)
        if unique and _holds(descriptor, unique.encode()):
            raise RecordsError(f"{path} already has a record with {unique}, so none is added")
        count = os.write(descriptor, line)
        try:
            if count != len(line):
                raise OSError(f"only {count} of {len(line)} bytes of a record fitted on the disk")
            os.fsync(descriptor)  # some file systems notice only here that they are full
        except OSError:  # take it back, so that the log stays whole lines, and one a record if the caller tries again
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
            raise
        if is_new:
            sync_folder(path.parent)
    finally:
        os.close(descriptor)


def recover(path: Path) -> str | None:
    """Sets aside what a killed writer or a power failure left at the end of the log.

    Returns:
        A sentence for the user; None if the log is whole, or there is none.

    Raises:
        RecordsError: The log is not a regular file.
        OSError: It cannot be written.
    """
    if not path.exists():
        return None
    descriptor = _opened(path, os.O_RDWR | os.O_APPEND)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return _set_torn_end_aside(path, descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes durable that files were made in the folder or renamed; not all file systems can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path, parse: Callable[[str], Record], what: str) -> list[Record]:
    """Every record of the log, in order; none if there is no log yet.

    Args:
        path: the log.
        parse: makes a record of a line.
        what: a line is, for the complaint.

    Raises:
        RecordsError: it cannot be read, or a line is not a whole record; says which, and that those before it are intact.
    """
    try:
        if not path.exists():
            return []
        with os.fdopen(_opened(path, os.O_RDONLY), encoding="utf-8", errors="replace", newline="\n") as log:
            fcntl.flock(log, fcntl.LOCK_SH)  # a record is seen whole or not at all
            text = log.read()
    except OSError as error:
        raise RecordsError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    *lines, rest = text.split("\n")  # splitlines would also cut at U+2028
    if _is_whole(rest):
        lines.append(rest)
    elif not rest and lines and "\0" in lines[-1]:
        lines.pop()
    return list(_records(path, lines, parse, what))


class Tail(Generic[Record]):
    """Follows a log, reading each line once, however long the log.

    Args:
        path: the log.
        parse: makes a record of a line.
        what: a line is, for the complaint.
    """

    def __init__(self, path: Path, parse: Callable[[str], Record], what: str) -> None:
        self._path, self._parse, self._what = path, parse, what
        self._offset = 0

    def fresh(self) -> list[Record]:
        """The records that were added since the last call, in order; all of them at the first.

        Raises:
            RecordsError: a new line is not a whole record.
        """
        if not self._path.exists() or self._path.stat().st_size == self._offset:
            return []
        with os.fdopen(_opened(self._path, os.O_RDONLY), "rb") as log:
            fcntl.flock(log, fcntl.LOCK_SH)
            log.seek(self._offset)
            added = log.read()
        added = added[: added.rfind(b"\n") + 1]  # the rest is not a line yet
        self._offset += len(added)
        return list(_records(self._path, added.decode("utf-8", "replace").split("\n")[:-1], self._parse, self._what))


def _opened(path: Path, flags: int) -> int:
    """A descriptor of the log. Does not wait for the other end of a pipe, as `open` would.

    Raises:
        RecordsError: It is a pipe, a device or the like.
        OSError: It cannot be opened, or is a folder.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise RecordsError(f"{path} is not a regular file; name a folder that a sweep wrote")


def _set_torn_end_aside(path: Path, descriptor: int) -> str | None:
    """Makes the log end with a line break; the log is locked. Returns what was done."""
    size = os.fstat(descriptor).st_size
    begin = _begin_of_last_line(descriptor, size)
    rest = os.pread(descriptor, size - begin, begin)
    if not rest or (rest.endswith(b"\n") and b"\0" not in rest):
        return None
    if _is_whole(rest.decode("utf-8", "replace")):  # only its line break is missing
        os.write(descriptor, b"\n")
        os.fsync(descriptor)
        return None
    aside = path.with_name(path.name + _TORN)
    copy = _opened(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(copy, rest.removesuffix(b"\n") + b"\n")
        os.fsync(copy)
    finally:
        os.close(copy)
    os.ftruncate(descriptor, begin)
    os.fsync(descriptor)
    sync_folder(path.parent)
    return f"{path} ended in the middle of a line, which is now in {aside.name}; the lines before it are intact"


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
    """Whether a line without a line break is a JSON object all the same: part of one never is."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _records(path: Path, lines: Sequence[str], parse: Callable[[str], Record], what: str) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield parse(line)
        except RecordsError as error:
            raise RecordsError(
                f"{path} line {number} is not a {what} record: {error}; the {number - 1} before it are intact, "
                f"and its {what} runs again once the line is removed"
            ) from None


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a field's kind, and so are the members of a list or an object that names theirs."""
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
    if isinstance(value, dict):  # figures by name, null where one was not finite
        value = [one for one in value.values() if one is not None]
    # thousands of steps a record: no call of ours for each
    return set(map(type, value)) <= member and (str in member or all(map(math.isfinite, value)))


def _is_sound(value: Any, levels: int) -> bool:
    """Whether nothing is nested deeper than what recurses through it can follow, and no number infinite."""
    if not isinstance(value, dict | list):
        return not isinstance(value, float) or math.isfinite(value)
    return levels > 0 and all(_is_sound(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value))


def _integer(digits: str) -> int:
    """No integer is larger than a column of a table can hold."""
    if len(digits) > 20 or not -(2**63) <= (found := int(digits)) < 2**63:
        raise ValueError(f"an integer of {len(digits)} digits")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"a bare {constant}")


def _writable(value: Any) -> Any:
    if isinstance(value, str):  # what stands for bytes that are not UTF-8 cannot be written
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
