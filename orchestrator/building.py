"""Finds and builds the workload that a command names; whatever its code raises meanwhile is one sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from workloads.base import Workload, load_workload
from workloads.errors import CompileSweepError, WorkloadError


def build(name: str, size: str | None, seed: int, *, has_gpu: bool) -> Workload:
    """The workload of this name, in its first size with a GPU and its last without unless one is said.

    Raises:
        WorkloadError: there is none, or it cannot be built; the message says why.
    """
    if ":" in name:  # a user's module is named as it would be imported from here; for others this folder's files are no code
        sys.path.insert(0, os.getcwd())
    found = load_workload(name)
    with building():
        return found(found.sizes[0 if has_gpu else -1] if size is None else size, seed)


@contextmanager
def building() -> Iterator[None]:
    """Where a workload's own code runs before a sweep.

    Raises:
        WorkloadError: it raised something that is no sentence of ours.
    """
    try:
        yield
    except CompileSweepError:
        raise
    except (Exception, SystemExit) as error:  # a user's functions may raise anything
        raise WorkloadError(f"building the workload failed: {type(error).__name__}: {error}") from error
