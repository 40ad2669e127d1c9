"""Replays of recorded tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_tables import MAX_LENGTH, TARGET, recorded, rows_of, settings_of_a_grid, write_sweep

from benchmarks.search.make_table import main as write_table_main
from benchmarks.search.make_table import write_table
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError, RecordsError
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, WarmStart
from orchestrator import simulate
from orchestrator.search import Budget, Searcher, StableFront, make_proposer
from orchestrator.search.tables import read_table
from orchestrator.simulate import Ground, Replay, Step, quartiles, replays

pytestmark = pytest.mark.slow

AIMS = Aims.parse()
DONE = recorded(settings_of_a_grid(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "table", DONE)


@pytest.fixture
def ground(folder: Path) -> Ground:
    return Ground(read_table(folder), AIMS)


def test_a_table_is_what_a_sweep_recorded(folder: Path) -> None:
    table = read_table(folder)
    assert list(table.rows) == [record.settings_key for record in DONE]
    assert table.workload == "captioning small"
    assert table.facts.max_length == MAX_LENGTH
    assert table.gpu_s == pytest.approx(sum(record.wall_s for record in DONE))


def test_a_replay_charges_what_was_recorded_and_ends_at_the_whole_front(ground: Ground) -> None:
    (replay,) = replays(ground, Searcher.GRID, 1)
    walls = [record.wall_s for record in DONE]
    assert [step.gpu_s for step in replay.steps] == pytest.approx([sum(walls[: n + 1]) for n in range(len(walls))])
    volumes = [step.volume for step in replay.steps]
    assert volumes == sorted(volumes)
    assert volumes[-1] == pytest.approx(1.0)
    assert replay.steps[-1].gpu_s == pytest.approx(replay.grid_gpu_s)
    assert replay.why_stopped is None


def test_shares_and_volumes_are_read_off_a_replay() -> None:
    replay = Replay((Step("a", 10.0, 0.5, False), Step("b", 30.0, 0.99, False)), grid_gpu_s=100.0)
    assert (replay.share_to(0.5), replay.share_to(0.98), replay.share_to(1.0)) == (0.1, 0.3, float("inf"))
    assert (replay.volume_at(0.05), replay.volume_at(0.1), replay.volume_at(0.29)) == (0.0, 0.5, 0.5)
    assert quartiles([3.0, 1.0, float("inf"), 2.0, float("inf")]) == (2.0, 3.0, float("inf"))


def test_a_replay_stops_for_a_budget_a_stable_front_or_enough(ground: Ground) -> None:
    def replayed(**limits: object) -> Replay:
        proposer = make_proposer(Searcher.RANDOM, ground.table.candidates, AIMS, TARGET)
        return ground.replay(proposer, **limits)  # type: ignore[arg-type]

    by_budget = replayed(budget=Budget(gpu_s=1000.0))
    assert by_budget.steps[-2].gpu_s < 1000 <= by_budget.steps[-1].gpu_s
    assert by_budget.why_stopped == "the budget of 1000 GPU-seconds is spent"
    by_rule = replayed(rule=StableFront(4))
    assert len(by_rule.steps) < len(DONE)
    assert len({step.volume for step in by_rule.steps[-4:]}) == 1
    enough = replayed(enough=0.9)
    assert enough.steps[-2].volume < 0.9 <= enough.steps[-1].volume
    assert enough.why_stopped == "90% of the hypervolume is reached"


def test_a_policy_that_stops_trials_sees_what_finished_before_and_its_record_is_what_counts(ground: Ground) -> None:
    seen: list[int] = []

    def prune(row: Record, before: Sequence[Record]) -> Record | None:
        seen.append(len(before))
        if row["wall_s"] < 150:
            return None
        return {"settings_key": row["settings_key"], "status": "stopped", "label": "dominated", "wall_s": 150.0}

    (replay,) = replays(ground, Searcher.GRID, 1, prune=prune)
    assert seen == list(range(len(DONE)))
    assert replay.steps[-1].gpu_s == pytest.approx(sum(min(record.wall_s, 150.0) for record in DONE))
    assert [step.was_pruned for step in replay.steps] == [record.wall_s >= 150 for record in DONE]
    assert replay.steps[-1].volume < 1


def test_a_table_is_well_under_a_megabyte_and_says_the_same_as_its_sweep(tmp_path: Path) -> None:
    full = [replace(record, step_ms=[1.0] * 500, eager_step_ms=[1.23456789] * 200, source="x" * 2000) for record in DONE]
    sweep = write_sweep(tmp_path / "sweep", full)
    start = WarmStart(
        trial_id="w", settings=DONE[0].settings, settings_key=DONE[0].settings_key, status=Status.OK, warm_start_s=3.5
    )
    records.append(sweep, start)
    config = {
        "schema_version": 2,
        "config": {"cache": "somewhere"},
        "environment": {"gpu": "NVIDIA H200"},
        "environment_key": "k",
    }
    (sweep / "sweep.json").write_text(json.dumps(config))
    assert write_table_main([str(sweep), str(tmp_path / "tables" / "t")]) == 0
    table, whole = read_table(tmp_path / "tables" / "t"), read_table(sweep)
    assert table.rows[DONE[0].settings_key]["warm_start_s"] == 3.5
    assert Ground(table, AIMS).reference == Ground(whole, AIMS).reference
    assert replays(Ground(table, AIMS), Searcher.GAIN, 1) == replays(Ground(whole, AIMS), Searcher.GAIN, 1)
    size = sum(file.stat().st_size for file in (tmp_path / "tables" / "t").iterdir())
    assert size < 240 / len(DONE) * 1e6 / 8
    told = json.loads((tmp_path / "tables" / "t" / "sweep.json").read_text())
    assert told["environment"] == {"gpu": "NVIDIA H200"}
    assert "config" not in told
    assert write_table(sweep, tmp_path / "tables" / "t").gpu_s == table.gpu_s, "written again over itself"


def test_a_table_is_not_written_where_a_file_is(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, why in (("/dev/null", "File exists"), ("/dev/null/table", "Not a directory")):
        assert write_table_main([str(folder), place]) == 2
        assert capsys.readouterr().err == f"error: {place} cannot be written ({why}); name a folder that can\n"


def test_a_table_does_not_take_the_place_of_a_sweeps_records(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_sweep(tmp_path / "other", DONE[:3])
    (other / "sweep.json").write_text(json.dumps({"schema_version": 2, "config": {}}))
    for place in (folder, other):
        before = (place / "trials.jsonl").read_bytes()
        assert write_table_main([str(folder), str(place)]) == 2
        assert "holds a sweep, of which a table keeps only a part" in capsys.readouterr().err
        assert (place / "trials.jsonl").read_bytes() == before


def test_what_machines_ended_is_in_no_table_for_a_search_is_not_told_of_it(tmp_path: Path) -> None:
    lost = replace(DONE[0], status=Status.FAILED, label="node-lost", reason="gone")
    table = read_table(write_sweep(tmp_path / "sweep", [lost, *DONE[1:]]))
    assert list(table.rows) == [record.settings_key for record in DONE[1:]]
    with pytest.raises(RecordsError, match="no record of what a setting came to"):
        read_table(write_sweep(tmp_path / "lost", [lost]))


def test_a_table_of_two_environments_is_none(tmp_path: Path) -> None:
    (other,) = recorded(settings_of_a_grid(9)[-1:], environment_key="other")
    mixed = [*recorded(settings_of_a_grid(8)), replace(other, trial_id="of another environment")]
    with pytest.raises(RecordsError, match="environment key other instead of 0123456789abcdef"):
        read_table(write_sweep(tmp_path / "table", mixed))


def test_aims_that_no_record_serves_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no setting meets the constraint"):
        Ground(read_table(folder), Aims.parse([], ["compile_s<=0.01"]))


def test_a_table_whose_trials_took_no_time_is_refused(tmp_path: Path) -> None:
    table = read_table(write_sweep(tmp_path / "quick", [replace(record, wall_s=0.0) for record in DONE]))
    with pytest.raises(ConfigError, match="no trial of quick took any time, so there is no cost to compare"):
        Ground(table, AIMS)


def test_a_table_is_written_beside_a_link_that_leads_nowhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "loop").symlink_to("loop")
    assert write_table_main([str(folder), str(tmp_path / "tables")]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "holds no trials.jsonl"),
        (["TABLE", "--objective", "sampels_per_s:max"], "did you mean samples_per_s?"),
        (["TABLE", "--constraint", "compile_s<120"], "is not a bound"),
        (["TABLE", "--constraint", "compile_s<=0.01"], "no setting meets the constraint compile_s<=0.01"),
        (["TABLE", "--stop", "soon"], "is not a rule"),
        (["TABLE", "--gpu-budget-s", "-1"], "is not a time"),
        (["TABLE", "--seeds", "0"], "--seeds 0 is too few"),
        (["TABLE", "--target", "98"], "--target 98 is not a share"),
        (["TABLE", "--searcher", "best"], "--searcher cannot be 'best'; use one of gain, gp, grid"),
        (["x" * 300], "cannot be read (File name too long)"),
        (["OLD"], "schema version 1"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence_with_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (tmp_path / "old").mkdir()
    line = DONE[0].to_json().replace('"schema_version":2', '"schema_version":1')
    (tmp_path / "old" / "trials.jsonl").write_text(line + "\n")
    places = {"TABLE": str(folder), "OLD": str(tmp_path / "old")}
    assert simulate.main([places.get(word, word) for word in words]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def test_the_command_compares_searchers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([str(folder), "--searcher", "grid", "gain", "--seeds", "3", "--prune"]) == 0
    printed = capsys.readouterr().out
    assert "30 settings of captioning small" in printed
    assert "grid" in printed
    assert "gain" in printed


def test_a_replay_starts_neither_ray_nor_torch_nor_optuna(folder: Path, repository: Path) -> None:
    code = (
        "import sys; from orchestrator.simulate import main; "
        f"main([{str(folder)!r}, '--seeds', '1']); print(*sorted({{'ray', 'torch', 'optuna'}} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines()[-1].split() == []


def test_a_record_of_every_row_is_whole(folder: Path) -> None:
    assert [TrialRecord.from_json(line) for line in (folder / "trials.jsonl").read_text().splitlines()] == DONE
    assert rows_of(DONE).keys() == read_table(folder).rows.keys()
