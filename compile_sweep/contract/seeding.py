"""Seeds torch, numpy and Python's `random`, since a user's functions may draw from any of them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds all three generators.

    `torch.manual_seed` would also format the stack for each kind of device that this process has not begun to use, to show it if
    seeding fails there later. That takes a millisecond, as long as a small model's step.
    """
    torch.default_generator.manual_seed(seed)
    if torch.backends.cuda.is_built():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy accepts no larger seed


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds all three generators, and restores their state afterwards; for torch, only the CPU generator's."""
    with own_random_numbers(torch.device("cpu"), seed):
        yield


@contextmanager
def random_numbers_put_back(device: torch.device) -> Iterator[None]:
    """Lets random numbers continue after the block as if it had drawn none."""
    numpys, plain = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            np.random.set_state(numpys)
            random.setstate(plain)


@contextmanager
def own_random_numbers(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds random numbers for the block; afterwards they continue as if the block had drawn none."""
    with random_numbers_put_back(device):
        seed_all(seed)
        yield
