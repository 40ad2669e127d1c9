"""A resumed sweep: its original options hold unless others are given."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_sweep import command_line
from compile_sweep.schema import record
from compile_sweep.schema.errors import SessionError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TRIALS_FILE, TrialRecord, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator import sweep
from orchestrator.config import EACH_RUN, Device, SearchConfig, SweepCommand, SweepConfig
from orchestrator.environment import fingerprint
from orchestrator.run import sweep_folder
from orchestrator.run.stages import Stages
from orchestrator.search import Learned, Searcher
from orchestrator.tracking import delivery
from orchestrator.view import printed


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins a sweep with some fields and returns the configuration with which `--resume` and these words continue."""
    planned: list[SweepConfig] = []
    monkeypatch.setattr(sweep, "learned_for", lambda *asked: Learned())  # the folders do not exist here
    monkeypatch.setattr(printed, "show_plan", lambda console, config, *others, **lengths: planned.append(config))

    def again(fields: dict[str, Any], *words: str) -> SweepConfig:
        settings = (CompileSettings.parse("scope=eager"), CompileSettings.parse("scope=full"))
        config = SweepConfig(
            **{"recipe": "given", "workload": "captioning", "size": "tiny", "settings": settings, "device": Device.CPU, **fields}
        )
        output = tmp_path / str(len(planned))
        sweep_folder.begin(output, config, fingerprint(), None)
        assert sweep.main(["--dry-run", "--resume", "--output", str(output), *words]) == 0
        return planned[-1]

    return again


@pytest.mark.parametrize(
    ("before", "words", "expected_s"),
    [
        ({"trial_deadline_s": 3000.0}, (), 3000.0),
        ({"trial_deadline_s": 3000.0}, ("--trial-deadline-s", "2000"), 2000.0),
        ({"trial_deadline_s": 3000.0}, ("--compile-deadline-s", "2000"), 3000.0),
        ({}, ("--compile-deadline-s", "5000"), 5300.0),
        (
            {"trial_deadline_s": 1000.0},
            ("--compile-deadline-s", "5000"),
            5300.0,
        ),  # as earlier versions wrote it down
    ],
)
def test_a_trial_may_take_as_long_as_it_might_before(
    resumed: Any, before: dict[str, float], words: tuple[str, ...], expected_s: float
) -> None:
    assert resumed({"compile_deadline_s": 700.0, **before}, *words).whole_trial_s == expected_s


def test_a_search_learns_from_what_it_was_forced_to(resumed: Any) -> None:
    search = SearchConfig(searcher=Searcher.GAIN, learn_from=("/elsewhere",), learn_anyway=True, num_trials=5)
    found = resumed({"search": search}).search
    assert (found.learn_from, found.learn_anyway, found.num_trials) == (("/elsewhere",), True, 5)
    assert resumed({"search": search}, "--num-trials", "7").search.num_trials == 7


