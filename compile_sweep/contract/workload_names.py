"""Names of workloads: built-in ones, those of installed packages, `package.module:Class`, `file.py:Class`. Needs no torch."""

import importlib
import os
import re
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from compile_sweep.child_process import only_in_this_process
from compile_sweep.own_packages import find_own_packages
from compile_sweep.schema.errors import WorkloadError
from compile_sweep.schema.journal import read_regular

BUILT_IN = {
    "captioning": "workloads.captioning:Captioning",
    "decoder": "workloads.decoder:Decoder",
    "detection": "workloads.detection:Detection",
    "gpt2": "workloads.gpt2:Gpt2",
    "gpt2-inference": "workloads.gpt2:Gpt2Inference",
    "layers": "workloads.layers:Layers",
    "layers-inference": "workloads.layers:LayersInference",
    "resnet": "workloads.resnet:ResNet",
    "segmentation": "workloads.segmentation:Segmentation",
}
"""Short names of the workloads in this project."""

ENTRY_POINT_GROUP = "compile_sweep.workloads"
"""Entry point group through which an installed package gives its workloads short names."""


def named_workloads() -> dict[str, str]:
    """Returns short names of workloads with their location, `package.module:Class`: the project's own and installed packages'."""
    return {**{point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}, **BUILT_IN}


def is_in_users_folder(name: str) -> bool:
    """Tells whether a workload is named as it would be imported from the current folder."""
    return ":" in name


def find_workload(name: str) -> tuple[str, str]:
    """Returns module and class that a workload's name stands for, without importing either; raises WorkloadError for others."""
    if is_in_users_folder(name):
        _, module, class_name = _in_users_folder(name)
        return module, class_name
    if target := BUILT_IN.get(name) or named_workloads().get(name):  # the latter reads every installed package's metadata
        module, _, class_name = target.partition(":")
        return module, class_name
    if name.endswith(".py"):
        as_script = (
            "" if _has_workload(Path(name)) else f"name a training script by its option, --script {name}; for a workload, "
        )
        raise WorkloadError(f"no workload is called {name!r}; {as_script}add the class in that file: {name}:Class")
    known = named_workloads()
    close = get_close_matches(name, known, n=1)
    options = f"use one of {', '.join(known)}, or package.module:Class or path/to/file.py:Class"
    raise WorkloadError(f"no workload is called {name!r}; {f'did you mean {close[0]}?' if close else options}")


def _has_workload(file: Path) -> bool:
    """Tells from a file's text whether it may define a workload: a class of one, or a `WorkloadFromModel`."""
    try:
        return re.search(rb"^(class .*|\w+ = .*)Workload", read_regular(file), re.MULTILINE) is not None
    except OSError:
        return False


def _in_users_folder(name: str) -> tuple[str, str, str]:
    """Returns the folder to import a user's workload from, its module and its class.

    A file in a package is imported as part of that package, so that its relative imports work. A worker may have another current
    folder: it finds a relative path from the folders of `sys.path`, among which the user's comes first.
    """
    where, _, class_name = name.rpartition(":")
    if not where.endswith(".py"):
        if not all(part.isidentifier() for part in [*where.split("."), class_name]):
            raise WorkloadError(f"no workload is called {name!r}; write package.module:Class or path/to/file.py:Class")
        return os.getcwd(), where, class_name
    places = [os.path.abspath(os.path.join(folder, where)) for folder in (os.getcwd(), *sys.path)]
    file = next((place for place in places if os.path.isfile(place)), None)
    if file is None:
        raise WorkloadError(f"workload {name!r}: there is no file {places[0]}")
    folder, parts = os.path.dirname(file), [os.path.basename(file).removesuffix(".py")]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    if not all(part.isidentifier() for part in [*parts, class_name]):
        raise WorkloadError(
            f"workload {name!r}: {'.'.join(parts)}:{class_name} is no name that Python imports; use letters, digits and _ only"
        )
    return folder, ".".join(parts), class_name


def import_named(name: str) -> Any:
    """Imports a workload's module and returns its attribute with the class's name; None if there is none."""
    module, class_name = find_workload(name)
    if name in BUILT_IN:
        find_own_packages("workloads")
    elif is_in_users_folder(name):
        folder, _, _ = _in_users_folder(name)
        for place in (os.getcwd(), folder):  # the former is needed by a `best.py` in another folder
            if place not in sys.path:
                sys.path.insert(0, place)
    with only_in_this_process():
        try:
            return getattr(importlib.import_module(module), class_name, None)
        except (Exception, SystemExit) as error:  # a user's module may raise anything on import
            raise WorkloadError(f"workload {name!r}: importing {module} failed: {type(error).__name__}: {error}") from error
