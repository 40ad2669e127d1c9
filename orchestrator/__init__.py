"""Plans a sweep, runs its trials on Ray, and records what each one measured.

What is exported here is imported when first used: of the processes that a sweep starts, few need its configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config import SweepConfig
    from orchestrator.environment import Environment
    from orchestrator.errors import ConfigError, RecordsError, SweepFolderError
    from orchestrator.failures import Label
    from orchestrator.records import Caches, Status, TrialRecord

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
    "Caches": "records",
    "ConfigError": "errors",
    "Environment": "environment",
    "Label": "failures",
    "RecordsError": "errors",
    "Status": "records",
    "SweepConfig": "config",
    "SweepFolderError": "errors",
    "TrialRecord": "records",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"orchestrator.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
