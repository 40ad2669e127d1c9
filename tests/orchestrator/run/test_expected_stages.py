"""Estimated durations of trials in a sweep's stages and in its check, which budgets depend on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import H200

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.check import Tried, _costs, _recipes
from orchestrator.config import CachePolicy, Device, SearchConfig, SweepConfig
from orchestrator.plan.space import Target
from orchestrator.run import sweep_folder
from orchestrator.run.stages import Fronts, Stages
from orchestrator.search import Searcher

FULL = CompileSettings.parse("scope=full")


def stages(output: Path, caches: CachePolicy, trial_deadline_s: float = 1200.0, **fields: Any) -> Stages:
    config = SweepConfig(
        recipe="given", workload="captioning", size="base", settings=(FULL,), cache=str(output.parent / "cache"), caches=caches,
        trial_deadline_s=trial_deadline_s, compile_deadline_s=200.0, **fields,
    )  # fmt: skip
    sweep_folder.begin(output, config, H200, None)
    return Stages(
        config=config,
        output=output,
        fronts=Fronts(lambda _: [], lambda _: [], lambda _: None),
        facts=WorkloadFacts(max_length=256),
        environment=H200,
    )


@pytest.mark.parametrize(("caches", "again_s"), [(CachePolicy.SHARED, 40.0), (CachePolicy.AUTO, 334.0)])
def test_a_member_of_the_front_that_is_measured_again_cold_takes_as_long_as_a_cold_trial(
    caches: CachePolicy, again_s: float, tmp_path: Path
) -> None:
    found = stages(tmp_path / "sweep", caches)
    warm = {
        "caches": Caches.WARM,
        "compile_s": 6.0,
        "cold_equivalent_s": 300.0,
        "wall_s": 40.0,
        "samples_per_s": 5.0,
        "status": Status.OK,
    }
    record = TrialRecord(trial_id="1", settings=FULL.to_dict(), settings_key=FULL.key, **warm)  # type: ignore[arg-type]
    records.append(tmp_path / "sweep", record)
    assert found._expected_s(FULL) == 40.0
    assert found._expected_again_s(FULL) == again_s


def test_no_trial_is_expected_to_outlive_its_deadline(tmp_path: Path) -> None:
    tuned = CompileSettings.parse("scope=full,mode=max-autotune,dynamic=buckets,bucket_size=32")
    assert stages(tmp_path / "sweep", CachePolicy.COLD)._expected_s(tuned) > 250
    assert stages(tmp_path / "other", CachePolicy.COLD, 250.0)._expected_s(tuned) == 250


def test_a_search_that_is_stopped_at_once_counts_the_trials_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stages(tmp_path / "sweep", CachePolicy.COLD, search=SearchConfig(searcher=Searcher.GRID))

    def ended(*arguments: object) -> None:
        done = {"settings": FULL.to_dict(), "settings_key": FULL.key, "status": Status.OK, "samples_per_s": 5.0}
        records.append(tmp_path / "sweep", TrialRecord(trial_id="1", **done))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.run.stages.make_runner", ended)
    assert found.run(Console(file=io.StringIO()), search := found.search())
    assert search is not None
    assert search.outcome().startswith("the search ended after 1 trial of 1 settings")


def test_what_a_check_says_of_costs_goes_by_what_its_trials_took_beside_compiling() -> None:
    eager = Tried(settings=CompileSettings.parse("scope=eager"), wall_s=285.0, verdict="", measurement={"compile_s": 1.0})
    target = Target(max_length=1, has_gpu=False)
    costs = list(_costs(_recipes(target), [eager], target, Device.CPU))
    assert "regional: 3 settings, about 16 min one after another" in costs, "300 s each, and 80 s of compiling"
