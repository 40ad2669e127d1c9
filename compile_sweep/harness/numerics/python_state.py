"""What a step keeps in Python besides parameters and buffers: counters, schedules, lists, generators of its own.

A forward that counts its calls computes a different function at each call. Before the same function is evaluated again, this
state is restored. It is in modules, in objects that they hold, and outside: in the globals and classes of the user's own files.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compile_sweep.schema.causes.places import is_harness, is_installed

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_VALUES = (bool, int, float, complex, str, tuple, type(None), Tensor)
"""Types stored as they are; for a tensor, its identity is stored."""
_MOST_ITEMS = 100_000  # of a container whose items are kept; others are data


class ClassState:
    """What the classes in a user's files hold at one time, such as the number `Schedule.weight`."""

    def __init__(self, files: Iterable[dict[str, Any]]) -> None:
        classes = {
            id(value): value
            for held in files
            for name, value in held.items()
            if isinstance(value, type) and not name.startswith("__") and _is_own(value.__module__)
        }
        self._values = [
            (kind, name, value)
            for kind in classes.values()
            for name, value in vars(kind).items()
            if not name.startswith("__") and isinstance(value, _VALUES)
        ]

    def put_back(self) -> None:
        """Restores the state."""
        for kind, name, value in self._values:
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)

    def changed(self) -> list[str]:
        """Returns the names of numbers and strings that are others by now, such as `Schedule.weight`."""
        plain = [one for one in self._values if isinstance(one[2], bool | int | float | str)]
        return [f"{kind.__name__}.{name}" for kind, name, value in plain if vars(kind).get(name) != value]


class PythonState:
    """The state of a model and of what its user's files hold, or only the latter, at one time."""

    def __init__(self, model: nn.Module, *, inside: bool = True) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._put_back: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            for name in attributes.keys() - _OF_EVERY_MODULE:
                if inside or name == "loss_fn":
                    self._keep(attributes, name)
        files = own_files(model)
        for held in files:
            for name in list(held):
                if not name.startswith("__"):
                    self._keep(held, name)
        self.classes = ClassState(files)

    def put_back(self) -> None:
        """Restores the state."""
        for attributes, name, value in self._values:
            if attributes.get(name) is not value:
                attributes[name] = value
        self.classes.put_back()
        for put_back in self._put_back:
            put_back()

    def _keep(self, attributes: dict[str, Any], name: str) -> None:
        value = attributes[name]
        if isinstance(value, (*_VALUES, list, dict, set, deque)):
            self._values.append((attributes, name, value))
        if isinstance(value, list | dict | set | deque) and len(value) > _MOST_ITEMS:
            return
        if isinstance(value, list | deque):
            self._put_back.append(_refill(value, list(value), value.extend))
        elif isinstance(value, set):
            self._put_back.append(_refill(value, set(value), value.update))
        elif isinstance(value, dict):
            self._put_back.append(_put_back_items(value))
        elif isinstance(value, torch.Generator):
            self._put_back.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._put_back.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._put_back.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif _is_own(type(value).__module__) and not isinstance(value, nn.Module | type) and id(value) not in self._seen:
            self._seen.add(id(value))
            for own in list(getattr(value, "__dict__", {})):
                self._keep(vars(value), own)


def own_files(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the globals of those files of the user's that define the model's classes or functions that it holds."""
    names = {
        str(getattr(one, "__module__", ""))
        for module in model.modules()
        for one in (type(module), *vars(module).values())
        if callable(one)
    }
    return [vars(sys.modules[name]) for name in filter(_is_own, names)]


def _is_own(name: str) -> bool:
    """Tells whether a module is one of the user's own files."""
    path = str(getattr(sys.modules.get(name), "__file__", None) or "<none>")
    return not (is_harness(path) or is_installed(path))


def _refill(container: Any, held: Any, fill: Callable[[Any], object]) -> Callable[[], object]:
    def put_back() -> None:
        if len(container) != len(held):
            container.clear()
            fill(held)

    return put_back


def _put_back_items(mapping: dict[Any, Any]) -> Callable[[], object]:
    held = dict(mapping)

    def put_back() -> None:
        if len(mapping) == len(held) and all(key in held and held[key] is value for key, value in mapping.items()):
            return  # the mapping may be one that refuses changes, such as the configuration of a model of diffusers
        mapping.update(held)
        for key in mapping.keys() - held.keys():
            del mapping[key]

    return put_back
