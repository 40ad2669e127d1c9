"""How setting values are parsed and written: what a person types, what keys and JSON hold, and the parts of a source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from compile_sweep.schema.choices import Dynamic, OptimizerKind, Padding, Scope
from compile_sweep.schema.errors import SettingsError

if TYPE_CHECKING:
    from compile_sweep.schema.settings import CompileSettings

DEFAULT_PAD_MULTIPLE = 8  # lengths are rounded up to multiples of this many tokens with padding=longest

Scalar = str | int | float | bool
Value = Scalar | tuple[int, ...]
"""Value of a torch option. A tuple is a list of two or more integers, which some options take."""

Parse = Callable[..., Any]
"""Given a field's name and what a person or JSON wrote, returns the field's value; raises SettingsError."""

Values = type[StrEnum] | str | Parse
"""What a field accepts: the members of an enumeration; a count of this unit; or what a function makes of it."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_INT64_LIMIT = 2**63
BATCH_SIZE = "workload.batch_size"
"""Full name of the short form `batch_size`: samples per step and worker, an option of a workload."""

_MAX_SHOWN = 80  # maximum number of characters of a bad value that an error message repeats


def with_batch_size(arguments: Sequence[str], option: str, size: int) -> tuple[str, ...]:
    """Returns a script's arguments with this batch size, in the option's own word if that ends with `=`."""
    name = option.removesuffix("=")
    kept: list[str] = []
    skips = False
    for word in arguments:
        if not skips and word != name and not word.startswith(f"{name}="):
            kept.append(word)
        skips = not skips and word == name
    return (*kept, *([f"{name}={size}"] if option.endswith("=") else [name, str(size)]))


def parse_choice(name: str, kind: type[StrEnum], value: object) -> Any:
    """Returns the member of `kind` that `value` names; raises SettingsError if there is none."""
    try:
        return kind(str(value))
    except ValueError:
        options = [str(member) for member in kind]
        raise SettingsError(f"{name}={truncate(value)} is not a value of {name}; {suggest(str(value), options)}") from None


def parse_switch(name: str, value: object) -> bool:
    """Parses on or off; raises SettingsError for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("on", "off", "true", "false"):
        return value in ("on", "true")
    raise SettingsError(f"{name}={truncate(value)} is neither on nor off")


def parse_count(name: str, value: object, unit: str) -> int:
    """Parses a whole number of 1 or more, also from text; raises SettingsError, with the `unit` that is counted, for others."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={truncate(value)} is not a number of {unit}; use a whole number, 1 or more")
    return value


def parse_fraction(name: str, value: object) -> float:
    """Parses a number from 0 to 1, also from text; raises SettingsError for anything else."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise SettingsError(f"{name}={truncate(value)} is not a fraction; use a number from 0 to 1")
    return number


def parser(values: Values) -> Parse:
    """Returns what parses a field with these values."""
    if isinstance(values, str):
        return partial(parse_count, unit=values)
    return partial(parse_choice, kind=values) if isinstance(values, type) else values


def parse_lengths(name: str, value: object) -> tuple[int, ...]:
    """Parses ascending lengths in tokens, from a list or from text such as 32/64/256; raises SettingsError for others."""
    if isinstance(value, str):
        value = value.split("/")
    if not isinstance(value, Iterable) or not (found := tuple(parse_count(name, one, "tokens") for one in value)):
        raise SettingsError(f"{name}={truncate(value)} is not a list of lengths; write it like 32/64/256")
    if list(found) != sorted(set(found)):
        raise SettingsError(f"{name}={truncate(format_value(found))} must ascend; write each length once, shortest first")
    return found


def parse_option(value: object) -> Scalar:
    """Parses an option's value: on and off are bools, digits are finite 64-bit numbers, anything else is text of one line."""
    if isinstance(value, str):
        value = _read(value.strip())
    if isinstance(value, bool) or (isinstance(value, str) and value.isprintable()):
        return value
    if isinstance(value, int | float) and -_INT64_LIMIT <= value < _INT64_LIMIT:  # not of NaN, which equals nothing
        return value
    raise SettingsError(f"{quote_value(value)} is not a valid option value; use on, off, a number, or one line of text")


