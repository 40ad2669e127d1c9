"""What follows the main stage of a sweep, on a real local Ray, with trials that take no time and say that they did."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import H200

from orchestrator import folder, records
from orchestrator.config import SearchConfig, SweepConfig
from orchestrator.records import Status, TrialRecord, WarmStart
from orchestrator.search import Searcher
from orchestrator.stages import Fronts, Stages
from workloads.settings import CompileSettings

pytestmark = pytest.mark.slow

SETTINGS = tuple(CompileSettings.parse(f"scope={scope}") for scope in ("full", "regional", "modular"))
KEYS = [setting.key for setting in SETTINGS]
TRIAL_S, START_S = 100.0, 20.0


def recorded(setting: CompileSettings, **fields: Any) -> TrialRecord:
    known = {"settings": setting.to_dict(), "settings_key": setting.key, "status": Status.OK, "wall_s": TRIAL_S, "cache_made": 1}
    return TrialRecord(**{"trial_id": setting.key, "compile_s": 1.0, **known, **fields})


def test_a_gpu_budget_holds_for_what_is_measured_again_and_started_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget_s = len(SETTINGS) * TRIAL_S + 2.5 * TRIAL_S
    config = SweepConfig(
        recipe="given",
        workload="captioning",
        size="tiny",
        settings=SETTINGS,
        max_concurrent=2,
        cache=str(tmp_path / "cache"),
        search=SearchConfig(searcher=Searcher.GRID, gpu_budget_s=budget_s),
    )
    output = tmp_path / "sweep"
    folder.begin(output, config, H200, None)
    for setting in SETTINGS:
        records.append(output, recorded(setting, contended=True))

    def run_trials(
        config: SweepConfig,
        settings: Sequence[CompileSettings],
        *,
        may_start: Callable[[CompileSettings], bool],
        warm_start: bool = False,
        **others: Any,
    ) -> None:
        for setting in filter(may_start, settings):
            start = WarmStart(
                trial_id="1", settings=setting.to_dict(), settings_key=setting.key, status=Status.OK, wall_s=START_S
            )
            records.append(output, start if warm_start else recorded(setting))

    def run() -> None:
        stages = Stages(
            config=config, output=output, fronts=Fronts(lambda _: KEYS, lambda _: KEYS), max_length=16, environment=H200
        )
        stages.run(Console(file=io.StringIO()), stages.search())

    import orchestrator.tuning  # which loads Ray

    monkeypatch.setattr(orchestrator.tuning, "run_trials", run_trials)
    run()
    again = records.read(output)[len(SETTINGS) :]
    assert [record.settings_key for record in again] == KEYS[:2], "a third would take 50 s more than are left"
    assert [start.settings_key for start in records.read_warm_starts(output)] == KEYS[:2], "likewise, 10 s"
    run()
    assert (len(records.read(output)), len(records.read_warm_starts(output))) == (5, 2), "the next run counts them too"
