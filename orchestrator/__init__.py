"""Plans a sweep, runs its trials on Ray, and records what each one measured.

The exported names are imported at first use, because few of the processes that a sweep starts need its configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_sweep.schema.errors import ConfigError, RecordsError, SweepFolderError
    from compile_sweep.schema.outcome import Label, Status
    from compile_sweep.schema.record import Caches, TrialRecord
    from orchestrator.config import SweepConfig
    from orchestrator.environment import Environment

__all__ = [
    "Caches",
    "ConfigError",
    "Environment",
    "Label",
    "RecordsError",
    "Status",
    "SweepConfig",
    "SweepFolderError",
    "TrialRecord",
]

_MODULES = {
    "Caches": "compile_sweep.schema.record",
    "ConfigError": "compile_sweep.schema.errors",
    "Environment": "orchestrator.environment",
    "Label": "compile_sweep.schema.outcome",
    "RecordsError": "compile_sweep.schema.errors",
    "Status": "compile_sweep.schema.outcome",
    "SweepConfig": "orchestrator.config",
    "SweepFolderError": "compile_sweep.schema.errors",
    "TrialRecord": "compile_sweep.schema.record",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