def parse_torch_option(value: object) -> Value:
    """Parses the value of a torch option like `parse_option`; also parses 16/32/64 as a list of integers."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}(/\d{1,18})+", value.strip(), re.ASCII):
        value = [int(number) for number in value.split("/")]
    if isinstance(value, list | tuple) and len(value) > 1 and all(type(number) is int for number in value):
        return tuple(value)
    return parse_option(value)


def is_backend_list(name: str) -> bool:
    """Tells whether an option of Inductor lists the back-ends that max-autotune chooses from, in text with commas."""
    return re.fullmatch(r"max_autotune_\w+_backends", name) is not None


def as_torch_takes_it(name: str, value: Value) -> Value:
    """Returns an Inductor option's value, with commas in a list of back-ends, which a setting writes as ATEN/TRITON."""
    return value.replace("/", ",") if isinstance(value, str) and is_backend_list(name) else value


def parse_options(
    name: str, value: object, parse: Callable[[object], Value] = parse_option
) -> tuple[tuple[str, Value], ...] | None:
    """Parses options, a mapping or pairs, into pairs sorted by name; None if there are none. `parse` takes each value."""
    found = {str(option): parse(given) for option, given in as_mapping(name, value).items()}
    for option in found:
        check_name(name, option)
    return tuple(sorted(found.items())) or None


def as_mapping(field: str, values: object) -> dict[Any, Any]:
    """Returns a mapping, as JSON or a person's pairs hold it, as a dict; raises SettingsError for anything else."""
    if isinstance(values, Mapping):
        return dict(values)
    if isinstance(values, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in values):
        return dict(values)
    raise SettingsError(f"{field}={truncate(values)} has no name; write {field}.NAME=value")


def check_name(field: str, name: object) -> None:
    """Refuses an option's, part's or backend's name that cannot stand in a key, or between quotes in generated source."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SettingsError(f"{quote_value(name)} is not a valid name in {field}; use letters, digits, _, - and dots")


def group_by_field(values: Mapping[str, Any], fields: Sequence[str], dotted: Mapping[str, str]) -> dict[str, Any]:
    """Groups values by field: those under dotted names, such as `parts.encoder.mode`, become a mapping under their field."""
    taken: dict[str, Any] = {}
    for name, value in values.items():
        first, dot, inner = (BATCH_SIZE if name == "batch_size" else str(name)).partition(".")
        field = dotted.get(first, "") if dot else first
        if field not in fields:
            raise SettingsError(f"no setting is called {quote_value(name)}; {suggest(str(name), fields)}")
        if name == "batch_size" and BATCH_SIZE in values:
            raise SettingsError(f"batch_size is short for {BATCH_SIZE}; give one of them")
        taken[field] = {**as_mapping(field, taken.get(field) or {}), inner: value} if dot else value
    return taken


def truncate(value: object) -> str:
    """Shortens a value for a message to `_MAX_SHOWN` characters."""
    words = str(value)
    return words if len(words) <= _MAX_SHOWN else f"{words[: _MAX_SHOWN - 1]}…"


def quote_value(value: object) -> str:
    """Quotes a value for a message as Python writes it, which shows spaces at its ends and invisible characters."""
    return truncate(repr(value))


def _read(text: str) -> Scalar:
    if text in ("on", "off", "true", "false", "True", "False"):
        return text in ("on", "true", "True")
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def format_value(value: object) -> str:
    """Writes a value as keys hold it; `parse` reads it back."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return "/".join(map(str, value))
    return quote(str(value), safe="/-_.:+ ")


def given_fields(settings: Any) -> dict[str, Scalar]:
    """Returns the fields of a dataclass that are not None, as JSON values."""
    values = {declared.name: getattr(settings, declared.name) for declared in fields(settings)}
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items() if value is not None}


def flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields names and values; entries of nested mappings get dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", item) for inner, item in flatten(value))
        else:
            yield name, value


