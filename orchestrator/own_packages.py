"""Keeps this project's `analysis` apart from a package of the same name in the user's folder.

`python -m` puts the current folder first on the import path, so a repository with an `analysis/` of its own would hide ours from
the driver. Trials and scripts run in processes of their own, where this is not in effect and the user's package wins.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
"""The folder that this project's packages are in."""


class OwnPackageFinder(MetaPathFinder):
    """Finds `analysis` beside `orchestrator`, wherever the import path would find one."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname == "analysis" else None


def find_own_packages() -> None:
    """Has this process import this project's `analysis`, from now on and once."""
    if not any(isinstance(finder, OwnPackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackageFinder())
