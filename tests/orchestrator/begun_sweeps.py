"""Settings of a sweep's folder, and whether anything in it has changed."""

from __future__ import annotations

from pathlib import Path

from compile_sweep.schema.settings import CompileSettings

SETTINGS = tuple(map(CompileSettings.parse, ("scope=eager", "scope=full")))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