def parse_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yields each `field=value` of a comma-separated list; raises SettingsError without `=`, or for the same field twice."""
    seen = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals:
            raise SettingsError(f"{quote_value(part)} is not a setting; write field=value, for example scope=full")
        if name in seen:
            raise SettingsError(f"the setting {quote_value(name)} is given twice; give it once")
        seen.add(name)
        yield name, unquote(value.strip())


def suggest(word: str, options: Iterable[str]) -> str:
    """Returns a hint: the option that was probably meant, or all of them."""
    options = list(options)
    close = get_close_matches(word[:_MAX_SHOWN], options, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(options)}"


def _short_option(of: str, name: str) -> str:
    """Returns an option's name for a label: without the prefix that most of Inductor's share, or without torch's module."""
    return name.removeprefix("triton.") if of == "inductor" else name.rpartition(".")[2]


def _shown_value(value: object) -> str:
    """Returns an option's value for a label: text as it is if nothing that shows or executes labels could misread it."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w/.:+ ,()*'\[\]-]+", value, re.ASCII)
    return str(value) if is_plain else format_value(value)


def describe(settings: CompileSettings) -> dict[str, str]:
    """Describes each field that is not at its default in a few words for a person, by the field's name."""
    if settings.as_written:
        size = {BATCH_SIZE: f"batch_size={settings.batch_size}"} if settings.batch_size else {}
        return {"as_written": "as the script has it"} | size
    words: dict[str, str] = {"scope": settings.scope}
    if settings.scope is Scope.EAGER and settings.cudagraphs:
        words["cudagraphs"] = "CUDA graphs"
    if settings.mode is not None:
        words["mode"] = settings.mode
    if settings.backend is not None:
        words["backend"] = f"backend {settings.backend}"
    if settings.dynamic is Dynamic.BUCKETS:
        words["dynamic"] = f"buckets {format_value(settings.buckets) if settings.buckets else f'of {settings.bucket_size}'}"
    elif settings.dynamic is not None:
        words["dynamic"] = f"dynamic={settings.dynamic}" if settings.dynamic is Dynamic.TRUE else settings.dynamic
    words |= {f"parts.{name}": f"{name} {part.label}" for name, part in settings.parts or ()}
    eager_pads = settings.scope is Scope.EAGER and settings.padding is not Padding.MAX
    if eager_pads or settings.pad_multiple not in (None, DEFAULT_PAD_MULTIPLE):
        words["padding"] = f"pad to {settings.padding}" + (f" ×{settings.pad_multiple}" if settings.pad_multiple else "")
    if settings.optimizer is not OptimizerKind.FOREACH:
        words["optimizer"] = f"{settings.optimizer} optimizer"
    if settings.group_window is not None:
        words["group_window"] = f"grouped {settings.group_window}"
    if settings.pad_to_multiple_of is not None:
        words["pad_to_multiple_of"] = f"pad to ×{settings.pad_to_multiple_of}"
    if settings.use_cache is False:
        words["use_cache"] = "no KV cache"
    for declared in fields(settings):
        value = getattr(settings, declared.name)
        if declared.metadata.get("in_label") and value is not None:
            name = declared.name.replace("_", " ")
            words[declared.name] = (name if value else f"no {name}") if isinstance(value, bool) else f"{name} {value}"
    named = {"inductor": settings.options or (), "config": settings.written_config, "workload": settings.workload or ()}
    words |= {
        f"{of}.{name}": f"{_short_option(of, name)}={_shown_value(value)}" for of, pairs in named.items() for name, value in pairs
    }
    if settings.ddp is not None:
        words["ddp"] = settings.ddp.label
    return words


PART_BREAK = "\n\n\n"  # separates the top-level parts of a source


def source_parts(code: str) -> dict[str, str]:
    """Returns the functions and constants of a module's source by name, without comments for type checkers."""
    code = re.sub(r"  # type: ignore\[[\w-]+\]", "", code).rstrip()
    return {defined_name(part): part for part in code.split(PART_BREAK)[1:]}


def defined_name(code: str) -> str:
    """Returns the name that a top-level statement defines; empty if it defines none."""
    found = re.match(r"(?:def )?(\w+)", code)
    return found[1] if found else ""
