"""Names of workloads: the built-in ones, those of installed packages, and `package.module:Class`. Needs no torch."""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from compile_sweep.own_packages import find_own_packages
from compile_sweep.schema.errors import WorkloadError

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
    """Returns the module and the class that a workload's name stands for, without importing either.

    Raises:
        WorkloadError: There is no workload of that name, and it is not written like `package.module:Class`.
    """
    target = BUILT_IN.get(name) or (name if is_in_users_folder(name) else named_workloads().get(name, name))
    module, colon, class_name = target.partition(":")
    if not (colon and class_name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        known = named_workloads()
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}, or package.module:Class"
        raise WorkloadError(f"no workload is called {name!r}; {hint}")
    return module, class_name


def import_named(name: str) -> Any:
    """Imports the module of a workload and returns its attribute with the class's name; None if there is none.

    Raises:
        WorkloadError: There is no such workload, or its module does not import.
    """
    module, class_name = find_workload(name)
    if name in BUILT_IN:
        find_own_packages("workloads")
    elif is_in_users_folder(name) and os.getcwd() not in sys.path:  # needed by a `best.py` in another folder
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), class_name, None)
    except (Exception, SystemExit) as error:  # a user's module may raise anything on import
        raise WorkloadError(f"workload {name!r}: importing {module} failed: {type(error).__name__}: {error}") from error
