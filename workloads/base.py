"""Moved to `compile_sweep.contract.base`; stays until 0.3.0 for a `best.py` that an earlier version exported."""

from compile_sweep.contract.base import *  # noqa: F403
