"""What modules hold in Python: the numbers that their forward may read, and what it may set."""

import inspect
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.schema.causes.places import is_package

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Kinds of arguments and results, other than tensors, that a graph can hold as they are."""


def numbers_read_by(parts: Sequence[nn.Module]) -> list[tuple[dict[str, Any], list[str]]]:
    """Returns where numbers, strings and switches are that modules may read in a forward, and their names there.

    They are the modules' own attributes, such as `training` or a temperature, and what the code of their classes names among the
    globals of its file; those of objects among these, such as a configuration; and those of dictionaries in all of them.
    """
    read: list[tuple[dict[str, Any], str]] = []
    seen: set[CodeType] = set()
    known = {id(one) for part in parts for one in (vars(part), part._parameters, part._buffers, part._modules)}
    for part in parts:
        read += ((vars(part), name) for name in vars(part))
        for function in vars(type(part)).values():
            read += _globals_of(function, seen)
    held = [place[name] for place, name in read]
    for level in range(_LEVELS):
        found = [_options(one, of_objects=level == 0) for one in held]
        inside = {id(place): place for place in found if place is not None and id(place) not in known}
        known |= inside.keys()
        read += ((place, name) for place in inside.values() for name in place)
        held = [one for place in inside.values() for one in place.values()]
    places: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for place, name in read:
        names = places.setdefault(id(place), (place, []))[1]
        if isinstance(place[name], CONSTANTS) and name not in names:
            names.append(name)
    return [(place, names) for place, names in places.values() if names]


_LEVELS, _MOST_OPTIONS = 3, 256


def _options(held: Any, *, of_objects: bool) -> dict[str, Any] | None:
    """Returns the options in a dictionary, or an object; None if it is something else, or as large as a vocabulary."""
    if not isinstance(held, dict):
        if not of_objects or callable(held) or isinstance(held, Tensor | ModuleType):
            return None
        held = getattr(held, "__dict__", None)
    return held if isinstance(held, dict) and len(held) <= _MOST_OPTIONS else None


def _globals_of(function: Any, seen: set[CodeType]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the globals that a function names which belongs to no package, and those of functions that it calls."""
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or function.__code__ in seen or is_package(function.__code__.co_filename):
        return
    seen.add(function.__code__)
    place = function.__globals__
    for name in function.__code__.co_names:
        if name in place:
            yield place, name
            yield from _globals_of(place[name], seen)


class _Object:
    """An object that equals only itself; it lives on, because another one might be made in its memory."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def state_of(parts: Sequence[nn.Module]) -> dict[tuple[int, str], Any]:
    """Returns what modules hold: numbers by their value, containers by what is in them, all else by which object it is."""
    found: dict[tuple[int, str], Any] = {}
    for part in parts:
        for name, value in (*vars(part).items(), *part._buffers.items()):
            content = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            is_container = isinstance(content, list | tuple | set | deque)
            found[id(part), f"{type(part).__name__}.{name}"] = tuple(map(_known, content)) if is_container else _known(value)
    return found


def _known(value: Any) -> Any:
    if isinstance(value, weakref.ref):  # an LSTM remembers which weights it has, and notices others in their place
        return weakref.ref
    return value if isinstance(value, CONSTANTS) else _Object(value)
