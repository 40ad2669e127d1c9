"""The pure parts of the benchmark of compile caches: its figures, and what it refuses."""

from __future__ import annotations

import cProfile
import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from samples import REPOSITORY, measured

from benchmarks.cache import __main__ as cache
from benchmarks.cache import restart, sweeps, transfer
from benchmarks.cache.restart import Job, Kind, Plan
from benchmarks.cache.sweeps import compared, short_by
from compile_sweep.schema.attempt_record import SCHEMA_VERSION
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, WarmStart, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device

EAGER, FULL, REGIONAL, MARKED = "scope=eager", "scope=full", "scope=regional", "scope=full,dynamic=mark"


def key(settings: str) -> str:
    return CompileSettings.parse(settings).key


def trial(settings: str, rate: float | None, compile_s: float | None, wall_s: float, **fields: Any) -> TrialRecord:
    chosen = CompileSettings.parse(settings)
    usual = measured(rate, compile_s or 0.0) if rate is not None else {}
    return TrialRecord(
        **usual
        | {"trial_id": f"{chosen.key}-{wall_s}", "settings": chosen.to_dict(), "settings_key": chosen.key, "status": Status.OK}
        | {"samples_per_s": rate, "compile_s": compile_s, "wall_s": wall_s}
        | fields
    )


def warm(settings: str, rate: float, compile_s: float, saved_s: float, wall_s: float, **fields: Any) -> TrialRecord:
    found = {
        "cache_saved_s": saved_s,
        "cold_equivalent_s": compile_s + saved_s,
        "cache_hits": 3,
        "cache_misses": 0,
        "restore_s": 2.0,
    }
    return trial(settings, rate, compile_s, wall_s, caches=Caches.WARM, **{**found, **fields})


def sweep(folder: Path, *done: TrialRecord | WarmStart, environment_key: str = "abc") -> Path:
    folder.mkdir()
    (folder / "trials.jsonl").touch()
    for record in done:
        append(folder, record)
    contents = {
        "schema_version": SCHEMA_VERSION,
        "config": {"recipe": "given", "workload": "captioning", "size": "base", "seed": 0},
        "environment": {"gpu": "NVIDIA H200"},
        "environment_key": environment_key,
        "started_at": "2026-11-21T09:11:40+00:00",
        "planned": [],
    }
    (folder / "sweep.json").write_text(json.dumps(contents))
    return folder


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return sweep(
        tmp_path / "cold",
        trial(EAGER, 500, 0.1, 60),
        trial(REGIONAL, 600, 10, 80, cache_made=10, cache_made_bytes=1000, cache_new_bytes=1000, publish_s=1.0),
        trial(FULL, 700, 100, 200, cache_made=20, cache_made_bytes=3000, cache_new_bytes=2000, publish_s=3.0),
    )


def printed(*what: Table | str) -> str:
    console = Console(width=cache.WIDTH, record=True, file=io.StringIO())
    console.print(*what, sep="\n")
    return console.export_text()


def test_the_estimates_error_is_that_of_each_warm_trial(cold: Path, tmp_path: Path) -> None:
    shared = sweep(tmp_path / "shared", trial(EAGER, 500, 0.1, 60), warm(REGIONAL, 600, 2, 8.5, 72), warm(FULL, 700, 10, 75, 110))
    found = compared(cold, shared)
    errors = {one["settings_key"]: one["error"] for one in found["settings"]}
    assert errors[key(EAGER)] is None
    assert errors[key(REGIONAL)] == pytest.approx(0.05)
    assert errors[key(FULL)] == pytest.approx(-0.15)
    assert found["errors"] == {
        "settings": 2, "goal": 0.10, "within_goal": 1, "median": pytest.approx(0.10), "worst": pytest.approx(0.15),
    }  # fmt: skip


