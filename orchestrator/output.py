"""Where a sweep's folder is: as the command line says, or a new one under results/."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from orchestrator.config import shown
from orchestrator.errors import ConfigError
from orchestrator.options import Options

GIVEN = "given"
"""What a sweep of `--settings` calls its recipe."""


def chosen(options: Options) -> Path:
    """The sweep's folder.

    Raises:
        ConfigError: nothing says which sweep is to be resumed, or whose home the folder is in.
    """
    if options.output is not None:
        return expanded("--output", options.output)
    if options.resume:
        return Path("results") / _name_of(options.storage)
    name = GIVEN if options.settings else options.recipe or (str(options.searcher) if options.searcher else "quickstart")
    return Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def expanded(option: str, folder: str | Path) -> Path:
    """The folder with `~` as a shell would have it, which leaves the one in `--output=~/x` as it is.

    Raises:
        ConfigError: no user is called so.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(f"{option} {folder} is no folder, for no user is called so; name another") from None


def _name_of(storage: str | None) -> str:
    """The folder's name, which is its storage's if it was made under results/."""
    if storage is None:
        raise ConfigError("--resume needs to know which sweep; name its folder with --output, or its --storage")
    name = PurePosixPath(urlsplit(storage).path).name
    if name in ("", ".."):
        raise ConfigError(f"--storage {shown(storage)} does not say what the sweep's folder is called; name it with --output")
    return name
