"""Sweeps' folders, for benchmarks that read them."""

from sweep_folders import make_sweep as make_sweep
