"""Keeps this project's `analysis` and `workloads` apart from packages of the same names in the user's folder.

`python -m` puts the current folder first on the import path. So a repository's own `analysis/` would hide ours from the command
that writes the report, and its `workloads/` would hide the built-in ones. A process that calls `find_own_packages` gets ours. In
other processes, which run the user's code, the user's package wins.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent  # the folder that this project's packages are in


class OwnPackageFinder(MetaPathFinder):
    """Finds some of this project's packages next to `compile_sweep`, whatever comes first on the import path."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)]) if fullname in self.names else None


_finder = OwnPackageFinder()


def find_own_packages(*names: str) -> None:
    """Makes this process import this project's packages of these names, from now on."""
    _finder.names.update(names)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def import_path(*, with_current_folder: bool) -> list[str]:
    """Returns the folders that a started process imports from, the current one first if it runs the user's code.

    Otherwise the current one is among them only if PYTHONPATH names it; `python -m` has put it there, too.
    """
    here = os.getcwd()
    is_named = here in map(os.path.abspath, (os.environ.get("PYTHONPATH") or os.sep).split(os.pathsep))
    others = [folder for folder in map(os.path.abspath, filter(None, sys.path)) if folder != here or is_named]
    return list(dict.fromkeys([*([here] if with_current_folder else []), *others, str(ROOT)]))