def test_a_warm_start_says_what_its_whole_warm_up_would_take_cold(cold: Path, tmp_path: Path) -> None:
    shared = sweep(tmp_path / "shared", warm(FULL, 700, 10, 75, 110))
    chosen = CompileSettings.parse(FULL)
    usual: dict[str, Any] = {"settings": chosen.to_dict(), "settings_key": chosen.key, "status": Status.OK}
    append(cold, WarmStart(trial_id="start", warm_start_s=12.0, warmup_s=11.0, cache_saved_s=100.0, **usual))
    (full,) = compared(cold, shared)["settings"]
    assert full["start_error"] == pytest.approx(111 / measured(700, 100)["warmup_s"] - 1)


def test_gpu_seconds_are_those_of_settings_that_both_have(cold: Path, tmp_path: Path) -> None:
    shared = sweep(
        tmp_path / "shared",
        trial(EAGER, 500, 0.1, 60),
        warm(FULL, 700, 10, 90, 110, publish_s=1.0),
        warm(MARKED, 800, 10, 300, 1000),
        trial(FULL, 701, 99, 190),  # as --starts auto measures it again
    )
    gpu = compared(cold, shared)["gpu_s"]["all"]
    assert (gpu["settings"], gpu["cold"], gpu["shared"], gpu["front_again_cold"]) == (2, 260, 170, 190)
    assert gpu["saved_share"] == pytest.approx(90 / 260)
    assert gpu["saved_share_with_front_cold"] == pytest.approx(-100 / 260)
    assert gpu["share_if_compiling_were_free"] == pytest.approx(100.1 / 260)
    assert gpu["cold_by_part"] == {"compile": 100.1, "restore": 0, "publish": 3.0, "rest": pytest.approx(156.9)}
    assert gpu["shared_by_part"] == {"compile": 10.1, "restore": 2.0, "publish": 1.0, "rest": pytest.approx(156.9)}


def test_a_trial_that_ended_unmeasured_counts_apart(cold: Path, tmp_path: Path) -> None:
    died = trial(FULL, None, None, 30, status=Status.FAILED, label="crashed", caches=Caches.WARM)
    gpu = compared(cold, sweep(tmp_path / "shared", warm(REGIONAL, 600, 2, 8, 72), died))["gpu_s"]
    assert (gpu["all"]["settings"], gpu["all"]["shared"]) == (2, 102)
    assert (gpu["measured_in_both"]["settings"], gpu["measured_in_both"]["cold"]) == (1, 80)


def test_workers_count_each(tmp_path: Path) -> None:
    cold = sweep(tmp_path / "cold", trial(FULL, 700, 100, 200, num_workers=4))
    shared = sweep(tmp_path / "shared", warm(FULL, 700, 10, 90, 100, num_workers=4))
    assert compared(cold, shared)["gpu_s"]["all"]["cold"] == 800


def test_fronts_with_the_same_members_are_the_same(cold: Path, tmp_path: Path) -> None:
    shared = sweep(tmp_path / "shared", trial(EAGER, 499, 0.1, 60), warm(REGIONAL, 605, 2, 9, 72), warm(FULL, 690, 10, 95, 110))
    fronts = compared(cold, shared)["fronts"]
    assert fronts["same"]
    assert set(fronts["cold"]) == {key(EAGER), key(REGIONAL), key(FULL)}
    assert (fronts["only_in_cold"], fronts["only_in_shared"]) == ([], [])


def test_of_a_setting_on_one_front_alone_it_is_said_why(cold: Path, tmp_path: Path) -> None:
    shared = sweep(
        tmp_path / "shared",
        trial(EAGER, 500, 0.1, 60),
        warm(REGIONAL, 600, 2, 8, 72, status=Status.FAILED, label="gpu-shared"),
        warm(FULL, 490, 10, 90, 110),
    )
    fronts = compared(cold, shared)["fronts"]
    assert not fronts["same"]
    regional, full = sorted(fronts["only_in_cold"], key=lambda one: str(one["why"]), reverse=True)
    assert (regional["settings_key"], regional["why"], regional["short_by"]) == (key(REGIONAL), "gpu-shared", None)
    assert (full["settings_key"], full["why"], full["short_by"]) == (key(FULL), None, pytest.approx(500 / 490 - 1))


