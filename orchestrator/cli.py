"""Command lines: options from a dataclass, and every mistake as one sentence with exit code 2."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import tyro

from compile_sweep.schema.errors import CompileSweepError, check_utf8, one_line_message

Options = TypeVar("Options")
Command = TypeVar("Command")


class UsageError(CompileSweepError):
    """Words on the command line that do not fit its options."""


def parse(options: type[Options], prog: str, arguments: Sequence[str]) -> Options:
    """The options that the arguments spell; `--help` prints and exits.

    Raises:
        UsageError: an unknown option or a value of the wrong kind.
        ConfigError: a word that is no text.
    """
    check_utf8(arguments)
    _refuse_no_value(options, arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                options, prog=prog, args=list(arguments), config=(tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues)
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    raise UsageError(_sentence(complaint.getvalue(), prog))


def _refuse_no_value(options: type[Any], words: Sequence[str]) -> None:
    """Refuses an option of several values that is given none, as by a variable that is not set: it would count as not given.

    Raises:
        UsageError: there is one.
    """
    several = {f"--{one.name.replace('_', '-')}" for one in fields(options) if isinstance(one.default, tuple)}
    for word, following in pairwise((*words, "--")):
        if word.replace("_", "-") in several and following.startswith("--"):
            raise UsageError(f"{word} has no value; give one or more, or leave it out")


def chosen(commands: Mapping[str, tuple[type[Any], Command]], prog: str, words: Sequence[str]) -> tuple[Any, Command] | None:
    """The options and the function of the command that the words begin with; None if they ask for help, which is printed.

    Args:
        commands: by name, the class of its options, whose docstring begins with what it does, and its function.
        prog: the program.
        words: of the command line.

    Raises:
        UsageError: no such command, or options that do not fit it.
    """
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(f"usage: {prog} COMMAND …, each with its own --help\n")
        for command, (options, _) in commands.items():
            print(f"  {command:8} {(options.__doc__ or '').splitlines()[0]}")
        return None
    if name not in commands:
        raise UsageError(f"{f'no command {name!r}' if name else 'a command is missing'}; use one of {', '.join(commands)}")
    options, function = commands[name]
    return parse(options, f"{prog} {name}", words[1:]), function


def run(command: Callable[[], int]) -> int:
    """Runs a command; the user's mistakes become one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding cannot show is spelled out
            stream.reconfigure(errors="backslashreplace")
    try:
        with _ending_in_order():
            return command()
    except CompileSweepError as error:
        print(f"error: {one_line_message(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM, which `timeout` sends, raises while the block lasts, so that what a command started ends with it."""
    if threading.current_thread() is not threading.main_thread():  # of others Python takes no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sentence(complaint: str, prog: str) -> str:
    """The heart of the parser's complaint, which has a frame only where stdout's encoding can show one."""
    lines = [line.strip("│ ") for line in complaint.splitlines() if not line.startswith(("╭", "╰"))]
    if not complaint.startswith("╭"):
        lines = lines[2:]  # the title and a rule
    text = " ".join(line if line.strip("─-") else "─" for line in lines if line)
    if unknown := re.match(r"Unrecognized options: (.*?)(?: ─|$)", text):
        word = unknown.group(1).split(",")[0]
        near = re.search(r"Perhaps you meant: (--[\w-]+)", text)
        if near and near.group(1) == word.replace("--", "--no-", 1):
            return f"{word} need not be said; {near.group(1)} turns it off"
        hint = f"did you mean {near.group(1)}?" if near else f"see {prog} --help"
        return f"no option or argument {word!r}; {hint}"
    if value := re.match(r"Error parsing (\S+?):.*? from \[(.*?)\]\.", text):
        return f"{value.group(1)} cannot be {value.group(2)}; see {prog} --help for what it takes"
    return f"{text.split(' ─')[0] or 'these arguments do not fit'}; see {prog} --help"
