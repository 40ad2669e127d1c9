"""The live view shows what matters within the terminal's height, whatever its size."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from samples import REPOSITORY, measured

import analysis
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import SweepFolderError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.guard.progress import Progress
from orchestrator.view.live import LiveView, State, screen

FOLDER = REPOSITORY / "docs" / "results" / "h200-captioning"
SIZES = [(80, 24), (140, 40)]


@pytest.fixture(scope="module")
def recorded() -> list[TrialRecord]:
    return list(records.read(FOLDER))


@pytest.fixture(scope="module")
def baseline() -> str | None:
    return analysis.baseline_key(analysis.load(FOLDER))


def running(keys: list[str]) -> list[Progress]:
    return [
        Progress(trial_id=str(place), settings_key=key, phase="warming-up", in_phase_s=12.0, elapsed_s=20.0, neighbors=0)
        for place, key in enumerate(keys)
    ]


def shown(state: State, size: tuple[int, int], **expected_s: float) -> list[str]:
    width, height = size
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen(state, title="grid: captioning (base)", elapsed_s=600.0, expected_s=expected_s, size=console.size))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_running", [1, 4, 60])
def test_of_74_records_the_best_and_the_last_are_seen_and_nothing_is_cut_off(
    recorded: list[TrialRecord], baseline: str | None, size: tuple[int, int], num_running: int
) -> None:
    keys = [record.settings_key for record in recorded]
    state = State(planned=120, records=recorded, running=running((keys * 2)[:num_running]), baseline=baseline, stopping=True)
    lines = shown(state, size)
    assert len(lines) < size[1]
    assert max(map(len, lines)) <= size[0] - len("^C^C")  # a terminal writes that behind the last line
    assert lines[0].startswith("finishing the")
    assert "Ctrl-C again stops now" in " ".join(lines[:2])
    text = "\n".join(lines)
    assert "74 of 120 done (" in text
    best = max(record.samples_per_s or 0.0 for record in recorded if record.status == "ok")
    assert f"{best:,.1f}" in text
    rows = lines[next(place for place, line in enumerate(lines) if line.startswith("best so far")) + 1 :][:5]
    assert all("×" in row for row in rows)
    last = lines[next(place for place, line in enumerate(lines) if line.startswith("finished last")) + 1 :]
    assert len(last) == 3
    most = size[1] - 19
    assert (f"and {num_running - most} more" in text) == (num_running > most)


def test_time_left_goes_by_the_pace_so_far(recorded: list[TrialRecord]) -> None:
    first, second, third = recorded[:3]
    took = first.wall_s or 0.0
    expected = {first.settings_key: took / 2, second.settings_key: 100.0, third.settings_key: 30.0}
    state = State(planned=3, records=[first], running=running([third.settings_key]))
    (line,) = [line for line in shown(state, (140, 40), **expected) if " of 3 done" in line]
    assert "about 3.7 min left" in line  # twice (100 s, and 10 s of what runs)


def test_before_anything_is_known_there_is_a_screen_too() -> None:
    assert shown(State(planned=None), (80, 24)) == [
        "Ctrl-C finishes running trials and the report; a second one stops now",
        "grid: captioning (base)",
        "0 done, 10.0 min",
    ]


def test_what_ends_a_sweep_is_not_hidden_by_what_the_view_cannot_read(tmp_path: Path) -> None:
    view = LiveView(
        console=Console(file=io.StringIO()),
        folder=tmp_path,
        title="toy",
        planned=1,
        expected_s={},
        front_of=lambda folder: [],
        baseline_of=lambda folder: None,
        stopping=threading.Event(),
        running=list,
    )
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(SweepFolderError, match="the disk is full"), view:
        raise SweepFolderError("the disk is full")


def test_what_a_trial_is_expected_to_take_is_what_is_known_when_it_starts(tmp_path: Path) -> None:
    told, (one,) = io.StringIO(), running(["scope=full"])
    at_work: list[Progress] = []
    view = LiveView(
        console=Console(file=told, width=120),
        folder=tmp_path,
        title="toy",
        planned=1,
        expected_s={one.settings_key: 81.0},
        front_of=lambda folder: [],
        baseline_of=lambda folder: None,
        stopping=threading.Event(),
        running=lambda: at_work,
    )
    view.expect({one.settings_key: 12.0})
    at_work.append(replace(one, phase="starting"))
    view._look()
    assert "(expected 12 s)" in told.getvalue()


def test_what_went_wrong_stays_on_a_terminal_above_the_live_view_and_is_broken_between_words(tmp_path: Path) -> None:
    told, console = io.StringIO(), {"width": 60, "height": 24, "force_terminal": True, "color_system": None}
    view = LiveView(
        console=Console(file=told, **console),  # type: ignore[arg-type]
        folder=tmp_path,
        title="toy",
        planned=2,
        expected_s={},
        front_of=lambda folder: [],
        baseline_of=lambda folder: None,
        stopping=threading.Event(),
        running=list,
    )
    why = "scope=regional found no repeated blocks in the model, use scope=full"
    outcomes = {
        "scope=eager": {"status": Status.OK, "samples_per_s": 850.0, "compile_s": 12.0, **measured(850.0, 12.0)},
        "scope=regional": {"status": Status.FAILED, "label": "exception", "reason": why},
    }
    for text, fields in outcomes.items():
        setting = CompileSettings.parse(text)
        record = TrialRecord(trial_id=text, settings=setting.to_dict(), settings_key=setting.key, **fields)  # type: ignore[arg-type]
        records.append(tmp_path, record)
    with view:
        pass
    printed = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", told.getvalue()).splitlines()
    (at,) = (place for place, line in enumerate(printed) if "2/2 failed (exception): A2 regional" in line)
    assert " ".join(printed[at : at + 3]).endswith(why)
    assert max(map(len, printed[at : at + 3])) <= 60
    assert not any("1/2 ok" in line for line in printed)
