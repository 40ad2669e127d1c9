"""Shared by the fuzz tests: the number of cases, hostile input, and a guard under which nothing may run.

`FUZZ_CASES=20000 pytest tests/fuzz` tests more; without it each test tries 6 cases, which are the same wherever the same modules
of ours are imported, because Hypothesis uses their constants in its cases.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "6"))

thoroughly = settings(
    max_examples=CASES,
    deadline=None,
    derandomize="FUZZ_CASES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

PLANTED = "planted_payload"
"""A name that occurs in hostile text and nowhere else."""

_RUNS = (
    "exec",
    "compile",
    "import",
    "pickle.find_class",
    "marshal.loads",
    "code.__new__",
    "ctypes.dlopen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "urllib.Request",
    "shutil.rmtree",
    "os.remove",
    "os.rename",
    "os.symlink",
    "os.link",
)
"""Audit events that reading untrusted input must not cause."""


class Guard:
    """Records what a thread does while it is active. Audit hooks cannot be removed, so there is one, mostly inactive."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._seen: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._thread != threading.get_ident():
            return
        if event in _RUNS or (event == "open" and arguments[0] != os.devnull and _writes(*arguments[1:])):
            self._seen.append(f"{event} {str(arguments)[:120]}")

    @contextmanager
    def nothing_runs(self, but: tuple[str, ...] = ()) -> Iterator[None]:
        """Fails if anything is imported, run, unpickled, reached over the network or written while the block lasts.

        Args:
            but: Audit events that are harmless in the block.
        """
        self._seen.clear()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
        seen = [event for event in self._seen if not event.startswith(but)] if but else list(self._seen)
        assert not seen, seen


def _writes(mode: object, flags: object) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


nothing_runs = Guard().nothing_runs


def said(error: Exception, about: str = "") -> None:
    """Checks any error message: it is not empty, and names its subject."""
    assert str(error).strip()
    assert about in str(error)


HOSTILE = (
    "",
    " ",
    "\0",
    "\n",
    "\r\n",
    "\x1b[31m",
    "\u2028",
    "\ud800",
    "\ufeff",
    "ß",
    "١٢",
    "../../etc/passwd",
    "/etc/passwd",
    "..",
    ".",
    "~",
    "%00",
    "%2e%2e%2f",
    "%n",
    "{0}",
    "{PLANTED}",
    "${HOME}",
    "$(reboot)",
    "`reboot`",
    "'; --",
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    "\\N{DIGIT ONE}",
    f'__import__("os").system("{PLANTED}")',
    f'"""\n{PLANTED}()\n"""',
    f'")\n{PLANTED}()\n#',
    f'"]: {PLANTED}(), "',
    f'\\"); {PLANTED}() #',
    f"{PLANTED}:{PLANTED}",
    "os:system",
    "!!python/object/apply:os.system [reboot]",
    "<script>alert(1)</script>",
    "=cmd|'/C calc'!A0",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e999",
    "-0",
    "0x10",
    "1_000",
    "9" * 5000,
    "None",
    "null",
    "true",
    "on",
    "off",
    "[]",
    "{}",
    "gASV",
)
"""Strings that break careless code."""

EXTREMES = (10**400, -(10**400), 2**63, 2**64, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, -1, 0)
"""Numbers that break code that expects usual ones."""

TRIED_EXTREMES = EXTREMES if "FUZZ_CASES" in os.environ else (10**400, -1e308, math.nan, 0)
"""Those that are tried one by one for every option and field; `make nightly` tries them all."""

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)
numbers = st.integers() | st.floats() | st.sampled_from([*EXTREMES, True, False])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
"""Everything that JSON can represent, and bare NaN, which Python's parser accepts."""


def spliced(words: list[str], more: st.SearchStrategy[str] = texts) -> st.SearchStrategy[str]:
    """Text of grammar pieces in any order, with other text in between."""
    return st.lists(st.sampled_from(words) | more, max_size=8).map("".join)


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    """JSON nested deeper than a recursive parser can handle."""
    return opening * depth + closing * depth


def flipped(content: bytes) -> st.SearchStrategy[bytes]:
    """Content with some bytes changed, removed or added."""

    def change(edits: list[tuple[int, int, bytes]]) -> bytes:
        found = bytearray(content)
        for at, length, new in edits:
            place = at % (len(found) + 1)
            found[place : place + length] = new
        return bytes(found)

    return st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 40), st.binary(max_size=12)), max_size=6).map(change)
