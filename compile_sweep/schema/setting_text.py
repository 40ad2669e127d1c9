"""How values of settings are read and written: what a person types, what a key holds, what JSON holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from compile_sweep.schema.errors import SettingsError

Scalar = str | int | float | bool

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST = 2**63
_SHOWN = 80


def parse_choice(name: str, kind: type[StrEnum], value: object) -> Any:
    """The member of `kind` that `value` names.

    Raises:
        SettingsError: there is none.
    """
    try:
        return kind(str(value))
    except ValueError:
        options = [str(member) for member in kind]
        raise SettingsError(f"{name}={truncate(value)} is none of {', '.join(options)}; {suggest(str(value), options)}") from None


def parse_switch(name: str, value: object) -> bool:
    """True for on, False for off.

    Raises:
        SettingsError: neither.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("on", "off", "true", "false"):
        return value in ("on", "true")
    raise SettingsError(f"{name}={truncate(value)} is neither on nor off")


def parse_count(name: str, value: object, unit: str) -> int:
    """A whole number of 1 or more, also from text.

    Raises:
        SettingsError: anything else; the message says what is counted in `unit`.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={truncate(value)} is no number of {unit}; use a whole number of 1 or more")
    return value


def parse_lengths(name: str, value: object) -> tuple[int, ...]:
    """Ascending lengths in tokens, from a list or from text such as 32/64/256.

    Raises:
        SettingsError: not lengths, or not ascending.
    """
    if isinstance(value, str):
        value = value.split("/")
    if not isinstance(value, Iterable) or not (found := tuple(parse_count(name, one, "tokens") for one in value)):
        raise SettingsError(f"{name}={truncate(value)} are no lengths; write them like 32/64/256")
    if list(found) != sorted(set(found)):
        raise SettingsError(f"{name}={truncate(format_value(found))} must ascend; write each length once, the shortest first")
    return found


def parse_option(value: object) -> Scalar:
    """A compiler option's value: on and off are switches, digits are numbers, the rest is text.

    Raises:
        SettingsError: none of these, or a number that is not finite or beyond 64 bits.
    """
    if isinstance(value, str):
        value = _read(value.strip())
    if isinstance(value, bool) or (isinstance(value, str) and value.isprintable()):
        return value
    if isinstance(value, int | float) and -_MOST <= value < _MOST:  # not of NaN, which equals nothing
        return value
    raise SettingsError(f"{quote_value(value)} is no value of an option; use on, off, a number or text of one line")


def parse_options(field: str, values: object) -> tuple[tuple[str, Scalar], ...] | None:
    """Options by name, sorted, from a mapping or pairs; None if there are none.

    Raises:
        SettingsError: no mapping, or a name or a value that no option has.
    """
    found = {str(name): parse_option(value) for name, value in as_mapping(field, values).items()}
    for name in found:
        check_name(field, name)
    return tuple(sorted(found.items())) or None


def as_mapping(field: str, values: object) -> dict[Any, Any]:
    """A mapping as JSON or a person's pairs hold it.

    Raises:
        SettingsError: it is none.
    """
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in values):
        return dict(values)
    raise SettingsError(f"{field}={truncate(values)} names nothing; write {field}.NAME=value")


def check_name(field: str, name: object) -> None:
    """Refuses what cannot be the name of an option, a part or a back-end: names stand in keys, and in source between quotes.

    Raises:
        SettingsError: it cannot.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SettingsError(f"{quote_value(name)} is no name that {field} takes; names are letters, digits, _, - and dots")


def group_by_field(values: Mapping[str, Any], fields: Sequence[str], dotted: Mapping[str, str]) -> dict[str, Any]:
    """Values by field; those under dotted names, such as `parts.encoder.mode`, in a mapping under the field they belong to.

    Args:
        values: by name.
        fields: that there are.
        dotted: how dotted names begin, and the field that takes what follows.

    Raises:
        SettingsError: a name that is none.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        first, dot, inner = str(name).partition(".")
        field = dotted.get(first, "") if dot else first
        if field not in fields:
            raise SettingsError(f"no setting is called {quote_value(name)}; {suggest(str(name), fields)}")
        taken[field] = {**as_mapping(field, taken.get(field) or {}), inner: value} if dot else value
    return taken


def truncate(value: object) -> str:
    """What was given, for a sentence: no longer than half a line, whatever it was."""
    words = str(value)
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


def quote_value(value: object) -> str:
    """The same as Python writes it: of text it shows where it begins and ends, and what cannot be seen."""
    return truncate(repr(value))


def _read(text: str) -> str | int | float | bool:
    if text in ("on", "off", "true", "false", "True", "False"):
        return text in ("on", "true", "True")
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def format_value(value: object) -> str:
    """The value as a key writes it; `parse` reads it back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    return quote(str(value), safe="/-_.:+ ")


def flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of a mapping inside a mapping under dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", item) for inner, item in flatten(value))
        else:
            yield name, value


def parse_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Each `field=value` of a list separated by commas, a field at most once.

    Raises:
        SettingsError: a part is no `field=value`, or a field is given twice.
    """
    seen = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(f"{quote_value(part)} is no setting; write field=value, for example scope=full")
        if name in seen:
            raise SettingsError(f"the setting {quote_value(name)} is given twice; give it once")
        seen.add(name)
        yield name, unquote(value.strip())


def suggest(word: str, options: Iterable[str]) -> str:
    """A hint at what was probably meant."""
    options = list(options)
    close = get_close_matches(word[:_SHOWN], options, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(options)}"
