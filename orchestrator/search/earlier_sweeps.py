"""Selects what earlier sweeps' records may teach a new sweep."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Self

from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.outcome import LOST_TO_MACHINES
from compile_sweep.schema.pareto import front
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What must be equal for one sweep's figures to be valid for another."""

    workload: str
    size: str
    environment_key: str | None  # None if it is not known
    num_workers: int
    pipeline: str

    @classmethod
    def of(cls, record: TrialRecord) -> Self:
        """Returns the origin of a record's figures."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})

    @classmethod
    def of_all(cls, found: Iterable[TrialRecord]) -> Self:
        """Returns the common origin of one or more records' figures; trials that died do not reveal the environment."""
        origins = [cls.of(record) for record in found]
        return next((origin for origin in origins if origin.environment_key is not None), origins[0])

    def difference(self, other: Self) -> str | None:
        """Says in what another origin is known to differ; None if in nothing."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs and theirs is not None:
                return f"{field.name.replace('_', ' ')} {theirs} instead of {mine or 'unknown'}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a search begins with."""

    records: tuple[Record, ...] = ()
    """Records of the same workload in the same environment, which the proposer sees before it proposes."""
    known_good: tuple[CompileSettings, ...] = ()
    """Fronts of other workloads or environments, to try first; their figures do not count here."""


def learn_from(folders: Iterable[Path], origin: Origin, aims: Aims, *, force: bool = False) -> Learned:
    """Reads earlier sweeps; raises ConfigError for one of another origin, unless `force` begins with its best settings."""
    told: list[Record] = []
    known_good: dict[str, CompileSettings] = {}
    for folder in folders:
        found = list(records.standing(records.read(folder)).values())
        if not found:
            raise ConfigError(f"--learn-from {folder} holds no trial records; name a folder that a sweep wrote")
        if Origin.of_all(found).environment_key is None:
            raise ConfigError(f"--learn-from {folder}: no trial of it says in which environment it ran; name another sweep")
        if origin.environment_key is None:
            origin = replace(origin, environment_key=Origin.of_all(found).environment_key)
        others = [record for record in found if origin.difference(Origin.of(record)) is not None]
        if others and not force:
            difference = origin.difference(Origin.of(others[0]))
            raise ConfigError(
                f"--learn-from {folder}: its figures are from {difference}, so they are none of this sweep's; "
                "force it to try its best settings first all the same"
            )
        told += [asdict(record) for record in found if record not in others and record.label not in LOST_TO_MACHINES]
        known_good |= {setting.key: setting for setting in best_settings([asdict(record) for record in others], aims)}
    return Learned(records=tuple(told), known_good=tuple(known_good.values()))


def best_settings(rows: Sequence[Record], aims: Aims) -> list[CompileSettings]:
    """Returns the settings on the front of some records, the best in the first objective first."""
    known = [(losses, row) for row in rows if (losses := aims.losses(row)) is not None]
    usable = [(losses, str(row["settings_key"])) for losses, row in known if aims.is_usable(row)]
    best = set(front(losses for losses, _ in usable))
    return [CompileSettings.parse(key) for losses, key in sorted(usable) if losses in best]
