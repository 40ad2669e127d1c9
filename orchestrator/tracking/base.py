"""Destinations that trials are logged to besides the sweep's folder, as `--log-to` spells them.

Also converts a trial's record, and the sweep's `sweep.json`, to what trackers show of them.
"""

import math
import re
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import TrialRecord, WarmStart
from compile_sweep.schema.setting_text import flatten, format_value
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import HIDDEN, shown
from orchestrator.run import sweep_folder


class Service(StrEnum):
    """A tracking service."""

    MLFLOW = "mlflow"
    """The URI of a tracking server or database, or a folder, which then holds an SQLite store and its artifacts."""
    TENSORBOARD = "tensorboard"
    """A folder of event files."""
    WANDB = "wandb"
    """A project, or ENTITY/PROJECT."""


_PROJECT = re.compile(r"([\w.-]+/)?[\w.-]+")
_LIKE = "mlflow:http://HOST:5000, mlflow:DIR, tensorboard:DIR or wandb:PROJECT"


@dataclass(frozen=True, slots=True)
class Destination:
    """A place that trials are logged to."""

    service: Service
    where: str  # A URI, an absolute folder, or a project. It may contain a password; `str` hides it.

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `SERVICE:WHERE`; raises ConfigError for other text."""
        name, colon, where = text.strip().partition(":")
        if name not in list(Service) or not colon or not where.strip():
            raise ConfigError(f"--log-to {shown(text)!r} is not a place to log to; write it like {_LIKE}")
        if HIDDEN in where:
            raise ConfigError(f"the password of --log-to {shown(text)} was not written down; give --log-to again")
        service, where = Service(name), where.strip()
        if service is Service.WANDB:
            if not _PROJECT.fullmatch(where):
                raise ConfigError(f"--log-to {shown(text)} is not a W&B project; write wandb:PROJECT or wandb:ENTITY/PROJECT")
        elif "://" not in where and not where.startswith("databricks"):
            try:
                where = str(Path(where).expanduser().absolute())
            except RuntimeError:
                raise ConfigError(f"--log-to {shown(text)} is not a folder: there is no such user; name another") from None
        elif service is Service.TENSORBOARD:
            raise ConfigError(f"--log-to {shown(text)} is not a folder, and TensorBoard's event files go to one")
        return cls(service, where)

    @property
    def spelled(self) -> str:
        """Returns the text that `parse` reads back, password included."""
        return f"{self.service}:{self.where}"

    def __str__(self) -> str:
        return shown(self.spelled)


SERIES = ("step_ms", "eager_step_ms")  # fields with one value per step

_NOT_FIGURES = ("settings", "trial_id", "settings_key", "source", "schema_version")


class LoggedTrial(NamedTuple):
    """A trial, or a warm start, in the form that every tracker takes."""

    trial_id: str
    name: str
    is_warm_start: bool
    is_ok: bool
    params: dict[str, str]
    metrics: dict[str, float]
    """The record's finite figures under their field names. An interval's ends get the suffixes `_low` and `_high`; figures by
    phase and similar mappings get dotted names.
    """
    series: dict[str, list[float]]
    """One value per step, by field name."""
    tags: dict[str, str]
    """The rest of the record: status, label, reason, workload, device, …"""
    source: str | None
    began_at: datetime | None
    wall_s: float


def entry_of(record: TrialRecord | WarmStart) -> LoggedTrial:
    """Converts a record to the form that trackers take."""
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
        params={name: format_value(value) for name, value in flatten(setting.fields_that_apply())},
        metrics=metrics,
        series={name: values for name in SERIES if (values := [one for one in getattr(record, name, []) if math.isfinite(one)])},
        tags=tags,
        source=getattr(record, "source", None),
        began_at=_instant(record.started_at),
        wall_s=record.wall_s,
    )


def _sort_in(name: str, value: Any, metrics: dict[str, float], tags: dict[str, str]) -> None:
    """Adds a field's value to the metrics or to the tags; skips empty values."""
    if isinstance(value, bool):
        tags[name] = "true" if value else "false"
    elif isinstance(value, int | float):
        if math.isfinite(value):
            metrics[name] = float(value)
    elif isinstance(value, tuple) and len(value) == 2:
        for end, one in zip(("low", "high"), value, strict=True):
            _sort_in(f"{name.removesuffix('_ci95')}_{end}", one, metrics, tags)
    elif isinstance(value, dict):
        for inner, one in flatten(value):
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


_IN_THE_FOLDER = ("settings", "excluded")  # configuration fields that are too long to show in a tracker


class SweepFacts(NamedTuple):
    """What trackers show of a sweep."""

    name: str
    identity: str  # equal for every run of one sweep, different between sweeps
    what: str  # workload and size, valid as a name in any tracker
    config: dict[str, str]
    environment: dict[str, str]


def facts_of(output: Path) -> SweepFacts:
    """Reads a sweep's facts from the folder's `sweep.json`; raises RecordsError if this version did not write it."""
    sweep: dict[str, Any] = sweep_folder.read_sweep(output)
    config, environment = dict(sweep["config"]), dict(sweep["environment"])
    name = output.absolute().name
    first = next(iter(sweep.get("runs", [])), sweep)  # each run of a resumed sweep records when it began itself
    return SweepFacts(
        name=name,
        identity=f"{name} {first.get('started_at', '')}".strip(),
        what="-".join(str(config[key]).replace(":", ".") for key in ("workload", "size") if config.get(key)),
        config=_words({key: value for key, value in config.items() if key not in _IN_THE_FOLDER}),
        environment=_words(environment),
    )


def _words(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in flatten(values) if value not in (None, "", [])}
