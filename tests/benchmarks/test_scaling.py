"""The settings of the scaling benchmark, and its tables of recorded trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.__main__ import MAX_AUTOTUNE, WorkersOptions, _walls, asked, main
from benchmarks.scaling.tables import of_sweeps, of_workers
from compile_sweep.schema.ddp_settings import OptimizeDdp
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append
from compile_sweep.schema.settings import CompileSettings

FULL, EAGER = (CompileSettings.parse(words).key for words in ("scope=full", "scope=eager"))
SPLIT_OFF = CompileSettings.parse("scope=full,ddp.optimize_ddp=off").key


def row(key: str, rate: float | None, *, workers: int = 1, **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "settings_key": key, "settings_label": CompileSettings.parse(key).label, "scope": key.split(",")[0][6:], "status": "ok",
        "label": None, "samples_per_s": rate, "samples_per_s_low": rate, "samples_per_s_high": rate, "compile_s": 50.0,
        "compile_s_by_rank": None, "step_ms_median": 80.0, "peak_memory_bytes": 2**30, "peak_memory_bytes_by_rank": None,
        "speedup_eager": None, "numerics_status": "ok", "trial_id": "t", "cores": 16, "wall_s": 100.0, "num_workers": workers,
        "contended": False, "stable": True,
    }  # fmt: skip
    return usual | fields


def options(**fields: Any) -> WorkersOptions:
    return WorkersOptions(output=Path("x.json"), **fields)


def test_what_the_compiler_does_about_reduction_is_tried_with_several_workers_only() -> None:
    alone, together = asked(options(), 1), asked(options(), 2)
    assert not [key for key in alone if "ddp." in key]
    assert [key for key in together if "optimize_ddp=no_optimization" in key]
    assert {key for key in together if "ddp." not in key} == set(alone), "ddp_optimizer is torch's own and is not said"
    assert len(alone) == 7
    assert len(together) == 11


def test_one_mode_asked_for_is_the_one_tried() -> None:
    keys = asked(options(optimize_ddp=(OptimizeDdp.NO_OPTIMIZATION,)), 4)
    assert all("no_optimization" in key for key in keys if not key.startswith("scope=eager"))


def test_further_settings_of_workers_wait_for_several() -> None:
    given = options(settings=("scope=full,ddp.bucket_cap_mb=100",), max_autotune=True)
    assert len(asked(given, 1)) == 8
    assert asked(given, 2)[-1].endswith("ddp.bucket_cap_mb=100")
    assert any("max-autotune" in key for key in asked(given, 1))
    assert "compiled" in MAX_AUTOTUNE


def test_efficiency_is_a_workers_share_over_the_same_setting_alone() -> None:
    trials = {
        1: [row(FULL, 800.0), row(EAGER, 500.0)],
        4: [row(FULL, 2880.0, workers=4, compile_s=60.0), row(SPLIT_OFF, 2400.0, workers=4), row(EAGER, 1900.0, workers=4)],
    }
    _, found = of_workers(trials)
    by_key = {(one["settings_key"], one["num_workers"]): one for one in found["trials"]}
    assert by_key[FULL, 4]["efficiency"] == pytest.approx(0.9)
    assert by_key[SPLIT_OFF, 4]["efficiency"] == pytest.approx(0.75)
    assert by_key[FULL, 4]["over_eager"] == pytest.approx(2880 / 1900)
    assert by_key[FULL, 4]["compile_over_alone"] == pytest.approx(1.2)
    assert by_key[FULL, 4]["steps_per_s"] == 12.5


def test_a_trial_without_figures_has_no_efficiency_and_keeps_its_label() -> None:
    dead = row(FULL, None, workers=2, status="failed", label="worker-died", compile_s=None, step_ms_median=None)
    table, found = of_workers({1: [row(FULL, 800.0)], 2: [{**dead, "peak_memory_bytes": None}]})
    assert found["trials"][1]["efficiency"] is None
    assert table.row_count == 2


def test_efficiency_is_not_taken_over_a_base_that_is_not_to_be_relied_on() -> None:
    noisy = row(FULL, 800.0, stable=False)
    _, found = of_workers({1: [noisy], 2: [row(FULL, 1500.0, workers=2)]})
    assert [one["efficiency"] for one in found["trials"]] == [None, None]


def test_one_gpu_against_many_is_compared_when_both_are_whole() -> None:
    one = ([row(FULL, 800.0), row(EAGER, 500.0, compile_s=0.1)], [300.0, 100.0])
    many = ([row(FULL, 790.0, compile_s=51.0), row(EAGER, 500.0, compile_s=0.2)], [110.0])
    _, found = of_sweeps(one, many, at_once=4, num_settings=2)
    assert found["speedup"] == pytest.approx(400 / 110)
    assert found["speedup_goal"] == pytest.approx(3.6)
    assert found["compile_ratio"] == {FULL: pytest.approx(1.02)}
    assert found["compile_within_goal"] is True
    _, half = of_sweeps(one, (many[0][:1], many[1]), at_once=4, num_settings=2)
    assert half["speedup"] is None
    assert half["done"] == {"one": 2, "all": 1}


def test_a_sweeps_wall_time_is_that_of_its_runs_also_where_one_was_killed(tmp_path: Path) -> None:
    def trial(minute: int, wall_s: float) -> TrialRecord:
        setting, started_at = CompileSettings(), f"2026-11-22T06:{minute:02}:00+00:00"
        return TrialRecord(
            trial_id=str(minute), settings=setting.to_dict(), settings_key=setting.key, status=Status.OK, started_at=started_at,
            wall_s=wall_s, samples_per_s=5.0,
        )  # fmt: skip

    sweep = {"started_at": "2026-11-22T06:30:00+00:00", "runs": [{"started_at": "2026-11-22T06:00:00+00:00"}]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    for one in (trial(1, 100.0), trial(2, 50.0), trial(31, 40.0)):
        append(tmp_path, one)
    assert _walls(tmp_path) == [170.0, 100.0], "the first ended no differently than by its last trial"
    assert _walls(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["workers", "--output", "x.json", "--device", "cpu"], "--counts is empty"),
        (["sweep", "--output", "x.json", "--device", "cpu"], "side by side"),
        (["workers", "--output", "x.json", "--counts", "64"], "needs as many GPUs"),
    ],
)
def test_what_this_host_cannot_do_is_a_sentence(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    from orchestrator.environment import fingerprint

    if words[-1] == "64" and not fingerprint().num_gpus:
        pytest.skip("no GPU")
    assert main(words) == 2
    assert named in capsys.readouterr().err
