"""Bounds the logs of trials: of what a trial prints, the beginning and the end are kept, and how much is left out is said.

Background: a workload that prints 200 MB a trial fills the disk that its records need. While a trial runs, its reaper gives the
blocks in the middle of a large log back to the file system (`fallocate` with a hole), which needs no word from the process that
writes; when the trial has ended, the log is written anew without its middle.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from pathlib import Path

HEAD_BYTES = 2 * 2**20
TAIL_BYTES = 6 * 2**20
"""Bytes that are kept of the beginning and of the end of a log that is longer than both together."""

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_BLOCK_UNIT = 512
"""Bytes in which `st_blocks` counts, whatever the file system's own blocks are."""
_LONG_LINE_BYTES = 2**16


def bound_logs(folder: Path) -> list[str]:
    """Bounds the logs in a folder that nothing writes to any more.

    Returns:
        A sentence for each log of which something was left out.
    """
    sentences = []
    for path in sorted(folder.glob("*.log")) if folder.is_dir() else ():
        with suppress(OSError):
            if left_out := _bound(path):
                sentences.append(f"log {path.name}: {_left_out(left_out)}")
    return sentences


def free_middle(log: int) -> None:
    """Gives the disk back what a log holds between the beginning and the end that are kept; its size stays.

    A file system without holes keeps it until the trial has ended.

    Args:
        log: A descriptor of it, open for writing.
    """
    with suppress(OSError):
        status = os.fstat(log)
        if stat.S_ISREG(status.st_mode) and status.st_blocks * _BLOCK_UNIT > 2 * (HEAD_BYTES + TAIL_BYTES):
            _fallocate(log, _KEEP_SIZE | _PUNCH_HOLE, HEAD_BYTES, status.st_size - HEAD_BYTES - TAIL_BYTES)


def _bound(path: Path) -> int:
    """Writes a log anew without its middle; returns how many bytes that was, 0 if the log is short enough."""
    if path.is_symlink() or not path.is_file() or (size := path.stat().st_size) <= HEAD_BYTES + TAIL_BYTES:
        return 0
    with path.open("rb") as log:
        head = log.read(HEAD_BYTES)
        head = head[: head.rfind(b"\n") + 1] or head
        log.seek(size - TAIL_BYTES)
        tail = log.read()
        tail = tail[tail.find(b"\n", 0, _LONG_LINE_BYTES) + 1 :]  # from the beginning of a line, unless lines are very long
    left_out = size - len(head) - len(tail)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(head + f"\n[{_left_out(left_out)}]\n".encode() + tail)
    part.replace(path)
    return left_out


def _left_out(num_bytes: int) -> str:
    kept = (HEAD_BYTES + TAIL_BYTES) // 2**20
    return f"{num_bytes / 1e6:,.1f} MB of the middle of the log are left out, of which {kept} MiB are kept"


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call(descriptor, mode, offset, length)
