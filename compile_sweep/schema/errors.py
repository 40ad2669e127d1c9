"""The project's tree of errors.

CompileSweepError
├── SettingsError        a combination of compile settings that cannot work, or text that is not a setting
├── WorkloadError        a workload that does not exist, does not import, or breaks its contract
├── ConfigError          a recipe, option or combination of options that does not work
├── SweepFolderError     a folder that cannot be used for this sweep
├── RecordsError         trials.jsonl or sweep.json is not what this version wrote
├── CacheError           a store of compile caches that cannot be used, or an invalid signing key
├── SessionError         Ray does not start, or a cluster does not answer
├── StorageError         a storage location that cannot be used
└── TrackingError        a --log-to destination that does not answer

Each of them is for the user to fix: the command line prints the message, one sentence, and exits with code 2.
"""

from collections.abc import Iterable

from compile_sweep.schema import redact
from compile_sweep.schema.visible_text import visible


class CompileSweepError(Exception):
    """Says in one sentence what is wrong, where, and what would be right."""


class SettingsError(CompileSweepError, ValueError):
    """A combination of compile settings that cannot work; the message is the reason."""


class WorkloadError(CompileSweepError):
    """A workload that does not exist, does not import, or breaks its contract."""


_SHOWN = 200
_LONGEST = 1200  # length from which on a message is cut, in characters


class ConfigError(CompileSweepError):
    """A recipe, an option or a combination of options that does not work."""


class SweepFolderError(CompileSweepError):
    """A folder that cannot be used for this sweep."""


class SessionError(CompileSweepError):
    """Ray does not start, or a cluster does not answer."""


class RecordsError(CompileSweepError):
    """`trials.jsonl` or `sweep.json` is not what this version of the project wrote."""


class CacheError(CompileSweepError):
    """A store of compile caches that cannot be reached or used, an invalid signing key, or an entry the store does not have."""


class StorageError(CompileSweepError):
    """A storage location that cannot be reached or used, or that holds something else."""


class TrackingError(CompileSweepError):
    """A --log-to destination that does not answer, or refuses access."""


def check_utf8(words: Iterable[str]) -> None:
    """Refuses words of a command line that contain a NUL, or bytes that are not UTF-8."""
    for word in words:
        if "\0" in word or word.encode("utf-8", "replace").decode() != word:
            raise ConfigError(
                f"{word[:_SHOWN]!a} is not UTF-8 text; encode it as UTF-8, and rename the file if it is a file name"
            )


def one_line_message(error: BaseException) -> str:
    """Formats an error as one line for a terminal, with secrets redacted and unprintable characters escaped.

    A long one loses its middle: what was typed stands at its beginning, and what would be right at its end.
    """
    line = " ".join(redact.redact_text(str(error)).split())
    return visible(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}")
