"""What modules keep in Python besides their parameters and buffers: counters, schedules, lists, generators of their own.

A forward that counts its calls computes a different function at each call. Before the same function is evaluated again, this
state is restored.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_VALUES = (bool, int, float, complex, str, tuple, type(None), Tensor)
"""Types stored as they are; for a tensor, its identity is stored."""


class PythonState:
    """The state of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._put_back: list[Callable[[], object]] = []
        for module in model.modules():
            attributes = vars(module)
            for name in attributes.keys() - _OF_EVERY_MODULE:
                self._keep(attributes, name)

    def put_back(self) -> None:
        """Restores the state."""
        for attributes, name, value in self._values:
            if attributes.get(name) is not value:
                attributes[name] = value
        for put_back in self._put_back:
            put_back()

    def _keep(self, attributes: dict[str, Any], name: str) -> None:
        value = attributes[name]
        if isinstance(value, (*_VALUES, list, dict, set, deque)):
            self._values.append((attributes, name, value))
        if isinstance(value, list | deque):
            self._put_back.append(_refill(value, list(value), value.extend))
        elif isinstance(value, set):
            self._put_back.append(_refill(value, set(value), value.update))
        elif isinstance(value, dict):
            self._put_back.append(_put_back_items(value))
        elif isinstance(value, torch.Generator):
            self._put_back.append(_setter(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._put_back.append(_setter(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._put_back.append(_setter(_set_bit_generator(value), value.bit_generator.state))


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


def _setter(set_state: Callable[[Any], object], state: Any) -> Callable[[], object]:
    return lambda: set_state(state)


def _set_bit_generator(generator: np.random.Generator) -> Callable[[Any], object]:
    return lambda state: setattr(generator.bit_generator, "state", state)
