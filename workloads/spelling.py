"""How values of settings are read and written: what a person types, what a key holds, what JSON holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote

from workloads.errors import SettingsError

Scalar = str | int | float | bool


def choice(name: str, kind: type[StrEnum], value: object) -> Any:
    """The member of `kind` that `value` names.

    Raises:
        SettingsError: there is none.
    """
    try:
        return kind(str(value))
    except ValueError:
        options = [str(member) for member in kind]
        raise SettingsError(f"{name}={value} is none of {', '.join(options)}; {nearest(str(value), options)}") from None


def switch(name: str, value: object) -> bool:
    """True for on, False for off.

    Raises:
        SettingsError: neither.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("on", "off", "true", "false"):
        return value in ("on", "true")
    raise SettingsError(f"{name}={value} is neither on nor off")


def positive(name: str, value: object, unit: str) -> int:
    """A whole number of 1 or more, also from text.

    Raises:
        SettingsError: anything else; the message says what is counted in `unit`.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value} is no number of {unit}; use a whole number of 1 or more")
    return value


def lengths(name: str, value: object) -> tuple[int, ...]:
    """Ascending lengths in tokens, from a list or from text such as 32/64/256.

    Raises:
        SettingsError: not lengths, or not ascending.
    """
    if isinstance(value, str):
        value = value.split("/")
    if not isinstance(value, Iterable) or not (found := tuple(positive(name, one, "tokens") for one in value)):
        raise SettingsError(f"{name}={value} are no lengths; write them like 32/64/256")
    if list(found) != sorted(set(found)):
        raise SettingsError(f"{name}={spelled(found)} must ascend; write each length once, the shortest first")
    return found


def option_value(value: object) -> Scalar:
    """A compiler option's value: on and off are switches, digits are numbers, the rest is text."""
    if not isinstance(value, str):
        if isinstance(value, bool | int | float):
            return value
        raise SettingsError(f"{value!r} is no value of an option; use on, off, a number or text")
    if value in ("on", "off", "true", "false", "True", "False"):
        return value in ("on", "true", "True")
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value


def spelled(value: object) -> str:
    """The value as a key writes it; `parse` reads it back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    return quote(str(value), safe="/-_.:+ ")


def flattened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those of a mapping inside a mapping under dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", item) for inner, item in flattened(value))
        else:
            yield name, value


def read_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Each `field=value` of a list separated by commas, a field at most once.

    Raises:
        SettingsError: a part is no `field=value`, or a field is given twice.
    """
    seen = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(f"{part!r} is no setting; write field=value, for example scope=full")
        if name in seen:
            raise SettingsError(f"the setting {name!r} is given twice; give it once")
        seen.add(name)
        yield name, unquote(value.strip())


def nearest(word: str, options: Iterable[str]) -> str:
    """A hint at what was probably meant."""
    options = list(options)
    close = get_close_matches(word, options, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(options)}"
