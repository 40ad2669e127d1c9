"""Makes a recorded table of a sweep's folder, without what replays do not need: some hundred settings stay below a megabyte.

python -m benchmarks.search.make_table SWEEP benchmarks/tables/NAME
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from compile_sweep import command_line
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError, SweepFolderError
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, WARM_STARTS_FILE
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.tables import NOT_IN_TABLES, SWEPT, Table, read_table

PROG = "python -m benchmarks.search.make_table"


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
        lines.append({name: value for name, value in values.items() if name not in NOT_IN_TABLES and value not in (None, [], {})})
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
        raise RecordsError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); {SWEPT}") from None
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


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


main = command_line.main_of(Options, _make, PROG)

if __name__ == "__main__":
    sys.exit(main())
