"""The project's one tree of errors.

CompileSweepError
├── SettingsError        a combination of compile settings that cannot work, or text that is not one
├── WorkloadError        a workload that does not exist, does not import, or breaks its contract
├── ConfigError          a recipe, option or combination of options that does not work
├── SweepFolderError     a folder that cannot be used for this sweep
├── RecordsError         trials.jsonl or sweep.json is not what this version wrote
├── CacheError           a store of compile caches that cannot be used, or a signing key that is invalid
├── SessionError         a Ray that does not start, or a cluster that does not answer
├── StorageError         a place for results that cannot be used
└── TrackingError        a place of --log-to that does not answer

Each of them is for the user to fix: the command line prints its one sentence and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from compile_sweep.schema import redact


class CompileSweepError(Exception):
    """What, where, and what would be right, in one sentence."""


class SettingsError(CompileSweepError, ValueError):
    """A combination of compile settings that cannot work; the message is the reason."""


class WorkloadError(CompileSweepError):
    """A workload that does not exist, does not import, or breaks its contract."""


_LONGEST = 4000
_SHOWN = 200


class ConfigError(CompileSweepError):
    """A recipe, an option or a combination of options that does not work."""


class SweepFolderError(CompileSweepError):
    """A folder that cannot be used for this sweep."""


class SessionError(CompileSweepError):
    """A Ray that does not start, or a cluster that does not answer."""


class RecordsError(CompileSweepError):
    """`trials.jsonl` or `sweep.json` is not what this version of the project wrote."""


class CacheError(CompileSweepError):
    """A store of compile caches that cannot be reached or used, a signing key that is none, or something not in the store."""


class StorageError(CompileSweepError):
    """A place for results that cannot be reached or used, or that holds something else."""


class TrackingError(CompileSweepError):
    """A place of --log-to that does not answer, or lets nobody in."""


def check_utf8(words: Iterable[str]) -> None:
    """Refuses words of a command line that can be neither printed nor written down.

    Raises:
        ConfigError: one holds bytes that are no UTF-8, or a NUL.
    """
    for word in words:
        if "\0" in word or word.encode("utf-8", "replace").decode() != word:
            raise ConfigError(f"{word[:_SHOWN]!a} is no text in UTF-8; write it so, and rename the file if it is one's name")


def one_line_message(error: BaseException) -> str:
    """What an error says, on one line of a terminal: without secrets, and what is not to be seen as Python writes it."""
    words = " ".join(redact.redact_text(str(error)).split())
    seen = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in words)
    return seen if len(seen) <= _LONGEST else f"{seen[:_LONGEST]}…"
