"""Kills what is left of a local Ray session when its driver is gone, however the driver ended.

Background: if a driver is killed by SIGKILL, the kernel ends the raylet with it, but two of Ray's agents, which the raylet
started, wait for about a minute for a control service to come back. They have overwritten their environment block with a title,
so no marker identifies them; they are found by the Unix session they share with the raylet.

The driver holds one end of a pipe to the reaper, which the kernel closes when the driver is gone. The reaper is started before
Ray and outside its process tree, in a session of its own.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.guard.scratch_folders import remove_abandoned
from orchestrator.guard.watchdog import SESSION_MARKER, find_marked, kill_marked, sessions_led_by, start_apart

SCRATCH_PREFIXES = ("compile-sweep-tune-", "compile-sweep-trial-")
"""Prefixes of the folders for temporary files that a killed driver and its workers leave behind."""

_READY, _DONE = b"ready\n", b"done\n"
_POLL_S = 0.2
_KEEP_KILLING_S = 2.0  # how long to look for more processes after the last one was killed: one may have been starting


class SessionReaper:
    """The driver's end of the pipe."""

    def __init__(self, marker: str, pipe: int) -> None:
        self._marker, self._pipe = marker, pipe
        self._sessions: frozenset[int] = frozenset()

    def session_is_up(self) -> None:
        """Notes which Unix sessions Ray's processes lead; call it when Ray has started."""
        self._sessions = sessions_led_by(find_marked(self._marker, SESSION_MARKER))
        self._send(_READY)

    def end_what_is_left(self, grace_s: float) -> None:
        """Kills what is left of the Ray session after `grace_s` seconds; other processes stay."""
        ends_at = time.monotonic() + grace_s
        while find_marked(self._marker, SESSION_MARKER, self._sessions) and time.monotonic() < ends_at:
            time.sleep(0.1)
        kill_marked(self._marker, SESSION_MARKER, self._sessions)
        self._send(_DONE)

    def _send(self, word: bytes) -> None:
        with suppress(OSError):  # the reaper itself was killed
            os.write(self._pipe, word)


@contextmanager
def session_reaper(marker: str, ray_folder: Path, grace_s: float) -> Iterator[SessionReaper]:
    """Starts the reaper. After the block and `grace_s`, this process kills what is left of the session, and the reaper ends."""
    theirs, mine = os.pipe()
    try:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        start_apart("orchestrator.guard.session_reaper", marker, str(ray_folder), stdin=theirs, cwd="/", **silent)
        reaper = SessionReaper(marker, mine)
        try:
            yield reaper
        finally:
            reaper.end_what_is_left(grace_s)
    finally:
        os.close(theirs)
        os.close(mine)


def _reap(marker: str, ray_folder: Path, pipe: int) -> None:
    """Waits until the driver is done or gone; if it is gone, kills what is left and removes its folders."""
    told = b""
    sessions: frozenset[int] = frozenset()
    while _DONE not in told:
        is_up = _READY in told
        sessions |= sessions_led_by(find_marked(marker, SESSION_MARKER))
        # Until Ray is up, look again and again: its agents may overwrite their environment at any moment.
        if not is_up and not select.select([pipe], [], [], _POLL_S)[0]:
            continue
        if not (words := os.read(pipe, 64)):
            break
        told += words
    else:
        return
    sessions |= sessions_led_by(find_marked(marker, SESSION_MARKER))  # Ray may have started since the last look
    ends_at = time.monotonic() + _KEEP_KILLING_S
    while kill_marked(marker, SESSION_MARKER, sessions) or time.monotonic() < ends_at:
        time.sleep(_POLL_S)
    remove_abandoned(ray_folder.name, ray_folder.parent, older_than_s=0)
    for prefix in SCRATCH_PREFIXES:
        remove_abandoned(prefix, Path(tempfile.gettempdir()), older_than_s=0)


if __name__ == "__main__":
    _reap(sys.argv[1], Path(sys.argv[2]), 0)
