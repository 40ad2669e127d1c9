"""Finds kernels of Inductor that read back what they have just stored, without a barrier in between.

Background: a reduction in a loop may store rows, and read them back in the next loop, where other threads hold other elements of
a row. Without a barrier, threads then read what the last call left in memory (pytorch 190517; 190519 adds the barrier). Whether
they do depends on the sizes of blocks, so such a kernel may also be right.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from compile_sweep.contract.installed_torch import private

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_ACCESS = re.compile(r"tl\.(store|load)\((\w+) \+|tl\.(debug_barrier)\(")


def unsynchronized_kernels(source: str) -> list[str]:
    """Returns the names of such kernels in code that Inductor generated, each once."""
    return list(dict.fromkeys(name for name, body in _KERNEL.findall(source) if _reads_back(body)))


def unsynchronized_kernels_of_this_process() -> list[str]:
    """Returns such kernels of everything that Inductor has generated or restored in this process."""
    modules: Sequence[object] = getattr(private("torch._inductor.codecache", "PyCodeCache"), "modules", ())
    paths = dict.fromkeys(path for module in modules if (path := getattr(module, "__file__", None)))
    sources = (Path(path).read_text(encoding="utf-8") for path in paths if Path(path).exists())
    return list(dict.fromkeys(name for source in sources for name in unsynchronized_kernels(source)))


def _reads_back(body: str) -> bool:
    stored: set[str] = set()
    for access in _ACCESS.finditer(body):
        kind, pointer, barrier = access.groups()
        if barrier:
            stored.clear()
        elif kind == "store":
            stored.add(pointer)
        elif pointer in stored:
            return True
    return False
