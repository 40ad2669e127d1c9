"""The seeds of torch, numpy and Python's `random`, all of which a user's functions may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds them alike, from here on."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds them, and puts back how they were: of torch's generators, that of the CPU."""
    plain, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(numpys)
