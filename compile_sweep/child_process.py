"""What a forked or started process does first: end with its parent, read nothing, and not scan again what it has imported.

Also how its parent ends it.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_DIE_WITH_PARENT = 1  # `PR_SET_PDEATHSIG` of prctl(2)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even if the parent is killed."""
    with suppress(OSError, AttributeError):  # not available on this system
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_session(leader: int) -> None:
    """Kills what is left of the process group of a process that leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def empty_stdin() -> None:
    """Makes standard input empty, for this process and those that it starts."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


@contextmanager
def importing() -> Iterator[None]:
    """Exempts what the block imports, torch for the first time, from collections, which would scan it again and again."""
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_imports() -> None:
    """Exempts what was imported from collections, which would otherwise scan it again and again, and after a fork copy it."""
    gc.collect()
    gc.freeze()


@contextmanager
def only_in_this_process() -> Iterator[None]:
    """Ends, after the block, every process that the user's code forked in it and that came back from there.

    Otherwise two processes would go on with one job: answer, measure, write records.
    """
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(0)
