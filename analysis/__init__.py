"""Reads what a sweep measured and shows what to choose.

Runs after, or beside, a sweep, on its folder alone: no torch, no ray. `figures` and `report`, which need plotly, are
imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from analysis.columns import COLUMNS
from analysis.load import SweepInfo, load, load_sweep
from analysis.pareto import (
    Choice,
    Goal,
    Summary,
    break_even_s,
    knee,
    pareto_front,
    speedup_over_eager,
    summary,
)

if TYPE_CHECKING:
    from analysis import figures
    from analysis.report import write_report

__all__ = [
    "COLUMNS",
    "Choice",
    "Goal",
    "Summary",
    "SweepInfo",
    "break_even_s",
    "figures",
    "knee",
    "load",
    "load_sweep",
    "pareto_front",
    "speedup_over_eager",
    "summary",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("analysis.figures")
    if name == "write_report":
        return import_module("analysis.report").write_report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
