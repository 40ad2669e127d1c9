"""Tells the user's source files from those of Python, of installed packages and of this project, by the paths of stack frames."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
SOURCE_PREFIX = "compile_settings_"  # prefix of the pseudo file name under which settings' source is executed
_HARNESS = (f"{_ROOT}/compile_sweep/", f"{_ROOT}/orchestrator/")
_WORKLOADS = f"{_ROOT}/workloads/"
_PACKAGES = ("/site-packages/", "/dist-packages/")
"""What the folders of packages are called on other hosts, whose errors also come with paths."""
_AFTER_PACKAGES = re.compile("|".join(_PACKAGES))


def place_in_own_code(frames: Iterable[tuple[str, int]]) -> str:
    """Returns `model.py:3` for the innermost frame, given by file and line, in the user's own code; empty if there is none."""
    own = [(path, line) for path, line in frames if not (is_harness(path) or is_installed(path))]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def place_in_code(frames: Sequence[tuple[str, int]]) -> str:
    """Returns the same or, where no frame is of the user's own code, that of a package other than torch, with its folder."""
    others = [(path, line) for path, line in frames if is_package(path) and not is_torch(path)]
    library = f"{_AFTER_PACKAGES.split(others[-1][0])[-1]}:{others[-1][1]}" if others else ""
    return place_in_own_code(frames) or library


def place_of(error: BaseException) -> str:
    """Returns the place in the user's own code that raised an error; empty if there is none."""
    return place_in_own_code((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


def is_harness(path: str) -> bool:
    """Tells whether a file is this project's and belongs to no model."""
    return path.startswith(_HARNESS)


def is_installed(path: str) -> bool:
    """Tells whether a file came with Python or a package, excluding this project's own."""
    if path.startswith((*_HARNESS, _WORKLOADS)):
        return False
    return path.startswith(("<", *_folders("stdlib"))) or is_package(path)


def is_package(path: str) -> bool:
    """Tells whether a file is in a folder of installed packages."""
    beside_torch = os.path.dirname(torch_folder().rstrip("/")) + "/"
    return path.startswith((*_folders("purelib", "platlib"), beside_torch)) or any(folder in path for folder in _PACKAGES)


def is_torch(path: str) -> bool:
    """Tells whether a file is torch's, here or on another host."""
    return path.startswith(torch_folder()) or any(f"{folder}torch/" in path for folder in _PACKAGES)


def is_of_python(path: str) -> bool:
    """Tells whether a file belongs to Python's standard library."""
    return path.startswith(_folders("stdlib")) and not is_package(path)


@cache
def torch_folder() -> str:
    """Returns torch's folder, with a slash at its end, without importing torch."""
    spec = find_spec("torch")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return f"{places[0]}/" if places else "/no torch/"


@cache
def _folders(*names: str) -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}/" for name in names)
