"""Public tables of GPU kernels as recorded tables, so that searchers that know nothing of kernels can be replayed on them.

A table is a CSV file: a row for each configuration, its parameters first, then `time_ms` (empty if it did not compile or run),
`compile_s` and `total_s`, which is what a replay charges. Such files are made of the caches that Kernel Tuner wrote for the
benchmark hub of the Auto-Tuning Association (https://github.com/AutoTuningAssociation/benchmark_hub).
"""

import csv
from pathlib import Path
from typing import Any

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.candidates import Candidates
from orchestrator.search.earlier_sweeps import Origin
from orchestrator.search.tables import Table

FIGURES = ("time_ms", "compile_s", "total_s")


def read_csv_table(path: Path) -> Table:
    """Reads a table of kernels. Parameters become options of the workload, the reciprocal of its time the throughput.

    Raises:
        RecordsError: There is no such file, or it has other columns.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise RecordsError(f"{path} cannot be read ({error.strerror}); give a CSV file of a public table") from None
    if not lines or not set(FIGURES) < set(lines[0]):
        raise RecordsError(f"{path} has no rows with the columns {', '.join(FIGURES)}; give a CSV file of a public table")
    rows = {(row := _row(line))["settings_key"]: row for line in lines}
    return Table(
        name=path.stem,
        rows=rows,
        candidates=Candidates([CompileSettings.parse(key) for key in rows]),
        origin=Origin(workload=path.stem, size="", environment_key=None, num_workers=1, pipeline="none"),
        facts=WorkloadFacts(max_length=1),
    )


def _row(line: dict[str, str]) -> dict[str, Any]:
    options = {name: float(value) if "." in value else int(value) for name, value in line.items() if name not in FIGURES}
    settings = CompileSettings.from_dict({"scope": "full", "workload": options})
    has_run = line["time_ms"] != ""
    return {
        "settings_key": settings.key,
        "status": "ok" if has_run else "infeasible",
        "samples_per_s": 1000 / float(line["time_ms"]) if has_run else None,
        "compile_s": float(line["compile_s"]),
        "wall_s": float(line["total_s"]),
    }
