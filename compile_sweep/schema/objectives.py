"""Objectives and constraints of a search, on the figures of a record. Pure values.

A record is any mapping with the fields of a `TrialRecord`: `dataclasses.asdict` of one, or a row of a recorded table.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Self, get_args, get_type_hints

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.pareto import Losses
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.setting_text import suggest

Record = Mapping[str, Any]
"""Fields of a `TrialRecord` by name. A missing field counts as a figure that was not reached."""


class Goal(StrEnum):
    """The direction in which a figure is better."""

    MAX = "max"
    MIN = "min"


def _is_numeric(kind: Any) -> bool:
    return kind in (int, float) or (isinstance(kind, UnionType) and any(one in (int, float) for one in get_args(kind)))


FIELDS = (*(name for name, kind in get_type_hints(TrialRecord).items() if _is_numeric(kind)), "warm_start_s")
"""What objectives and constraints can refer to: the numeric fields of a trial's record, and the time of its warm start."""

_UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": {
        "B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
        "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
    },
    "s": {"ms": 1e-3, "s": 1, "min": 60, "h": 3600},
    "ms": {"ms": 1, "s": 1e3, "min": 60e3},
}  # fmt: skip
"""Units for bounds, by the field's own unit, with their size in that unit."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A figure to maximize or minimize."""

    name: str
    goal: Goal

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses text such as `samples_per_s:max`; raises ConfigError for an unknown figure or without a direction."""
        name, _, goal = (part.strip() for part in text.partition(":"))
        _check_field(name, f"objective {text!r}")
        if goal not in tuple(Goal):
            raise ConfigError(f"objective {text!r} does not say which way is better; write {name}:max or {name}:min")
        return cls(name, Goal(goal))

    def __str__(self) -> str:
        return f"{self.name}:{self.goal}"

    def loss(self, record: Record) -> float | None:
        """Returns the record's figure, negated if more is better; None if it was not reached."""
        value = assured(record, self.name, at_most=self.goal is Goal.MIN)
        return None if value is None else self.sign * value

    @property
    def sign(self) -> float:
        """Factor that turns a figure into a loss, and a loss back into a figure."""
        return 1.0 if self.goal is Goal.MIN else -1.0


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound that a figure must meet for a setting to be usable."""

    name: str
    is_upper: bool  # whether the bound is a maximum; otherwise it is a minimum
    bound: float  # the bound, in the field's own unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses text such as `compile_s<=120` or `peak_memory_bytes<=40GiB`; raises ConfigError if it does not fit."""
        found = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
        if found is None:
            raise ConfigError(f"constraint {text!r} is not a bound; write it like compile_s<=120 or peak_memory_bytes<=40GiB")
        name, sign, number, unit = found.groups()
        _check_field(name, f"constraint {text!r}")
        bound = float(number) * _scale(name, unit, text)
        if not math.isfinite(bound):
            raise ConfigError(f"constraint {text!r} has a bound that is not finite; use a number")
        return cls(name, sign == "<=", bound)

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.is_upper else '>='}{self.bound:g}"

    def violation(self, record: Record) -> float | None:
        """Returns by which fraction of the bound the figure misses it: 0 or less if met, None if the figure was not reached."""
        value = self.figure_of(record)
        return None if value is None else self.excess(value)

    def figure_of(self, record: Record) -> float | None:
        """Returns the record's `assured` figure; None if it was not reached."""
        return assured(record, self.name, at_most=self.is_upper)

    def excess(self, value: float) -> float:
        """Returns by which fraction of the bound a figure misses it; 0 or less if it is met."""
        return (value - self.bound if self.is_upper else self.bound - value) / (abs(self.bound) or 1.0)


