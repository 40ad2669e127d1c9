"""Bounds the logs of trials: keeps the beginning and the end of what a trial prints, and says how much was left out.

Background: a workload that prints 200 MB per trial fills the disk that its records need. While a trial runs, its reaper returns
the blocks in the middle of a large log to the file system (`fallocate` punches a hole), which needs no cooperation from the
writing process. When the trial has ended, the log is rewritten without its middle.
"""

import ctypes
import os
import stat
from contextlib import suppress
from pathlib import Path

from compile_sweep.schema.journal import written_whole

HEAD_BYTES = 2 * 2**20
TAIL_BYTES = 6 * 2**20  # bytes kept at the beginning and at the end of a log that is longer than both together

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_BLOCK_UNIT = 512  # unit of `st_blocks` in bytes, whatever the file system's own block size
_LONG_LINE_BYTES = 2**16


def bound_logs(folder: Path) -> list[str]:
    """Bounds the logs in a folder that no process writes to any more; returns a sentence for each that was shortened."""
    sentences = []
    for path in sorted(folder.glob("*.log")) if folder.is_dir() else ():
        with suppress(OSError):
            if left_out := _bound(path):
                sentences.append(f"log {path.name}: {_left_out(left_out)}")
    return sentences


def free_middle(log: int) -> None:
    """Frees the disk blocks between the kept beginning and the kept end of a log; its size stays the same.

    On a file system without holes, the blocks stay until the trial has ended.
    """
    with suppress(OSError):
        status = os.fstat(log)
        if stat.S_ISREG(status.st_mode) and status.st_blocks * _BLOCK_UNIT > 2 * (HEAD_BYTES + TAIL_BYTES):
            _fallocate(log, _KEEP_SIZE | _PUNCH_HOLE, HEAD_BYTES, status.st_size - HEAD_BYTES - TAIL_BYTES)


def _bound(path: Path) -> int:
    """Rewrites a log without its middle; returns how many bytes were removed, 0 if the log is short enough."""
    if path.is_symlink() or not path.is_file() or (size := path.stat().st_size) <= HEAD_BYTES + TAIL_BYTES:
        return 0
    with path.open("rb") as log:
        head = log.read(HEAD_BYTES)
        head = head[: head.rfind(b"\n") + 1] or head
        log.seek(size - TAIL_BYTES)
        tail = log.read()
        tail = tail[tail.find(b"\n", 0, _LONG_LINE_BYTES) + 1 :]  # from the beginning of a line, unless lines are very long
    left_out = size - len(head) - len(tail)
    with written_whole(path) as part:
        part.write_bytes(head + f"\n[{_left_out(left_out)}]\n".encode() + tail)
    return left_out


def _left_out(num_bytes: int) -> str:
    kept = (HEAD_BYTES + TAIL_BYTES) // 2**20
    return f"{num_bytes / 1e6:,.1f} MB of the middle of the log are left out, of which {kept} MiB are kept"


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    call(descriptor, mode, offset, length)
