"""Records of small sweeps, and fixtures that write folders and reports of them with the real `TrialRecord`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from samples import measured

import analysis
from analysis.comparison.changes import Comparison, compare
from analysis.load import load_for_analysis
from compile_sweep.schema.attempt_record import SCHEMA_VERSION
from compile_sweep.schema.journal import sealed
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings, Scope

MakeSweep = Callable[..., Path]
MakeTwo = Callable[..., tuple[Path, Path]]
ReportOn = Callable[..., Path]

EAGER, FULL, REGIONAL, MODULAR = "scope=eager,padding=max", "scope=full", "scope=regional", "scope=modular"

ENVIRONMENT = {"python": "3.11.7", "torch": "2.13.0", "gpu": "NVIDIA H200", "driver": None, "cores": 16}


def compared(folders: tuple[Path, Path]) -> Comparison:
    """Returns what changed from the first sweep to the second."""
    frames = [load_for_analysis(folder)[0] for folder in folders]
    return compare(*frames, sweeps=(analysis.load_sweep(folders[0]), analysis.load_sweep(folders[1])))


def trial(
    settings: str,
    samples_per_s: float | None = None,
    compile_s: float | None = None,
    *,
    status: Status | None = None,
    trial_id: str | None = None,
    caches: Caches = Caches.COLD,
    **fields: Any,
) -> TrialRecord:
    """A record of these settings; a throughput brings the other figures of a measurement. Without one, it failed."""
    chosen = CompileSettings.parse(settings)
    if samples_per_s is not None:
        usual = measured(samples_per_s, compile_s or 0.0)
        if chosen.scope is Scope.EAGER:  # is neither compiled nor compared with itself
            usual |= {"speedup_eager": None, "speedup_eager_ci95": None, "clock_drift": None, "eager_step_ms": [], "graphs": 0}
        fields = usual | fields
    return TrialRecord(
        trial_id=trial_id or f"trial-{abs(hash((chosen, compile_s))) % 10**6}",
        settings=chosen.to_dict(),
        settings_key=chosen.key,
        status=status or (Status.FAILED if samples_per_s is None else Status.OK),
        caches=caches,
        samples_per_s=samples_per_s,
        compile_s=compile_s,
        **fields,
    )


def warm_start(settings: str, warm_start_s: float | None, *, status: Status = Status.OK, **fields: Any) -> WarmStart:
    """A start of these settings, one seventh of which was restoring."""
    chosen = CompileSettings.parse(settings)
    parts = {} if warm_start_s is None else {"restore_s": warm_start_s / 7, "first_step_s": warm_start_s / 2}
    return WarmStart(
        trial_id=f"start-{warm_start_s}",
        settings=chosen.to_dict(),
        settings_key=chosen.key,
        status=status,
        warm_start_s=warm_start_s,
        **parts,
        **fields,
    )


def typical_trials() -> list[TrialRecord]:
    """Eager, four compiled settings of which three are on the front, a NaN near the top, a deadline, a dead worker."""
    return [
        trial("scope=eager,padding=max", 586, 0.01, trial_id="eager-max"),
        trial("scope=eager,padding=longest", 696, 0.02, trial_id="eager-longest"),
        trial("scope=regional", 730, 12, trial_id="regional"),
        trial("scope=regional,dynamic=auto", 902, 25, trial_id="regional-auto"),
        trial("scope=full", 766, 54, trial_id="full"),
        trial("scope=full,dynamic=buckets,optimizer=compiled", 1046, 440, trial_id="buckets"),
        trial(
            "scope=regional,dynamic=mark", 947, 19, trial_id="mark", status=Status.INFEASIBLE,
            label="nan", reason="the loss is NaN at step 3", phase="checking", numerics={"status": "nan"},
        ),
        trial(
            "scope=full,mode=max-autotune", trial_id="autotune", status=Status.INFEASIBLE,
            label="compile-deadline", reason="no first step within 570 s", phase="warming-up",
        ),
        trial(
            "scope=modular", trial_id="dead", status=Status.FAILED,
            label="worker-died", reason="worker 0 ended by signal 9", phase="building",
        ),
    ]  # fmt: skip


@pytest.fixture
def make_sweep(tmp_path: Path) -> MakeSweep:
    """Writes a sweep folder with these records and returns its path."""

    def make(records: Sequence[TrialRecord] | None = None, *, name: str = "sweep", **sweep: Any) -> Path:
        return _written(tmp_path / name, typical_trials() if records is None else records, sweep)

    return make


@pytest.fixture(scope="session")
def report_on(tmp_path_factory: pytest.TempPathFactory) -> ReportOn:
    """Writes the report of a sweep with these records and returns its path; once for all tests, which only read it."""
    made: dict[str, Path] = {}

    def report(records: Sequence[TrialRecord] | None = None) -> Path:
        records = typical_trials() if records is None else records
        content = "".join(map(_line, records))
        if content not in made:
            made[content] = analysis.write_report(_written(tmp_path_factory.mktemp("reports") / "sweep", records, {}))
        return made[content]

    return report


def _line(record: TrialRecord) -> str:
    """Returns the record's line of the log; many tests write equal records."""
    key = repr(record)
    if key not in _LINES:
        _LINES[key] = f"{sealed(record.to_json())}\n"
    return _LINES[key]


_LINES: dict[str, str] = {}


def _written(folder: Path, records: Sequence[TrialRecord], sweep: Mapping[str, Any]) -> Path:
    folder.mkdir()
    # Whole, because `append` makes each line durable and compares it with those before.
    (folder / "trials.jsonl").write_text("".join(map(_line, records)), encoding="utf-8")
    contents = {
        "schema_version": SCHEMA_VERSION,
        "config": {
            "recipe": "captioning",
            "workload": next((record.workload for record in records if record.workload), "captioning"),
            "size": next((record.size for record in records if record.size), "base"),
            "seed": 0,
        },
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
