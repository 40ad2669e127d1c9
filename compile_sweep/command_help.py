"""Prints a command's help from the dataclass of its options: the common ones or, with `--help-all`, all of them, in groups."""

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from compile_sweep.schema.figure import field_docs

WORDS = ("-h", "--help", "--help-all")  # words that ask for help

_WIDEST = 100
_FLAG_COLUMNS = 28

_METAVARS: Mapping[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Entry(NamedTuple):
    """An option or argument."""

    flag: str
    """The flag, such as `--max-concurrent`; for an argument its name."""
    usage: str
    """The flag with its values."""
    meaning: str
    is_positional: bool


def help_text(options: type[Any], prog: str, *, all_options: bool) -> str:
    """Returns the help of a command.

    A dataclass with many options groups them in `HELP_GROUPS`, a mapping from titles to flags, with the common ones first.
    Options that it does not name come last.
    """
    entries = list(_entries(options))
    positional = [entry for entry in entries if entry.is_positional]
    usage = " ".join(["usage:", prog, "[OPTIONS]", *(entry.usage for entry in positional)])
    paragraphs = inspect.cleandoc(options.__doc__ or "").split("\n\n")
    blocks = [usage, *(textwrap.fill(one, _width(), break_on_hyphens=False) for one in paragraphs), _block("", positional)]
    groups = _groups(entries, getattr(options, "HELP_GROUPS", {}))
    shown = groups if all_options else groups[:1]
    blocks += [_block(title, members) for title, members in shown]
    left = sum(len(members) for _, members in groups[len(shown) :])
    blocks.append(f"{left} more options: {prog} --help-all" if left else "")
    return "\n\n".join(filter(None, blocks)) + "\n"


def commands_text(prog: str, commands: Mapping[str, str], *, also: str = "") -> str:
    """Returns the help of a command that has commands: each with what it does."""
    entries = [Entry(name, name, meaning, is_positional=True) for name, meaning in commands.items()]
    return f"usage: {prog} COMMAND …, each with its own --help{also}\n\n{_block('', entries, max(map(len, commands)) + 4)}\n"


def _groups(entries: Sequence[Entry], named: Mapping[str, Sequence[str]]) -> list[tuple[str, list[Entry]]]:
    left = {entry.flag: entry for entry in entries if not entry.is_positional}
    groups = [(title, [left.pop(flag) for flag in flags]) for title, flags in named.items()]
    others = [*left.values(), *([] if named else [Entry("--help", "-h, --help", "Show this help.", False)])]
    return [*groups, *([("options", others)] if others else [])]


def _block(title: str, entries: Sequence[Entry], indent: int = _FLAG_COLUMNS) -> str:
    width = _width()
    lines = [f"{title}:"] if title and entries else []
    for entry in entries:
        meaning = textwrap.wrap(entry.meaning, max(20, width - indent), break_long_words=False, break_on_hyphens=False)
        usage = f"  {entry.flag if entry.is_positional else entry.usage}"
        if len(usage) >= indent - 1:
            lines.append(usage)
        else:
            meaning, first = meaning[1:], meaning[:1]
            lines.append(f"{usage:{indent}}{''.join(first)}".rstrip())
        lines += [" " * indent + line for line in meaning]
    return "\n".join(lines)


def _width() -> int:
    return max(40, min(_WIDEST, shutil.get_terminal_size().columns))


def _entries(options: type[Any]) -> Iterator[Entry]:
    hints, meanings = get_type_hints(options, include_extras=True), field_docs(options)
    for field in fields(options):
        hint = hints[field.name]
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else [hint]
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _entries(kind)
        elif tyro.conf.Suppress not in marks:
            yield _entry(field, kind, marks, meanings.get(field.name, ""))


def _entry(field: Field[Any], kind: Any, marks: Sequence[Any], meaning: str) -> Entry:
    called = next(filter(None, (getattr(mark, "name", None) for mark in marks)), field.name)
    metavar = next(filter(None, (getattr(mark, "metavar", None) for mark in marks)), None) or _metavar(kind)
    if tyro.conf.Positional in marks:
        is_optional = field.default is not MISSING
        return Entry(metavar, f"[{metavar}]" if is_optional else metavar, meaning, is_positional=True)
    flag = f"--{called.replace('_', '-')}"
    if kind is not bool:
        return Entry(flag, f"{flag} {metavar}", meaning + _default(field, meaning), is_positional=False)
    if tyro.conf.FlagCreatePairsOff in marks:
        return Entry(flag, flag, meaning, is_positional=False)
    usual = " This is the default." if field.default else ""
    return Entry(flag, f"{flag}, --no-{flag[2:]}", meaning + usual, is_positional=False)


def _metavar(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return _metavar(next(one for one in get_args(kind) if one is not type(None)))
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])} …"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{{{','.join(str(one.value) for one in kind)}}}"
    return _METAVARS.get(kind, "TEXT")


def _default(field: Field[Any], meaning: str) -> str:
    """Describes the default, unless the meaning says it."""
    value = field.default
    if value in (MISSING, None, (), "") or "default" in meaning or isinstance(value, tuple):
        return ""
    return f" (default: {f'{value:g}' if isinstance(value, float) else value})"