def test_how_much_a_setting_misses_a_front_by() -> None:
    assert short_by(100, 10, [(120, 11), (90, 5)]) == 0.0
    assert short_by(100, 10, [(102, 1)]) == pytest.approx(0.02)  # 2% faster steps would do
    assert short_by(100, 10, [(200, 9.9)]) == pytest.approx(0.01)  # or 1% less compiling
    assert short_by(100, 10, [(102, 1), (110, 5)]) == pytest.approx(0.10)  # it has to pass both


def test_bytes_are_counted_before_and_after_deduplication(cold: Path, tmp_path: Path) -> None:
    shared = sweep(tmp_path / "shared", warm(FULL, 700, 10, 90, 110, cache_made=20, cache_made_bytes=3000, cache_new_bytes=0))
    found = compared(cold, shared)
    assert found["bytes"]["cold"] == {"trials": 2, "artifacts": 30, "made_bytes": 4000, "new_bytes": 3000, "new_share": 0.75}
    assert found["bytes"]["shared"]["new_share"] == 0


def test_all_of_it_is_written_and_shown(cold: Path, tmp_path: Path) -> None:
    shared = sweep(tmp_path / "shared", warm(REGIONAL, 600, 2, 8, 72), warm(FULL, 700, 10, 75, 110), environment_key="other")
    output = tmp_path / "found.json"
    text = printed(*sweeps.compare(output, cold, shared))
    assert json.loads(output.read_text())["gpu_s"]["all"]["cold"] == 280
    assert "different environments" in text
    assert "35.0% saved" in text
    assert "-15.0%" in text
    assert "1 of 2 settings within 10%" in text
    assert "fronts: the same" in text


def test_every_figure_of_the_table_stands_below_its_title(cold: Path, tmp_path: Path) -> None:
    chosen = CompileSettings.parse(FULL)
    usual: dict[str, Any] = {"settings": chosen.to_dict(), "settings_key": chosen.key, "status": Status.OK}
    for workers in (1, 2):  # the cold trial had one
        figures: dict[str, Any] = {
            "warm_start_s": 12.0,
            "warmup_s": 11.0,
            "cache_saved_s": 100.0 * workers,
            "num_workers": workers,
        }
        append(cold, WarmStart(trial_id=f"start-{workers}", **figures, **usual))
    shared = sweep(tmp_path / "shared", warm(FULL, 700, 10, 75, 110))
    table, *_ = sweeps.compare(tmp_path / "found.json", cold, shared)
    assert isinstance(table, Table)
    cells = {str(column.header): str(*column.cells) for column in table.columns}
    assert (cells["hits"], cells["misses"], cells["wall s, cold"], cells["shared"]) == ("3", "0", "200.0", "110.0")
    assert (cells["error"], cells["of its warm start"]) == ("-15.0%", f"{111 / measured(700, 100)['warmup_s'] - 1:+.1%}")


