"""Moved to `compile_sweep.harness.steady`; stays until 0.3.0 for a `best.py` that an earlier version exported."""

from compile_sweep.harness.steady import *  # noqa: F403
