"""The possible axes of the front: a gain upwards, a price to the right."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from compile_sweep.schema.objectives import Goal


class FrontAxis(NamedTuple):
    """An objective of the front, as an axis."""

    column: str
    """Column of the frame with its values."""
    choice: str
    """Name in the page's menu."""
    title: str
    short_title: str
    """Title on a narrow screen."""
    divisor: float = 1.0
    """Values are divided by this for drawing."""
    is_logarithmic: bool = False


GAINS: Mapping[str, FrontAxis] = MappingProxyType(
    {
        "samples": FrontAxis("samples_per_s", "samples", "throughput (samples per second)", "samples per second"),
        "tokens": FrontAxis("tokens_per_s", "useful tokens", "throughput (useful tokens per second)", "useful tokens per second"),
    }
)
"""Vertical axes by name; more is better."""

PRICES: Mapping[str, FrontAxis] = MappingProxyType(
    {
        "compile": FrontAxis(
            "compile_s", "cold compile", "cold compile time (seconds, logarithmic)", "cold compile time (s, logarithmic)",
            is_logarithmic=True,
        ),
        "warm": FrontAxis(
            "warm_start_s", "warm start", "warm start (seconds, logarithmic)", "warm start (s, logarithmic)",
            is_logarithmic=True,
        ),
        "memory": FrontAxis("peak_memory_bytes", "peak memory", "peak memory (GiB)", "peak memory (GiB)", divisor=2**30),
    }
)  # fmt: skip
"""Horizontal axes by name; less is better."""

DEFAULT_GAIN, DEFAULT_PRICE = "samples", "compile"


def axes_with_figures(df: pd.DataFrame, axes: Mapping[str, FrontAxis]) -> list[str]:
    """Returns names of the axes for which any trial that `load` returned has a figure, always including the first axis."""
    first = next(iter(axes))
    return [name for name, axis in axes.items() if name == first or df[axis.column].notna().any()]


def front_objectives(gain: str, price: str) -> dict[str, Goal]:
    """Returns the objectives of the front over these two axes, as `pareto_front` takes them."""
    return {GAINS[gain].column: Goal.MAX, PRICES[price].column: Goal.MIN}
