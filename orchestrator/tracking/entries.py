"""What trackers are told of a trial, made from its record. Pure."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple

from orchestrator.records import TrialRecord, WarmStart
from workloads.settings import CompileSettings
from workloads.spelling import flattened, spelled

SERIES = ("step_ms", "eager_step_ms")
"""Fields with a figure for every step."""

_NOT_FIGURES = ("settings", "trial_id", "settings_key", "source", "schema_version")


class LoggedTrial(NamedTuple):
    """A trial, or a start from artifacts, as every tracker takes it."""

    trial_id: str
    name: str
    """Short text for a person."""
    is_warm_start: bool
    is_ok: bool
    params: dict[str, str]
    """The setting's fields."""
    metrics: dict[str, float]
    """The record's figures that are finite, under their fields' names; an interval's ends as `_low` and `_high`, what is by
    phase or the like under dotted names."""
    series: dict[str, list[float]]
    """A figure for every step."""
    tags: dict[str, str]
    """What else the record says: status, label, reason, workload, device, …"""
    source: str | None
    """The setting as Python."""
    began_at: datetime | None
    wall_s: float


def entry_of(record: TrialRecord | WarmStart) -> LoggedTrial:
    """The record as trackers take it."""
    setting = CompileSettings.from_dict(record.settings)
    is_warm_start = isinstance(record, WarmStart)
    metrics: dict[str, float] = {}
    tags = {"kind": "warm-start" if is_warm_start else "trial", "settings_key": record.settings_key, "trial_id": record.trial_id}
    for field in fields(record):
        value = getattr(record, field.name)
        if value is None or field.name in _NOT_FIGURES or field.name in SERIES:
            continue
        _sort_in(field.name, value, metrics, tags)
    return LoggedTrial(
        trial_id=record.trial_id,
        name=("warm start: " if is_warm_start else "") + setting.label,
        is_warm_start=is_warm_start,
        is_ok=str(record.status) == "ok",
        params={name: spelled(value) for name, value in flattened(setting.fields_that_apply())},
        metrics=metrics,
        series={name: values for name in SERIES if (values := [one for one in getattr(record, name, []) if math.isfinite(one)])},
        tags=tags,
        source=getattr(record, "source", None),
        began_at=_instant(record.started_at),
        wall_s=record.wall_s,
    )


def _sort_in(name: str, value: Any, metrics: dict[str, float], tags: dict[str, str]) -> None:
    """Puts a field's value among the figures or among the tags; empty ones nowhere."""
    if isinstance(value, bool):
        tags[name] = "true" if value else "false"
    elif isinstance(value, int | float):
        if math.isfinite(value):
            metrics[name] = float(value)
    elif isinstance(value, tuple) and len(value) == 2:
        for end, one in zip(("low", "high"), value, strict=True):
            _sort_in(f"{name.removesuffix('_ci95')}_{end}", one, metrics, tags)
    elif isinstance(value, dict):
        for inner, one in flattened(value):
            if one is not None:
                _sort_in(f"{name}.{inner}", one, metrics, tags)
    elif isinstance(value, list | tuple):
        if value:
            tags[name] = "\n".join(map(str, value))
    elif str(value):
        tags[name] = str(value)


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
