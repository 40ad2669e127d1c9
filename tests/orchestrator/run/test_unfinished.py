"""A setting during which the sweep died twice is recorded and skipped; one that was running at an orderly end runs again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from samples import REPOSITORY, TESTS

from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError, SessionError
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import SweepConfig
from orchestrator.run.sweep_folder import STARTS_FILE, note_start, record_poison, withdrawn_if_ended_in_order

POISON, SOUND = CompileSettings.parse("scope=full"), CompileSettings.parse("scope=eager")
CONFIG = SweepConfig(workload="captioning", size="tiny")


def died(folder: Path, trial_id: str, settings: CompileSettings = POISON) -> None:
    """Starts a trial and loses it together with what would record it."""
    note_start(folder, trial_id, settings.key)


def test_after_two_ends_it_is_recorded_with_the_reason_and_not_counted_again(tmp_path: Path) -> None:
    died(tmp_path, "001-a")
    died(tmp_path, "001-a")  # in another process of the same trial
    assert record_poison(tmp_path, CONFIG) == []
    died(tmp_path, "002-b")
    died(tmp_path, "003-c", SOUND)
    (sentence,) = record_poison(tmp_path, CONFIG)
    assert "died 2 times while this setting ran" in sentence
    (recorded,) = records.read(tmp_path)
    assert (recorded.trial_id, recorded.settings_key, recorded.status) == ("002-b", POISON.key, Status.FAILED)
    assert recorded.label == Label.SWEEP_DIED
    assert recorded.reason is not None
    assert record_poison(tmp_path, CONFIG) == []


def test_a_start_that_came_to_a_record_is_none(tmp_path: Path) -> None:
    for trial_id in ("1", "2", "3"):
        died(tmp_path, trial_id)
        done = TrialRecord(trial_id=trial_id, settings=POISON.to_dict(), settings_key=POISON.key, status=Status.FAILED)
        records.append(tmp_path, done)
    assert record_poison(tmp_path, CONFIG) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RecordsError, None])
def test_what_was_in_flight_when_the_sweep_ended_in_order_is_not_counted(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    for trial_id in ("1", "2", "3"):
        with nullcontext() if error is None else pytest.raises(error), withdrawn_if_ended_in_order(tmp_path):
            died(tmp_path, trial_id)
            if error is not None:
                raise error("stopped")
    assert record_poison(tmp_path, CONFIG) == []


def test_a_trial_whose_line_a_person_removed_to_repeat_it_is_not_counted(tmp_path: Path) -> None:
    for trial_id in ("1", "2", "3"):
        with withdrawn_if_ended_in_order(tmp_path):
            died(tmp_path, trial_id)
            done = TrialRecord(trial_id=trial_id, settings=POISON.to_dict(), settings_key=POISON.key, status=Status.FAILED)
            records.append(tmp_path, done)
        (tmp_path / records.TRIALS_FILE).write_text("")
    assert record_poison(tmp_path, CONFIG) == []


def test_where_what_runs_the_trials_failed_it_is_counted(tmp_path: Path) -> None:
    for trial_id in ("1", "2"):
        died(tmp_path, trial_id)
        with pytest.raises(SessionError), withdrawn_if_ended_in_order(tmp_path):
            raise SessionError("the raylet is gone")
    assert len(record_poison(tmp_path, CONFIG)) == 1


def test_half_a_line_and_a_log_that_cannot_be_written_count_nothing(tmp_path: Path) -> None:
    died(tmp_path, "1")
    with (tmp_path / STARTS_FILE).open("a") as log:
        log.write('{"trial_id": "2", "settings_k')
    assert record_poison(tmp_path, CONFIG) == []
    (tmp_path / STARTS_FILE).unlink()
    (tmp_path / STARTS_FILE).mkdir()
    died(tmp_path, "3")


@pytest.mark.nightly("kills four sweeps; the tests above count what was started")
@pytest.mark.slow
def test_a_setting_that_ends_its_sweep_is_skipped_at_the_third_time_and_the_others_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "sweep"
    settings = ("scope=eager,padding=longest,pad_multiple=4", "scope=eager,padding=max")
    words = ("--runner", "local", "--workload", "faulty_workloads:EndsItsSweep", "--settings", *settings)

    def swept(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestrator.sweep", "--output", str(output), "--no-warm-start", "--no-confirm", *words]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=200, check=False)

    assert [swept(*words).returncode, swept("--resume").returncode] == [-9, -9]
    done = swept("--resume")
    assert done.returncode == 0, done.stderr
    assert "died 2 times while this setting ran, so it is not run again" in done.stdout
    found = [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]
    assert {record["settings"]["pad_multiple"]: record["label"] or record["status"] for record in found} == {
        4: "sweep-died",
        None: "ok",
    }
