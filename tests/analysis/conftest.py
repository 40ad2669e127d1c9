"""Sweep folders in small, written with the real `TrialRecord`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sweep_folders import ENVIRONMENT, MakeSweep, MakeTwo, ReportOn, typical_trials

import analysis
from compile_sweep.schema.record import SCHEMA_VERSION, TrialRecord, append


@pytest.fixture
def make_sweep(tmp_path: Path) -> MakeSweep:
    """Writes a sweep folder of these records and returns its path."""

    def make(records: Sequence[TrialRecord] | None = None, *, name: str = "sweep", **sweep: Any) -> Path:
        return _written(tmp_path / name, typical_trials() if records is None else records, sweep)

    return make


@pytest.fixture(scope="session")
def report_on(tmp_path_factory: pytest.TempPathFactory) -> ReportOn:
    """Writes the report on a sweep of these records and returns its path; once for all tests, which only look at it."""
    made: dict[str, Path] = {}

    def report(records: Sequence[TrialRecord] | None = None) -> Path:
        records = typical_trials() if records is None else records
        content = "".join(record.to_json() for record in records)
        if content not in made:
            made[content] = analysis.write_report(_written(tmp_path_factory.mktemp("reports") / "sweep", records, {}))
        return made[content]

    return report


def _written(folder: Path, records: Sequence[TrialRecord], sweep: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "trials.jsonl").touch()
    for record in records:
        append(folder, record)
    contents = {
        "schema_version": SCHEMA_VERSION,
        "config": {"recipe": "captioning", "workload": "captioning", "size": "base", "seed": 0},
        "environment": ENVIRONMENT,
        "environment_key": "abc",
        "started_at": "2026-11-21T09:11:40+00:00",
        "planned": [record.settings_key for record in records],
    }
    (folder / "sweep.json").write_text(json.dumps(contents | sweep))
    return folder


@pytest.fixture
def two(make_sweep: MakeSweep) -> MakeTwo:
    """Writes two sweep folders and returns their paths."""

    def make(
        before: Sequence[TrialRecord], after: Sequence[TrialRecord], first: Mapping[str, Any] | None = None, *, name: str = "",
        **second: Any,
    ) -> tuple[Path, Path]:  # fmt: skip
        return make_sweep(before, name=f"a{name}", **(first or {})), make_sweep(after, name=f"b{name}", **second)

    return make
