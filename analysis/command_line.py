"""What the commands of this package share: one clear sentence and exit code 2 for whatever they cannot work with.

Files that take their name when they are whole.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from compile_sweep.schema.errors import CompileSweepError, ConfigError, check_utf8, one_line_message

READER_GONE, USAGE_ERROR = 1, 2

_FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a `ConfigError` instead of the usage and an exit."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, of words that are text."""
        words = sys.argv[1:] if args is None else args
        check_utf8(words)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises the parser's complaint."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def run(command: Callable[[], int]) -> int:
    """Runs a command; the user's mistakes become one sentence on stderr and exit code 2.

    Exit code 1 if whoever reads its output stops before its end.
    """
    try:
        code = command()
        sys.stdout.flush()
    except CompileSweepError as error:
        print(f"error: {one_line_message(error)}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `| head` has read enough; Python would try again to write the rest as it ends, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return code


def count(text: str) -> int:
    """A whole number, also as `200k`, `1M` or `2e5`.

    Raises:
        ConfigError: anything else, or less than 0.
    """
    found = re.fullmatch(r"([\d_.,]+(?:e\d{1,2})?)([km]?)", text.strip().lower())
    try:
        value = float(found[1].replace(",", "").replace("_", "")) * _FACTORS[found[2]] if found else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{text!r} is no count; write a whole number, such as 200000, 200k or 1M")
    return int(value)


def amount(text: str) -> float:
    """A number of 0 or more.

    Raises:
        ConfigError: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{text!r} is no amount; write a number of 0 or more")
    return value


_NAME_CHARS = 40
"""Of a file's name in that of its unfinished form: the name may have all the bytes that a name can have."""


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Gives what the block writes its own name once it is whole; readers see the old file or the new one.

    Yields:
        Where to write.

    Raises:
        OSError: it cannot be written there.
    """
    temporary = path.parent / f".{path.name[:_NAME_CHARS]}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # where there is no folder, there is nothing to remove
            temporary.unlink(missing_ok=True)
