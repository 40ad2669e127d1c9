"""The configuration of a sweep that is taken up again, checked before anything goes by it: anybody may have written it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from orchestrator import folder, records
from orchestrator.config import CachePolicy, Device, Placement
from orchestrator.errors import RecordsError
from orchestrator.search.named import Searcher
from workloads.spelling import quoted
from workloads.vocabulary import Pipeline

_KINDS: Mapping[str, Any] = {
    "recipe": str, "workload": str, "size": str, "settings": list[str], "seed": int, "device": Device, "pipeline": Pipeline,
    "workers_per_trial": int, "max_concurrent": int, "placement": Placement, "cache": str | None, "caches": CachePolicy,
    "precompile": bool, "compile_deadline_s": float, "trial_deadline_s": float, "storage": str | None,
    "log_to": list[str], "search": dict,
}  # fmt: skip
"""What a sweep to resume is asked for, if its `sweep.json` says it."""

_SEARCH_KINDS: Mapping[str, Any] = {
    "searcher": Searcher | None, "objectives": list[str], "constraints": list[str], "stop": str | None, "num_trials": int | None,
    "gpu_budget_s": float | None, "learn_from": list[str], "learn_anyway": bool, "prune": bool,
}  # fmt: skip


def stored_config(output: Path) -> dict[str, Any]:
    """What `sweep.json` in the folder says the sweep was asked for; nothing if there is none.

    Raises:
        RecordsError: it cannot be read, or is no sweep that this version wrote.
    """
    path = output / records.SWEEP_FILE
    try:
        if not path.exists():
            return {}
    except OSError as error:  # a folder that lets nobody in, a name too long
        raise RecordsError(f"{path} cannot be read ({error.strerror}); name another --output") from None
    config = dict(folder.read_sweep(output)["config"])
    for name, value in (*_misfits(config, _KINDS), *_misfits(_mapping(config.get("search")), _SEARCH_KINDS)):
        raise RecordsError(f"{path} is no sweep this version wrote ({name} is {quoted(value)}); name another --output")
    return config


def _misfits(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, values[name]) for name, kind in kinds.items() if name in values and not _is_of(values[name], kind))


def _is_of(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(member, *get_args(kind)) for member in value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return isinstance(value, str) and value in list(kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:  # JSON's numbers end nowhere
        return False
    return isinstance(value, int | float if kind is float else kind)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
