"""Puts a function of ours in the place of one of torch's or Python's, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """In the block, the attribute is what `wrapped` makes of it.

    Args:
        owner: a module or class.
        name: of its function.
        wrapped: given the function, returns what to call in its place.
    """
    before = getattr(owner, name)
    setattr(owner, name, wrapped(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
