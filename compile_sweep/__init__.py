"""Settings of torch.compile for training: what a training script, an exported `best.py` and a worker process import.

Names that need torch are imported at first use, so that reading records does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compile_sweep.schema.choices import Dynamic, Mode, OptimizerKind, Padding, Scope
from compile_sweep.schema.errors import CompileSweepError, SettingsError, WorkloadError
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToBuckets, PadToLongest, PadToMax, ShapePolicy

if TYPE_CHECKING:
    from compile_sweep.contract.base import Batch, Workload, load_workload
    from compile_sweep.contract.from_model import WorkloadFromModel
    from compile_sweep.harness.measure import measure
    from compile_sweep.harness.prepare import prepare
    from compile_sweep.harness.protocol import Protocol
    from compile_sweep.schema.record import Measurement
    from compile_sweep.script.winner import apply, lightning_callback, steps, trainer_callback

__version__ = "0.2.0"

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
    "apply",
    "lightning_callback",
    "load_workload",
    "measure",
    "prepare",
    "steps",
    "trainer_callback",
]

_WITH_TORCH = {
    "Batch": "compile_sweep.contract.base",
    "Measurement": "compile_sweep.schema.record",
    "Protocol": "compile_sweep.harness.protocol",
    "Workload": "compile_sweep.contract.base",
    "WorkloadFromModel": "compile_sweep.contract.from_model",
    "apply": "compile_sweep.script.winner",
    "lightning_callback": "compile_sweep.script.winner",
    "load_workload": "compile_sweep.contract.base",
    "measure": "compile_sweep.harness.measure",
    "prepare": "compile_sweep.harness.prepare",
    "steps": "compile_sweep.script.winner",
    "trainer_callback": "compile_sweep.script.winner",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