@pytest.mark.usefixtures("nothing_starts", "no_gpu")
def test_what_was_recorded_when_ray_gave_a_sweep_up_reaches_its_trackers(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    tracker = SimpleNamespace(log=lambda entry: logged.append(entry.trial_id), close=lambda report: logged.append("closed"))
    monkeypatch.setattr(delivery, "opened", lambda destination, output: tracker)
    full = CompileSettings.parse("scope=full")

    def run(*arguments: Any) -> None:
        done = {"settings": full.to_dict(), "settings_key": full.key, "status": Status.OK, "samples_per_s": 5.0}
        append(theirs, TrialRecord(trial_id="002-b", **done))  # type: ignore[arg-type]
        raise SessionError("Ray gave the sweep up")

    monkeypatch.setattr(Stages, "run", run)
    assert sweep.main(["--resume", "--output", str(theirs), "--log-to", "wandb:project"]) == 2
    assert logged == ["002-b", "closed"]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_starts", "no_gpu")
def test_paths_and_what_libraries_say_are_printed_with_their_brackets(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(report: Path | None) -> None:
        raise OSError("cannot write [/mnt/x]")

    monkeypatch.setattr(delivery, "opened", lambda destination, output: SimpleNamespace(close=refuse))
    monkeypatch.setattr(Stages, "run", lambda *arguments: False)
    output = theirs.rename(tmp_path / "runs[a]")
    assert sweep.main(["--resume", "--output", str(output), "--log-to", "wandb:project"]) == 0
    said = capsys.readouterr().out
    assert "OSError: cannot write [/mnt/x]" in said
    assert f"report: {output / 'report.html'}\n" in said


@pytest.mark.slow
def test_half_a_record_of_a_killed_driver_is_set_aside_and_said_once(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stages, "run", lambda *arguments: False)
    whole = (theirs / TRIALS_FILE).read_bytes()
    with (theirs / TRIALS_FILE).open("ab") as log:
        log.write(b'{"schema_version":2,"trial_id":"002-abc')
    words = ["--resume", "--output", str(theirs)]
    assert sweep.main(words) == 0
    assert f"{TRIALS_FILE} ended in the middle of a line, which is now in {TRIALS_FILE}.torn" in capsys.readouterr().out
    assert (theirs / TRIALS_FILE).read_bytes() == whole
    assert sweep.main(words) == 0
    assert "ended in the middle" not in capsys.readouterr().out


def test_more_trials_than_a_list_was_cut_to_need_the_list_again(resumed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cut = {"recipe": "quickstart", "search": SearchConfig(num_trials=2)}
    assert len(resumed(cut, "--num-trials", "2").settings) == 2
    assert len(resumed({"recipe": "quickstart"}, "--num-trials", "4").settings) == 2, "that is all of it"
    with pytest.raises(AssertionError):
        resumed(cut, "--num-trials", "4")
    assert "--num-trials 4 is more than the 2 settings that the sweep kept; name its recipe" in capsys.readouterr().err


def test_whether_the_end_is_left_out_is_said_to_each_run(resumed: Any) -> None:
    config = resumed({"confirm": False, "warm_starts": False})
    assert (config.confirm, config.warm_starts) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("--max-concurrent", "2"), ("--max-concurrent", "2", "--no-confirm", "--no-warm-start"), ("--searcher", "random")],
)
def test_the_command_to_go_on_repeats_what_is_each_runs_own_but_no_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    output = tmp_path / "my sweep"
    settings = (
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--settings",
        "scope=eager",
        "--time-budget-s",
        "1",
    )  # too little for a trial
    assert sweep.main([*settings, "--output", str(output), *words]) == 0
    (command,) = (line.partition("go on with: ")[2] for line in capsys.readouterr().out.splitlines() if "go on with: " in line)
    assert command.startswith(f"{sweep.PROG} ")
    told, asked = (command_line.parse(SweepCommand, sweep.PROG, given) for given in (shlex.split(command)[3:], words))
    assert (told.run.resume, told.run.output, told.sweep.time_budget_s) == (True, output, None)
    for own in {*EACH_RUN} - {"time_budget_s"}:
        assert getattr(told.sweep, own) == getattr(asked.sweep, own)


@pytest.mark.slow
def test_what_machines_ended_is_not_blamed_on_a_budget_that_nobody_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, eager = tmp_path / "sweep", CompileSettings.parse("scope=eager")
    ids = map(str, count())

    def lose(*asked: object) -> None:
        lost: dict[str, Any] = {"status": Status.FAILED, "label": "node-lost", "reason": "gone"}
        record.append(output, TrialRecord(trial_id=next(ids), settings=eager.to_dict(), settings_key=eager.key, **lost))

    monkeypatch.setattr(Stages, "run", lose)
    words = ["--size", "tiny", "--device", "cpu", "--settings", "scope=eager", "--output", str(output)]
    assert sweep.main(words) == 0
    assert "1 of 1 settings did not run (machines failed); go on with: " in capsys.readouterr().out
    assert sweep.main([*words[:4], "--resume", "--output", str(output), "--time-budget-s", "1"]) == 0
    assert "1 of 1 settings did not run (the time budget did not suffice for them); go on" in capsys.readouterr().out
