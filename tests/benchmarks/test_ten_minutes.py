"""The comparison of recipe auto with settings written by hand: how it reads records and lines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks.by_hand.best import JOBS, SCRIPTS, WAYS
from benchmarks.recipes.ten_minutes import found, parsed
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings

BEGAN = datetime(2026, 11, 25, 12, 0, 0, tzinfo=UTC)


def trial(setting: str, minute: int, samples_per_s: float | None, **fields: Any) -> TrialRecord:
    """A trial of 40 s that began this many minutes after the command."""
    made = CompileSettings.parse(setting)
    started_at = BEGAN.replace(minute=minute).isoformat()
    usual = {"status": Status.OK, "wall_s": 40.0, "compile_s": 20.0, "step_ms": [1000.0] * 5, "started_at": started_at}
    known = {**usual, "samples_per_s": samples_per_s, **fields}
    return TrialRecord(trial_id=setting, settings=made.to_dict(), settings_key=made.key, **known)


def test_what_was_found_is_told_with_the_time_at_which_it_was_there() -> None:
    trials = [
        trial("scope=eager", 0, 100.0),
        trial("scope=full", 1, 197.0),
        trial("scope=full,optimizer=fused", 2, 200.0),
        trial("scope=nested", 3, 400.0, status=Status.INFEASIBLE, label="diverges"),
    ]
    told = found(trials, BEGAN, 250.0)
    assert (told["best"], told["over_eager"], told["over_by_hand"]) == (trials[2].settings_key, 2.0, 0.8)
    assert told["own_best_at_s"] == 60 + 40, "98% of it came with the second trial"
    assert told["by_hand_at_s"] is None
    assert told["compiling_or_timing"] == pytest.approx(25 / 40, abs=1e-3)
    assert found(trials, BEGAN, 201.0)["by_hand_at_s"] == 60 + 40
    assert found([trials[3]], BEGAN, 201.0) == {"trials": 1, "best": None}


def test_lines_that_hold_no_figures_are_refused() -> None:
    assert parsed('warning\n{"way": "eager", "samples_per_s": 3.5}\n') == [{"way": "eager", "samples_per_s": 3.5}]
    for text in ("", "{}", '{"samples_per_s": "many"}', '{"samples_per_s": 0}', '{"samples'):
        with pytest.raises(ConfigError, match="nothing was measured by hand"):
            parsed(text)


def test_every_job_by_hand_begins_with_eager_and_has_the_levers_of_a_sweep() -> None:
    assert WAYS.keys() == JOBS.keys() | SCRIPTS.keys()
    for ways in WAYS.values():
        assert next(iter(ways.values())) == {}
    for name in JOBS:
        text = str(WAYS[name])
        assert "fused" in text
        assert "reduce-overhead" in text or "triton.cudagraphs" in text
        assert "one_graph" in text
