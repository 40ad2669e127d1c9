"""Moved to `compile_sweep.schema.settings`; stays until 0.3.0 for a `best.py` that an earlier version exported."""

from compile_sweep.schema.settings import *  # noqa: F403
