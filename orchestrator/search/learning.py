"""What earlier sweeps' records may teach a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from orchestrator import records
from orchestrator.errors import ConfigError
from orchestrator.objectives import Aims, Losses, Record, front
from orchestrator.records import TrialRecord
from workloads.settings import CompileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What must be equal for one sweep's figures to be another's."""

    workload: str
    size: str
    environment_key: str | None
    num_workers: int
    pipeline: str

    @classmethod
    def of(cls, record: TrialRecord) -> Origin:
        """Where a record's figures are from."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})

    def difference(self, other: Origin) -> str | None:
        """In what another origin differs, in words; None if in nothing."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs or mine is None:
                return f"{field.name.replace('_', ' ')} {_shown(theirs)} instead of {_shown(mine)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What there is to begin a search with."""

    records: tuple[Record, ...] = ()
    """Of the same workload in the same environment: to tell the proposer before it proposes."""
    known_good: tuple[CompileSettings, ...] = ()
    """Fronts of other workloads or environments: to try first, because their figures do not count here."""


def learn_from(folders: Iterable[Path], origin: Origin, aims: Aims, *, force: bool = False) -> Learned:
    """Reads earlier sweeps.

    Args:
        folders: theirs.
        origin: the new sweep's.
        aims: by which the best of the others are told.
        force: take what is of another origin as settings to begin with, instead of refusing it.

    Raises:
        ConfigError: a folder has no records, or records of another origin and `force` is not given.
        RecordsError: a folder's records cannot be read.
    """
    told: list[Record] = []
    known_good: dict[str, CompileSettings] = {}
    for folder in folders:
        found = list(records.standing(records.read(folder)).values())
        if not found:
            raise ConfigError(f"--learn-from {folder} holds no trial's record; name a folder that a sweep wrote")
        others = [record for record in found if origin.difference(Origin.of(record)) is not None]
        if others and not force:
            difference = origin.difference(Origin.of(others[0]))
            raise ConfigError(
                f"--learn-from {folder}: its figures are from {difference}, so they are none of this sweep's; "
                "force it to try its best settings first all the same"
            )
        told += [asdict(record) for record in found if record not in others]
        known_good |= {setting.key: setting for setting in best_settings([asdict(record) for record in others], aims)}
    return Learned(records=tuple(told), known_good=tuple(known_good.values()))


def best_settings(rows: Sequence[Record], aims: Aims) -> list[CompileSettings]:
    """Settings on the front of some records, the best in the first objective first."""
    usable: list[tuple[Losses, str]] = []
    for row in rows:
        losses = aims.losses(row)
        if losses is not None and aims.is_usable(row):
            usable.append((losses, str(row["settings_key"])))
    best = set(front(losses for losses, _ in usable))
    return [CompileSettings.parse(key) for losses, key in sorted(usable) if losses in best]


def _shown(value: Any) -> str:
    return "unknown" if value is None or value == "" else str(value)
