"""Reads what a sweep measured and shows what to choose.

Runs after or during a sweep, on its folder alone: no torch, no ray. `figures` and `report`, which need plotly, are
imported at first use.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# `python -m analysis.report` puts the current folder first on the import path, where a user's pandas.py would hide the package.
if sys.argv[0] == "-m" and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.realpath(__file__))):
    sys.path.append(sys.path.pop(0))

from analysis.choose.attribution import Effect, effects, region_prices
from analysis.choose.break_even import Costs, Job, Reign, Starts, baseline_key, costs, reigns
from analysis.choose.hypervolume import Hypervolume, hypervolume, reference_point
from analysis.choose.pareto import Summary, expected_front, knee, pareto_front, speedup_over_eager, summary
from analysis.choose.uncertainty import UncertainFront, front_probability, uncertain_front
from analysis.columns import COLUMNS
from analysis.load import SweepInfo, load, load_sweep
from analysis.page.slowness import why_none_is_faster
from analysis.page.verdict import cache_faults, noisy_steps, unused_gains
from compile_sweep.schema.objectives import Goal

if TYPE_CHECKING:
    from analysis import figures
    from analysis.report import write_report
    from analysis.table import markdown_table

__all__ = [
    "COLUMNS",
    "Costs",
    "Effect",
    "Goal",
    "Hypervolume",
    "Job",
    "Reign",
    "Starts",
    "Summary",
    "SweepInfo",
    "UncertainFront",
    "baseline_key",
    "cache_faults",
    "costs",
    "effects",
    "expected_front",
    "figures",
    "front_probability",
    "hypervolume",
    "knee",
    "load",
    "load_sweep",
    "markdown_table",
    "noisy_steps",
    "pareto_front",
    "reference_point",
    "region_prices",
    "reigns",
    "speedup_over_eager",
    "summary",
    "uncertain_front",
    "unused_gains",
    "why_none_is_faster",
    "write_report",
]


_COMMANDS = {"markdown_table": "analysis.table", "write_report": "analysis.report"}
"""Functions whose modules are also commands: `python -m` must be the first to import those."""


def __getattr__(name: str) -> Any:
    if name == "figures":
        return import_module("analysis.figures")
    if name in _COMMANDS:
        return getattr(import_module(_COMMANDS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
