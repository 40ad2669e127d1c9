"""What is measured and how: workloads, compile settings, the measuring protocol and the numerics check.

Names that need torch are imported when first used, so that reading records costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workloads.errors import CompileSweepError, SettingsError, WorkloadError
from workloads.phases import Phase
from workloads.settings import CompileSettings, Dynamic, Mode, OptimizerKind, Padding, Scope
from workloads.shapes import PadToBuckets, PadToLongest, PadToMax, ShapePolicy

if TYPE_CHECKING:
    from workloads.base import Batch, Workload, load_workload
    from workloads.from_model import WorkloadFromModel
    from workloads.measuring import Measurement, Protocol, measure

__all__ = [
    "Batch",
    "CompileSettings",
    "CompileSweepError",
    "Dynamic",
    "Measurement",
    "Mode",
    "OptimizerKind",
    "PadToBuckets",
    "PadToLongest",
    "PadToMax",
    "Padding",
    "Phase",
    "Protocol",
    "Scope",
    "SettingsError",
    "ShapePolicy",
    "Workload",
    "WorkloadError",
    "WorkloadFromModel",
    "load_workload",
    "measure",
]

_WITH_TORCH = {
    "Batch": "workloads.base",
    "Measurement": "workloads.measuring",
    "Protocol": "workloads.measuring",
    "Workload": "workloads.base",
    "WorkloadFromModel": "workloads.from_model",
    "load_workload": "workloads.base",
    "measure": "workloads.measuring",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
