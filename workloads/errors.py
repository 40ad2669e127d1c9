"""The root of the project's errors, and those of a workload.

CompileSweepError
├── SettingsError            a combination of compile settings that cannot work, or text that is none
├── WorkloadError            a workload that does not exist, does not import, or breaks its contract
└── (orchestrator/errors.py) ConfigError, SweepFolderError, RecordsError, CacheError, …

Every error here is the user's to mend: the command line prints its one sentence and exits with code 2.
"""

from __future__ import annotations


class CompileSweepError(Exception):
    """What, where, and what would be right, in one sentence."""


class SettingsError(CompileSweepError, ValueError):
    """A combination of compile settings that cannot work; the message is the reason."""


class WorkloadError(CompileSweepError):
    """A workload that does not exist, does not import, or breaks its contract."""
