"""What the front may be drawn over: a gain upwards, a price to the right."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from compile_sweep.schema.objectives import Goal


class FrontAxis(NamedTuple):
    """One objective of the front, as an axis."""

    column: str
    """The frame's column it is measured in."""
    choice: str
    """What the page calls it where a person chooses."""
    title: str
    short_title: str
    """The same for a narrow screen."""
    divisor: float = 1.0
    """What the column's values are divided by to be drawn."""
    is_logarithmic: bool = False


GAINS: Mapping[str, FrontAxis] = MappingProxyType(
    {
        "samples": FrontAxis("samples_per_s", "samples", "throughput (samples per second)", "samples per second"),
        "tokens": FrontAxis("tokens_per_s", "useful tokens", "throughput (useful tokens per second)", "useful tokens per second"),
    }
)
"""The axes upwards, by name; more is better."""

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
"""The axes to the right, by name; less is better."""

DEFAULT_GAIN, DEFAULT_PRICE = "samples", "compile"


def axes_with_figures(df: pd.DataFrame, axes: Mapping[str, FrontAxis]) -> list[str]:
    """Names of the axes for which a trial that `load` returned has a figure, and of the first, which is always offered."""
    first = next(iter(axes))
    return [name for name, axis in axes.items() if name == first or df[axis.column].notna().any()]


def front_objectives(gain: str, price: str) -> dict[str, Goal]:
    """The objectives, as `pareto_front` takes them, of the front over these two axes."""
    return {GAINS[gain].column: Goal.MAX, PRICES[price].column: Goal.MIN}