def test_sweeps_that_share_no_setting_are_one_sentence(cold: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = sweep(tmp_path / "shared", warm(MARKED, 700, 10, 75, 110))
    assert cache.main(["sweeps", str(cold), str(shared), "--output", str(tmp_path / "found.json")]) == 2
    assert "no cold trial of a setting" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()


RUNS: dict[str, dict[str, Any]] = {
    "cold": {"first_step_s": 60.0, "warmup_s": 64.0, "load_s": 4.0},
    "warm": {"first_step_s": 6.0, "warmup_s": 8.0, "load_s": 4.0, "restore_s": 2.0, "cache_saved_s": 52.8},
}


def test_cold_over_warm_needs_both() -> None:
    assert restart.compared({"cold": RUNS["cold"]}) == {}
    found = restart.compared(RUNS)
    assert found["first_step_ratio"] == 10
    assert found["steps_ratio"] == 8
    assert found["start_ratio"] == pytest.approx(64 / 12)
    assert found["estimate_error"] == pytest.approx(-0.05)


def test_what_misses_the_goal_is_profiled() -> None:
    assert not restart.is_profiled({"cold": RUNS["cold"]})
    assert restart.is_profiled(RUNS)
    assert not restart.is_profiled({**RUNS, "warm": {**RUNS["warm"], "first_step_s": 5.0}})


def test_a_restart_that_was_cut_short_is_shown_as_far_as_it_came() -> None:
    variant = {"label": "full", "precompile": True, "runs": {"cold": RUNS["cold"]}}
    text = printed(restart.table([variant, {**variant, "runs": RUNS, **restart.compared(RUNS)}]))
    assert "full, precompile" in text
    assert "10.0×" in text


def test_a_profile_names_functions_without_folders_of_this_machine() -> None:
    profile = cProfile.Profile()
    profile.runcall(json.dumps, {"a": [1.5] * 1000}, indent=1)
    rows = restart.profiled(profile)
    assert [row["own_s"] for row in rows] == sorted((row["own_s"] for row in rows), reverse=True)
    assert any(row["function"].startswith("json/encoder.py:") for row in rows)
    assert not any(row["function"].startswith("/") for row in rows)
    text = printed(restart.profile_table({"label": "full", "precompile": False, "runs": {"profile": {"profile": rows}}}))
    assert "json/encoder.py" in text


def job(kind: Kind, **changes: Any) -> Job:
    usual: dict[str, Any] = {"precompile": False, "workload": "captioning", "size": "tiny", "device": Device.CPU, "steps": 3}
    return Job(kind=kind, setting=key(FULL), store="store", result="result", **{**usual, **changes})


def test_a_job_crosses_processes_and_only_the_cold_one_publishes_without_restoring() -> None:
    for kind in Kind:
        there = restart.job_of(json.dumps(asdict(job(kind))))
        assert there == job(kind)
        assert isinstance(there.kind, Kind)
        assert isinstance(there.device, Device)
        assignment = there.assignment()
        assert (assignment.restores, assignment.plan.warm_start) == ((False, False) if kind is Kind.COLD else (True, True))


def test_precompile_does_every_setting_again() -> None:
    settings = tuple(map(CompileSettings.parse, (FULL, REGIONAL)))
    plan = Plan(
        settings=settings,
        precompile=True,
        profile=True,
        workload="captioning",
        size="base",
        device=Device.CUDA,
        steps=20,
        budget_s=1.0,
    )
    full, regional = settings
    assert list(plan.variants()) == [(full, False), (regional, False), (full, True), (regional, True)]


@pytest.mark.slow
def test_what_failed_or_had_no_time_is_in_the_json(tmp_path: Path) -> None:
    plan = Plan(
        settings=(CompileSettings.parse(FULL),),
        precompile=False,
        profile=True,
        workload="no_such_module:Workload",
        size="only",
        device=Device.CPU,
        steps=1,
        budget_s=100.0,
    )
    output = tmp_path / "restart.json"
    for budget_s, why in ((100.0, "no_such_module"), (1e-9, "cold: no time left")):
        printed(*restart.restart(output, replace(plan, budget_s=budget_s)))
        (variant,) = json.loads(output.read_text())["variants"]
        assert why in variant["ended"]
        assert variant["runs"] == {}


def test_a_route_is_summed_up_by_its_median_and_only_one_node_has_a_goal() -> None:
    each = [{"seconds": 0.2, "put_blobs": 0.1}, {"seconds": 0.9, "put_blobs": 0.8}, {"seconds": 0.25, "put_blobs": 0.2}]
    found = transfer.summed_up("cluster: put, on the actor's node", each)
    assert (found["median_s"], found["parts_s"], found["met"]) == (0.25, {"put_blobs": 0.2}, True)
    apart = transfer.summed_up("cluster: put, from another node", each)
    assert (apart["goal_s"], apart["met"]) == (None, None)
    text = printed(transfer.table([found, apart]))
    assert "≤ 0.3 met" in text


def test_a_round_begins_with_a_put_in_each_tier() -> None:
    assert all([route.puts for route in routes] == [True] + [False] * (len(routes) - 1) for routes in transfer.ROUNDS)
    names = [route.name for routes in transfer.ROUNDS for route in routes]
    assert len(set(names)) == len(names)


def test_put_and_get_in_a_folder_time_each_call_of_the_shelf(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "store"), "folder", b"k" * 32, 10_000, 10)
    figures = transfer.put(*arguments)
    assert {"put_blobs", "put_manifest", "present"} < figures.keys()
    assert figures["seconds"] == pytest.approx(sum(value for name, value in figures.items() if name != "seconds"))
    assert transfer.get(*arguments)["get_blobs"] > 0
    with pytest.raises(RuntimeError, match="10 of 11 artifacts"):
        transfer.get(*arguments[:-1], 11)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "a command is missing; use one of restart, sweeps, transfer"),
        (["move"], "no command 'move'"),
        (["restart", "--output", "{}/x.json", "--settings", "scope=everything"], "everything"),
        (["restart", "--output", "{}/x.json", "--steps", "0"], "--steps 0 is too few"),
        (["restart", "--output", "{}/x.json", "--workload", "imaging"], "imaging"),
        (["restart", "--output", "{}/x.json", "--size", "enormous"], "enormous"),
        (["restart", "--output", "{}/none/x.json"], "there is no such folder"),
        (["transfer", "--output", "{}/x.json", "--mb", "nan"], "--mb nan is too few"),
        (["sweeps", "{}/none", "{}/none", "--output", "{}/x.json"], "there is no folder"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main([word.format(tmp_path) for word in words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def command(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests")))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.cache", *words],
        env={**os.environ, "PYTHONPATH": path, "COMPILE_SWEEP_CACHE_KEY": "ab" * 32},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.nightly("compiles in two processes; test_transfer.py shows the same for the caches")
@pytest.mark.slow
def test_a_restart_finds_all_that_the_cold_process_left(tmp_path: Path) -> None:
    output = tmp_path / "restart.json"
    words = ("--device", "cpu", "--workload", "toy_workloads:Toy", "--size", "only", "--settings", FULL, "--steps", "2")
    done = command("restart", "--output", str(output), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (variant,) = json.loads(output.read_text())["variants"]
    assert list(variant["runs"])[:3] == ["cold", "warm", "phases"], done.stdout
    assert ("profile" in variant["runs"]) == (variant["first_step_ratio"] < restart.GOAL)
    runs = variant["runs"]
    assert (runs["cold"]["hits"], runs["warm"]["misses"]) == ({}, {})
    assert sum(runs["warm"]["hits"].values()) == runs["warm"]["cache_hits"] > 0
    assert sum(runs["cold"]["misses"].values()) > 0
    assert runs["cold"]["cache_made"] == runs["warm"]["cache_restored"]
    assert variant["first_step_ratio"] > 1.5
    assert (runs["warm"]["warmup_steps"], runs["phases"]["warmup_steps"]) == (2, 1)
    assert "full, default, static" in done.stdout


@pytest.mark.nightly("runs a benchmark on a cluster of two nodes; test_cluster_memory.py covers artifacts in a cluster's memory")
@pytest.mark.slow
def test_artifacts_go_between_two_nodes(tmp_path: Path) -> None:
    output = tmp_path / "transfer.json"
    done = command("transfer", "--output", str(output), "--mb", "1", "--artifacts", "10", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    routes = {route["name"]: route for route in json.loads(output.read_text())["routes"]}
    assert list(routes) == [route.name for routes in transfer.ROUNDS for route in routes]
    assert all(0 < route["median_s"] < 30 for route in routes.values())
