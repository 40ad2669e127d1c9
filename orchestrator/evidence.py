"""What a dead worker left in its trial's log: a fatal signal, its own deadline, a host without memory. Read, never guessed.

Background: Ray says of a worker that is gone only that it is gone. Its log says more: Python's fault handler writes
"Fatal Python error" and the stacks when a signal such as SIGSEGV ends the process, and "Timeout" when its deadline does; the
reaper beside it (`watchdog.py`) notes whether the kernel ended processes for want of memory meanwhile. SIGKILL leaves nothing.
Where a worker's log lay on a host that is gone, there is no evidence, and the clock and Ray's words decide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OOM_NOTE = "the kernel's out-of-memory killer ended"
"""How the reaper's note begins."""

_FATAL = re.compile(r"^Fatal Python error: (.+?)\s*$", re.MULTILINE)
_TIMEOUT = re.compile(r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$", re.MULTILINE)
_MOST_BYTES = 1_000_000
"""Read of the end of a log; stacks of some hundred threads fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the logs of one attempt say."""

    fatal: str | None = None
    """Python's words for the signal, like "Segmentation fault"."""
    timed_out: bool = False
    oom_killed: bool = False


def lengths(folder: Path) -> dict[str, int]:
    """Bytes of each worker's log so far, by file name; what is behind them belongs to the attempt that begins now."""
    return {path.name: path.stat().st_size for path in folder.glob("worker-*.log")} if folder.is_dir() else {}


def gathered(folder: Path, before: Mapping[str, int]) -> Evidence:
    """What the logs say since they had these lengths; nothing where they cannot be read.

    Args:
        folder: the trial's own.
        before: what `lengths` returned when the attempt began.
    """
    text = "".join(_tail(path, before.get(path.name, 0)) for path in sorted(folder.glob("worker-*.log")))
    return read_from(text)


def read_from(text: str) -> Evidence:
    """What the text of a log says."""
    fatal = _FATAL.search(text)
    return Evidence(
        fatal=fatal.group(1) if fatal else None,
        timed_out=_TIMEOUT.search(text) is not None,
        oom_killed=OOM_NOTE in text,
    )


def _tail(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(begin, size - _MOST_BYTES))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""
