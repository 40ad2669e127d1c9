"""Plans a sweep, runs its trials on Ray, and records what each one measured."""

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