@dataclass(frozen=True, slots=True)
class Aims:
    """What a search optimizes: objectives, and constraints that must all be met."""

    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ConfigError("no objective is given; give at least one, such as samples_per_s:max")
        names = [objective.name for objective in self.objectives]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"the objective {name} is given twice; give it once")

    @classmethod
    def parse(cls, objectives: Iterable[str] = (), constraints: Iterable[str] = ()) -> Self:
        """Parses objectives (by default the usual three) and constraints; raises ConfigError for an invalid or repeated one."""
        chosen = tuple(Objective.parse(text) for text in objectives) or DEFAULT_OBJECTIVES
        return cls(chosen, tuple(Constraint.parse(text) for text in constraints))

    def losses(self, record: Record) -> Losses | None:
        """Returns one number per objective, lower is better, whatever the status; None where a figure is missing."""
        values = [objective.loss(record) for objective in self.objectives]
        return None if None in values else tuple(value for value in values if value is not None)

    def violations(self, record: Record) -> tuple[float, ...]:
        """Returns how far a record is from usable: for its own failure, then for each constraint. Above 0 is a violation.

        A trial that failed, or has no figure for an objective, violates by 1; so does a constraint whose figure was not reached.
        That way failures teach a sampler where not to look.
        """
        has_failed = record.get("status") != Status.OK or self.losses(record) is None
        bounds = [constraint.violation(record) for constraint in self.constraints]
        return (float(has_failed), *(1.0 if bound is None else bound for bound in bounds))

    def is_usable(self, record: Record) -> bool:
        """Tells whether the record may be on the front: status ok, a figure for every objective, and every constraint met."""
        return all(violation <= 0 for violation in self.violations(record))

    def usable_losses(self, records: Iterable[Record]) -> list[Losses]:
        """Returns the losses of the usable records, for fronts and hypervolumes."""
        found = (self.losses(record) for record in records if self.is_usable(record))
        return [losses for losses in found if losses is not None]

    def refuse_infeasible(self, records: Sequence[Record]) -> None:
        """Raises ConfigError if no record meets the constraints; the message names the constraint and the nearest figure."""
        if any(self.is_usable(record) for record in records):
            return
        measured = [record for record in records if record.get("status") == Status.OK and self.losses(record) is not None]
        if not measured:
            objectives = ", ".join(objective.name for objective in self.objectives)
            raise ConfigError(f"none of the {len(records)} records is ok with figures for {objectives}, so there is no front")
        for constraint in self.constraints:
            figures = [value for record in measured if (value := constraint.figure_of(record)) is not None]
            if not figures:
                raise ConfigError(f"no record has a figure for the constraint {constraint}; leave it out")
            if constraint.excess(nearest_to := min(figures, key=constraint.excess)) > 0:
                raise ConfigError(f"no setting meets the constraint {constraint}; the nearest has {nearest_to:.4g}")
        words = ", ".join(map(str, self.constraints))
        raise ConfigError(f"no setting meets all constraints at once ({words}); relax one of them")


DEFAULT_OBJECTIVES = (
    Objective("samples_per_s", Goal.MAX),
    Objective("compile_s", Goal.MIN),
    Objective("peak_memory_bytes", Goal.MIN),
)


def figure(record: Record, name: str) -> float | None:
    """Returns a record's figure as a finite number, or None. A warm trial's compile time is its estimate of the cold one."""
    is_warm = record.get("caches") == Caches.WARM
    value = record.get("cold_equivalent_s" if name == "compile_s" and is_warm else name)
    # NaN is excluded, too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def assured(record: Record, name: str, *, at_most: bool) -> float | None:
    """Returns the figure or, if the trial's steps were too noisy (`stable` is false), the worse end of its 95% interval.

    None if the figure is missing, or if its worse end is an upper one that is unbounded.

    Args:
        name: Name of the figure; a figure without an interval is returned unchanged.
        at_most: Whether the upper end is the worse one.
    """
    value = figure(record, name)
    of, interval = INTERVALS.get(name, (name, ""))
    ends, centre = record.get(interval), figure(record, of)
    if value is None or record.get("stable") is not False or not ends or not centre:
        return value
    end = ends[1 if at_most else 0]
    if end is None or not math.isfinite(end):
        return None if at_most else value
    return value * float(end) / centre


_RATE = ("samples_per_s", "samples_per_s_ci95")
INTERVALS = {
    "samples_per_s": _RATE,
    "samples_per_s_per_worker": _RATE,
    "tokens_per_s": _RATE,
    "step_ms_median": ("step_ms_median", "step_ms_ci95"),
    "speedup_eager": ("speedup_eager", "speedup_eager_ci95"),
}
"""By figure: the figure whose interval gives its relative uncertainty, and the field with that interval."""


def _check_field(name: str, where: str) -> None:
    if name not in FIELDS:
        raise ConfigError(f"{where}: no numeric field of a record is called {name!r}; {suggest(name, FIELDS)}")


def _scale(name: str, unit: str, text: str) -> float:
    words = name.split("_")
    own = next((word for word in ("bytes", "ms", "s") if word in words and "per" not in words), "")
    units = _UNITS.get(own, {})
    if not unit:
        return 1.0
    if unit not in units:
        hint = f"use one of {', '.join(units)}" if units else "leave the unit out"
        raise ConfigError(f"constraint {text!r}: {unit!r} is not a unit of {name}; {hint}")
    return float(units[unit])
