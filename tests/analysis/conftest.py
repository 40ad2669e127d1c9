"""Sweep folders in small, written with the real `TrialRecord`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sweep_folders import ENVIRONMENT, MakeSweep, MakeTwo, typical_trials

from orchestrator.records import SCHEMA_VERSION, TrialRecord, append


@pytest.fixture
def make_sweep(tmp_path: Path) -> MakeSweep:
    """Writes a sweep folder of these records and returns its path."""

    def make(records: Sequence[TrialRecord] | None = None, *, name: str = "sweep", **sweep: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "trials.jsonl").touch()
        records = typical_trials() if records is None else records
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

    return make


@pytest.fixture
def two(make_sweep: MakeSweep) -> MakeTwo:
    """Writes two sweep folders and returns their paths."""

    def make(
        before: Sequence[TrialRecord], after: Sequence[TrialRecord], first: Mapping[str, Any] | None = None, *, name: str = "",
        **second: Any,
    ) -> tuple[Path, Path]:  # fmt: skip
        return make_sweep(before, name=f"a{name}", **(first or {})), make_sweep(after, name=f"b{name}", **second)

    return make
