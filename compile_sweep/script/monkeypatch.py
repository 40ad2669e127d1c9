"""Replaces a function of torch or Python by one of ours while a block lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces the attribute by the result of `wrapped` in the block."""
    before = getattr(owner, name)
    setattr(owner, name, wrapped(before))
    try:
        yield
    finally:
        setattr(owner, name, before)
