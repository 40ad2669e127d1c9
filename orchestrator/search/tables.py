"""Recorded tables: durations and figures of every setting in a space, for replaying searches.

A table is a folder like a sweep's: `trials.jsonl` and, with its environment, `sweep.json`. It is made from a sweep's folder,
without what replays do not need, so that a table of some hundred settings stays below a megabyte:

    python -m orchestrator.search.tables SWEEP benchmarks/tables/NAME
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from compile_sweep import command_line
from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError, SweepFolderError
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.objectives import Record
from compile_sweep.schema.outcome import LOST_TO_MACHINES
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE, TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates
from orchestrator.search.earlier_sweeps import Origin
from orchestrator.search.stopping import gpu_s

PROG = "python -m orchestrator.search.tables"

_LEFT_OUT = ("step_ms", "numerics", "source", "perf_hints", "graph_break_reasons", "recompile_reasons")
"""Fields that make up most of a record and that no search uses."""

_SWEEP = "give a folder that a sweep wrote"


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
            raise RecordsError(f"{folder} holds no {TRIALS_FILE}; {_SWEEP}")
    except OSError as error:
        raise RecordsError(f"{folder} cannot be read ({error.strerror}); {_SWEEP}") from None
    every = records.standing(records.read(folder))
    found = {key: record for key, record in every.items() if record.label not in LOST_TO_MACHINES}
    if not found:
        raise RecordsError(f"{folder / TRIALS_FILE} holds no record of what a setting came to; {_SWEEP}")
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


def write_table(sweep: Path, folder: Path) -> Table:
    """Makes a table of a sweep in a folder, replacing the one there; RecordsError if the sweep cannot be one."""
    read_table(sweep)
    if folder.resolve() == sweep.resolve() or "config" in (_described(found) if (found := folder / SWEEP_FILE).is_file() else ()):
        raise SweepFolderError(f"{folder} holds a sweep, of which a table keeps only a part; name another folder for the table")
    lines = []
    for record in records.standing(records.read(sweep)).values():
        values = json.loads(record.to_json())
        values["settings"] = CompileSettings.from_dict(record.settings).fields_that_apply()
        values["eager_step_ms"] = [round(step, 2) for step in values["eager_step_ms"]]
        lines.append({name: value for name, value in values.items() if name not in _LEFT_OUT and value not in (None, [], {})})
    texts = {TRIALS_FILE: "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)}
    if (sweep / WARM_STARTS_FILE).is_file():
        texts[WARM_STARTS_FILE] = read_regular(sweep / WARM_STARTS_FILE).decode("utf-8")
    if (sweep / SWEEP_FILE).is_file():
        told = _described(sweep / SWEEP_FILE)
        kept = {name: told[name] for name in ("schema_version", "environment", "environment_key", "started_at") if name in told}
        texts[SWEEP_FILE] = json.dumps(kept, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace(folder / name, text)
    except OSError as error:
        raise SweepFolderError(f"{folder} cannot be written ({error.strerror or error}); name a folder that can") from None
    return read_table(folder)


def _described(path: Path) -> Mapping[str, Any]:
    try:
        told = json.loads(read_regular(path).decode("utf-8"))
        if not isinstance(told, dict):
            raise TypeError("no JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RecordsError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); {_SWEEP}") from None
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Turn a sweep's folder into a table to replay searches on."""

    sweep: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")]
    """The sweep's folder."""
    table: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """The folder to write."""


def _make(options: Options) -> int:
    table = write_table(options.sweep, options.table)
    size = sum(file.lstat().st_size for file in options.table.iterdir())
    print(f"{options.table}: {len(table.rows)} settings of {table.workload}, {table.gpu_s:,.0f} GPU-seconds, {size:,} bytes")
    return 0


def _fields(record: TrialRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name not in _LEFT_OUT}


def _max_length(done: list[TrialRecord]) -> int:
    """Returns the longest sequence that any setting was measured at or names."""
    lengths = [record.mean_length or 0.0 for record in done]
    lengths += [float(value) for record in done for value in record.settings.get("buckets") or ()]
    lengths += [float(record.settings.get(name) or 0) for record in done for name in ("bucket_size", "dynamic_max")]
    return max(1, math.ceil(max(lengths)))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


main = command_line.main_of(Options, _make, PROG)

if __name__ == "__main__":
    sys.exit(main())
