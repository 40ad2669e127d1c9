"""The command that trains a script with a setting: everywhere the same, and one that works as it is printed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis import recommend
from analysis.final_summary import ending
from analysis.page.page import report_page
from analysis.training_command import swept_script, training_command
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.winner import settings_of

AS_WRITTEN, WINNER = "scope=eager,as_written=on", "scope=full,dynamic=auto"


def config(path: Path, **fields: Any) -> dict[str, Any]:
    job = {"path": str(path), "arguments": ["--width", "3 2"], "folder": str(path.parent), "in_place": False, "seed": 0}
    return {"recipe": "auto", "workload": path.name, "size": "script", "seed": 0, "script": job | fields}


@pytest.mark.slow
def test_every_output_names_the_same_command_and_it_finds_the_setting(
    make_sweep: MakeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [trial(AS_WRITTEN, 500, 0.1), trial(WINNER, 1000, 20)]
    folder = make_sweep(trials, config=config(tmp_path / "train.py")).rename(tmp_path / "my sweep")
    monkeypatch.chdir(tmp_path)
    command = "compile-sweep run --settings 'my sweep':A2 train.py --width '3 2'"
    assert ending(Path("my sweep")).training_command == command
    assert recommend.main(["my sweep"]) == 0
    assert f"  To train with it: {command}\n" in capsys.readouterr().out
    page = report_page(folder)
    assert "To train with “A2 full, auto”:" in page
    assert f"compile-sweep run --settings DIR:A2 {tmp_path}/train.py --width &#39;3 2&#39;" in page
    assert settings_of(shlex.split(command)[3]) == CompileSettings.parse(WINNER)


@pytest.mark.parametrize(
    ("settings", "fields", "num_workers", "command"),
    [
        (WINNER, {"folder": "/elsewhere"}, 1, "compile-sweep run --settings DIR:A1 HERE/train.py --width '3 2'"),
        (WINNER, {"module": "package.train"}, 1, "compile-sweep run --settings DIR:A1 -m package.train --width '3 2'"),
        (WINNER, {}, 2, "torchrun --nproc-per-node 2 -m compile_sweep.run --settings DIR:A1 train.py --width '3 2'"),
        (f"{WINNER},batch_size=8", {"batch_argument": "--width"}, 1, "compile-sweep run --settings DIR:A1 train.py --width 8"),
        (AS_WRITTEN, {}, 1, "python train.py --width '3 2'"),
    ],
)
def test_the_command_starts_the_script_as_the_trial_did(
    settings: str, fields: dict[str, Any], num_workers: int, command: str,
    make_sweep: MakeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    script = config(Path(os.getcwd()) / "train.py", **fields)
    folder = make_sweep([trial(settings, 500, 0.1, num_workers=num_workers)], config=script)
    (row,) = (row for _, row in analysis.load(folder).iterrows())
    found = swept_script(script)
    assert found is not None
    assert found.command(row, "DIR", current=os.getcwd()) == command.replace("HERE", os.getcwd())


@pytest.mark.parametrize(
    ("check", "added", "offered"),
    [
        ({"allowed": 0.35}, "", True),
        ({"allowed": 0.03}, "", False),
        ({"allowed": None}, "", True),
        ({"allowed": None, "evaluations": 0}, "", False),
        ({"allowed": 0.35, "beside_eager": True}, "", False),
        ({"allowed": 0.35}, ",inductor.fallback_random=on", False),
        ({"allowed": 0.35}, ",backend=aot_eager", False),
        ({"allowed": "much", "evaluations": None}, "", False),  # as in a record that somebody else wrote
    ],
)
def test_a_check_with_eagers_random_numbers_is_offered_where_the_own_ones_hide_errors(
    check: dict[str, Any], added: str, offered: bool, make_sweep: MakeSweep
) -> None:
    def numerics(*, random: bool) -> dict[str, Any]:
        found = {"outcome": "ok", "beside_eager": False, "evaluations": 60, **check}
        return {"status": "ok", "random": random, "gradient_check": found}

    def finer(name: str, *more: TrialRecord, random: bool = True) -> str | None:
        compiled = trial(f"{WINNER}{added}", 1000, 20, numerics=numerics(random=random))
        return ending(make_sweep([trial(AS_WRITTEN, 500, 0.1), compiled, *more], name=name)).finer_check

    key = CompileSettings.parse(f"{WINNER},inductor.fallback_random=on").key
    assert finer("random") == (key if offered else None)
    assert finer("not random", random=False) is None
    if offered:
        assert finer("measured", trial(key, 600, 20, numerics=numerics(random=True))) is None


def test_a_workload_has_no_such_command(make_sweep: MakeSweep) -> None:
    folder = make_sweep([trial(WINNER, 500, 0.1)])
    assert training_command(folder, analysis.load(folder).iloc[0]) is None
    with pytest.raises(ConfigError, match="put its path and arguments there"):
        swept_script({"script": {"path": 3}})
