"""Recorded tables: durations and figures of every setting in a space, for replaying searches.

A table is a folder like a sweep's: `trials.jsonl` and, with its environment, `sweep.json`. `benchmarks.search.make_table` makes
one of a sweep, without what replays do not need.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.objectives import Record
from compile_sweep.schema.outcome import LOST_TO_MACHINES
from compile_sweep.schema.record import TRIALS_FILE, TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates
from orchestrator.search.earlier_sweeps import Origin
from orchestrator.search.stopping import gpu_s

NOT_IN_TABLES = ("step_ms", "numerics", "source", "perf_hints", "graph_break_reasons", "recompile_reasons")
"""Fields that make up most of a record and that no search uses."""

SWEPT = "give a folder that a sweep wrote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Every setting of a space with its result."""

    name: str
    rows: Mapping[str, Record]
    """Fields of the record that counts for each setting, by its key, in the order of the log; `warm_start_s` if known."""
    candidates: Candidates
    origin: Origin
    facts: WorkloadFacts
    """What the records say about the workload: its maximum length."""

    @property
    def workload(self) -> str:
        """Workload and size."""
        return f"{self.origin.workload} {self.origin.size}"

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of all settings."""
        return sum(map(gpu_s, self.rows.values()))


def read_table(folder: Path) -> Table:
    """Reads the table in a folder, whose records must be of one workload in one environment; raises RecordsError if not."""
    try:
        if not (folder / TRIALS_FILE).is_file():
            raise RecordsError(f"{folder} holds no {TRIALS_FILE}; {SWEPT}")
    except OSError as error:
        raise RecordsError(f"{folder} cannot be read ({error.strerror}); {SWEPT}") from None
    every = records.standing(records.read(folder))
    found = {key: record for key, record in every.items() if record.label not in LOST_TO_MACHINES}
    if not found:
        raise RecordsError(f"{folder / TRIALS_FILE} holds no record of what a setting came to; {SWEPT}")
    origin = Origin.of_all(found.values())
    for record in found.values():
        if difference := origin.difference(Origin.of(record)):
            raise RecordsError(f"{folder} is not a table of one origin: trial {record.trial_id} has {difference}")
    warm = {start.settings_key: start.warm_start_s for start in records.read_warm_starts(folder) if start.status == "ok"}
    return Table(
        name=folder.resolve().name,
        rows={key: {**_fields(record), "warm_start_s": warm.get(key)} for key, record in found.items()},
        candidates=Candidates([CompileSettings.from_dict(record.settings) for record in found.values()]),
        origin=origin,
        facts=WorkloadFacts(max_length=_max_length(list(found.values()))),
    )


def _fields(record: TrialRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name not in NOT_IN_TABLES}


def _max_length(done: list[TrialRecord]) -> int:
    """Returns the longest sequence that any setting was measured at or names."""
    lengths = [record.mean_length or 0.0 for record in done]
    lengths += [float(value) for record in done for value in record.settings.get("buckets") or ()]
    lengths += [float(record.settings.get(name) or 0) for record in done for name in ("bucket_size", "dynamic_max")]
    return max(1, math.ceil(max(lengths)))
