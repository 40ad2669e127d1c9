"""Moved to `compile_sweep.harness.outputs`; stays until 0.3.0 for a `best.py` that an earlier version exported."""

from compile_sweep.harness.outputs import *  # noqa: F403
