"""`python -m analysis.export`: tables that can be read back, and a `best.py` that has run before it is offered."""

from __future__ import annotations

import ast
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis.best_script import Outcome, best_script, rerun
from analysis.export import main, to_csv, to_parquet
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord

EAGER, FULL = "scope=eager,padding=longest", "scope=full,options.epilogue_fusion=on"

SOURCE = '''"""Toy: eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OPTIMIZER_OPTIONS = {"foreach": True}


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(inputs: dict[str, Any], before_update: Callable[[], None] | None = None) -> torch.Tensor:
        loss = model(**inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return step
'''


def toy(low: float = 0.001, high: float = 1e9, **fields: Any) -> TrialRecord:
    """A record of an eager toy, with this interval of throughput."""
    usual: dict[str, Any] = {
        "workload": "toy_workloads:Toy", "size": "only", "device": "cpu", "source": SOURCE, "samples_per_s_ci95": (low, high),
    }  # fmt: skip
    return trial(EAGER, min(500.0, high), 0.5, **(usual | fields))


def ends_with(code: object, *, finite: bool) -> str:
    """A program that prints figures as `best.py` does, without training, and ends with this exit code."""
    figures = {"finite": finite, "samples_per_s": 1.0, "device": "cpu"}
    return f"from __future__ import annotations\n\nimport sys\n\nprint({json.dumps(figures)!r})\nsys.exit({code!r})\n"


def code_of(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a `best.py` in this process, which has imported torch already, and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["best.py", *words])
    with pytest.raises(SystemExit) as ended:
        exec(compile(script, "best.py", "exec"), {"__name__": "__main__"})
    return ended.value.code


def row(make_sweep: MakeSweep, record: TrialRecord) -> pd.Series:
    return analysis.load(make_sweep([record])).iloc[0]


def test_the_script_begins_with_the_source_that_was_measured(make_sweep: MakeSweep) -> None:
    script = best_script(row(make_sweep, toy()), seed=7, remarks=["Ran."])
    assert script.startswith(SOURCE.rstrip())
    assert "# Ran.\n" in script
    assert "seed=7," in script
    assert 'workload="toy_workloads:Toy",' in script
    imported = [
        (getattr(node, "module", None), alias.name)
        for node in ast.parse(script).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert len(imported) == len(set(imported)), "nothing is imported twice"


def test_what_a_record_says_is_a_string_in_the_script(make_sweep: MakeSweep) -> None:
    hostile = '"); import os  # \\ "'
    script = best_script(row(make_sweep, toy(workload=hostile)), seed=0)
    call = ast.parse(script).body[-1]
    strings = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
    assert hostile in strings


def test_without_a_source_there_is_nothing_to_export(make_sweep: MakeSweep) -> None:
    with pytest.raises(ConfigError, match="holds no source"):
        best_script(row(make_sweep, toy(source=None)), seed=0)


@pytest.mark.slow
def test_a_run_in_a_fresh_process_is_compared_with_the_recorded_interval(make_sweep: MakeSweep) -> None:
    inside = row(make_sweep, toy(high=math.inf))
    said: list[str] = []
    came = rerun(inside, best_script(inside, seed=0), say=said.append)
    assert came.outcome is Outcome.INSIDE, came.sentence
    assert came.came["samples_per_s"] > 0
    assert came.came["device"] == "cpu"
    assert "inside the recorded 0.001 or more" in came.sentence
    assert "compiling and warming up" in said
    assert any("timing 5 passes" in line for line in said)


def test_a_throughput_outside_of_the_interval_is_said_and_still_offered(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep([toy(0.0001, 0.0002, source=ends_with(0, finite=True))])
    assert main([str(folder), "--only", "best", "--steps", "1k"]) == 0
    told = json.loads((folder / "best.json").read_text())
    assert told["outcome"] == "outside"
    assert "above the recorded" in told["sentence"]
    out, err = capsys.readouterr()
    assert told["sentence"] in out
    assert "once more in a fresh process" in err
    assert f"# {told['sentence']}\n" in (folder / "best.py").read_text()
    assert told["job"]["steps"] == 1000


@pytest.mark.slow
def test_what_fails_is_not_offered_and_an_earlier_one_goes(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep([toy(workload="toy_workloads:NoSuch")])
    (folder / "best.py").write_text("of an earlier sweep")
    assert main([str(folder), "--only", "best"]) == 1
    assert not (folder / "best.py").exists()
    told = json.loads((folder / "best.json").read_text())
    assert told["outcome"] == "failed"
    assert "NoSuch" in told["sentence"]
    assert "not offered" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_that_is_not_finite_fails(
    make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = row(make_sweep, toy(source=SOURCE.replace("loss.detach().clone()", "loss.detach() * float('nan')")))
    assert code_of(best_script(bad, seed=0), ["--device", "cpu"], monkeypatch) == 1
    assert json.loads(capsys.readouterr().out)["finite"] is False
    came = rerun(bad, ends_with(1, finite=False))
    assert came.outcome is Outcome.FAILED
    assert "not finite" in came.sentence


def test_a_run_that_breaks_after_its_figures_is_not_said_to_have_a_loss_that_is_not_finite(make_sweep: MakeSweep) -> None:
    came = rerun(row(make_sweep, toy()), ends_with("no more", finite=True))
    assert came.outcome is Outcome.FAILED
    assert came.sentence.endswith("failed: exit code 1: no more")


@pytest.mark.slow
def test_a_run_that_does_not_end_is_given_up(make_sweep: MakeSweep) -> None:
    stuck = row(make_sweep, toy(source=SOURCE + "\nimport time\n\ntime.sleep(600)\n"))
    came = rerun(stuck, best_script(stuck, seed=0), timeout_s=3)
    assert came.outcome is Outcome.FAILED
    assert "did not finish within 3.00 s" in came.sentence


def test_a_time_longer_than_any_timer_is_no_trouble(make_sweep: MakeSweep) -> None:
    quick = row(make_sweep, toy(source="raise SystemExit(1)\n"))
    assert rerun(quick, "raise SystemExit(1)\n", timeout_s=1e300).outcome is Outcome.FAILED


@pytest.mark.slow
def test_another_device_is_not_run_and_said(make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = row(make_sweep, toy(device="NVIDIA Imaginary"))
    words = ["--device", "cpu", "--expect-device", "NVIDIA Imaginary"]
    assert code_of(best_script(elsewhere, seed=0), words, monkeypatch) == 3
    came = rerun(elsewhere, "raise SystemExit(3)")
    assert came.outcome is Outcome.OTHER_DEVICE
    assert "this host is not NVIDIA Imaginary" in came.sentence


def test_without_torch_nothing_is_run_and_an_earlier_program_is_kept(
    make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("analysis.best_script.find_spec", lambda name: None)
    folder = make_sweep([toy()])
    assert main([str(folder), "--only", "best"]) == 0
    assert "Not run again, because torch is not installed here." in capsys.readouterr().out
    assert "because torch is not installed here" in (folder / "best.py").read_text()


def test_no_rerun_offers_it_unseen_and_says_so(make_sweep: MakeSweep) -> None:
    folder = make_sweep([toy()])
    assert main([str(folder), "--only", "best", "--no-rerun"]) == 0
    assert "# Not run again before it was written.\n" in (folder / "best.py").read_text()


def test_a_setting_can_be_named_instead_of_recommended(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    slow = trial("scope=eager,padding=max", 100, 0.5, source=SOURCE)
    folder = make_sweep([toy(), slow])
    assert main([str(folder), "--only", "best", "--no-rerun", "--setting", slow.settings_key]) == 0
    assert json.loads((folder / "best.json").read_text())["settings_key"] == slow.settings_key
    assert main([str(folder), "A1", "--only", "best", "--no-rerun"]) == 0
    assert json.loads((folder / "best.json").read_text())["setting_id"] == "A1"
    capsys.readouterr()
    for words, complaint in (
        (["--setting", "scope=full"], "no usable trial of the setting 'scope=full'"),
        (["A3"], "no setting A3; its settings are A1 to A2"),
        (["A1", "--setting", "A2"], "leave one of them out"),
    ):
        assert main([str(folder), *words, "--only", "best"]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["abc", [1], math.inf, 1.5, True])
def test_a_seed_that_is_none_is_one_sentence(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], seed: object) -> None:
    folder = make_sweep([toy()], config={"seed": seed})
    assert main([str(folder), "--only", "best", "--no-rerun"]) == 2
    said = capsys.readouterr().err
    assert f"sweep.json has the seed {seed!r}, which is not a whole number" in said
    assert said.count("\n") == 1
    assert not (folder / "best.py").exists()


@pytest.mark.parametrize(("config", "seed"), [({"seed": 7}, 7), ({}, 0), ({"seed": None}, 0)])
def test_the_script_has_the_seed_of_the_sweep(make_sweep: MakeSweep, config: dict[str, Any], seed: int) -> None:
    folder = make_sweep([toy()], config=config)
    assert main([str(folder), "--only", "best", "--no-rerun"]) == 0
    assert f"seed={seed}," in (folder / "best.py").read_text()


def test_a_setting_that_is_not_usable_cold_is_refused_with_the_reason(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    warm = trial(FULL, 900, 6, caches=Caches.WARM, trial_id="warm", source=SOURCE)
    cold = trial(FULL, status=Status.INFEASIBLE, label="diverges", trial_id="cold", source=SOURCE)
    folder = make_sweep([toy(), warm, cold])
    assert main([str(folder), "--only", "best", "--no-rerun", "--setting", warm.settings_key]) == 2
    assert "its cold trial is infeasible, diverges; choose another" in capsys.readouterr().err
    assert not (folder / "best.py").exists()


def test_tables_read_back_as_they_were(make_sweep: MakeSweep, tmp_path: Path) -> None:
    broken = trial(FULL, status=Status.FAILED, label="exception", reason='a, "quoted"\nreason; é')
    df = analysis.load(make_sweep([toy(perf_hints=["one", "two"]), broken]))
    to_csv(df, tmp_path / "t.csv")
    to_parquet(df, tmp_path / "t.parquet")
    csv, parquet = pd.read_csv(tmp_path / "t.csv"), pd.read_parquet(tmp_path / "t.parquet")
    assert list(parquet.columns) == list(df.columns)
    assert "step_ms" not in csv
    assert csv["reason"][1] == parquet["reason"][1] == broken.reason
    assert csv["samples_per_s"][0] == parquet["samples_per_s"][0] == 500
    assert list(parquet["step_ms"][0]) == df["step_ms"][0]
    assert json.loads(csv["perf_hints"][0]) == list(parquet["perf_hints"][0]) == ["one", "two"]
    assert json.loads(parquet["numerics"][0]) == df["numerics"][0]
    assert json.loads(csv["options"][1]) == {"epilogue_fusion": True}


def test_every_form_is_written_beside_the_sweep(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep()
    assert main([str(folder), "--only", "csv", "parquet", "md"]) == 0
    assert [Path(line).name for line in capsys.readouterr().out.split()] == ["trials.csv", "trials.parquet", "trials.md"]
    assert (folder / "trials.md").read_text().startswith("| id | setting |")
    assert len(pd.read_csv(folder / "trials.csv")) == 9
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "xlsx"], "--only cannot be 'xlsx'; use one of best, csv, md, parquet"),
        (["--steps", "1k", "10k"], "best.py is for one job"),
        (["--only", "md", "--output", "/dev/null"], "/dev/null is not a folder and cannot become one (File exists)"),
        (
            ["--only", "best", "--output", "/dev/null/below"],
            "/dev/null/below is not a folder and cannot become one (Not a directory)",
        ),
        (["--steps", "1e20"], "steps=1e+20 is too many for a job"),
        (["--timeout-s", "soon"], "'soon' is not an amount"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert main([str(make_sweep([toy()])), "--no-rerun", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_folder_to_write_to_is_made(make_sweep: MakeSweep, tmp_path: Path) -> None:
    into = tmp_path / "new" / "folder"
    assert main([str(make_sweep()), "--only", "csv", "--output", str(into)]) == 0
    assert [path.name for path in into.iterdir()] == ["trials.csv"]


def scripts_config(**fields: Any) -> dict[str, Any]:
    job = {"path": "/home/me/my train.py", "arguments": ["--width", "32"], "folder": "/home/me", "in_place": False, "seed": 0}
    return {"recipe": "quickstart", "workload": "my train.py", "size": "only", "seed": 0, "script": job | fields}


def test_of_a_script_it_says_how_to_train_with_the_setting(make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep([toy(workload="my train.py")], config=scripts_config())
    assert main([str(folder), "--only", "best"]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command == ["compile-sweep", "run", "--settings", f"{folder}:A1", "/home/me/my train.py", "--width", "32"]
    assert not list(folder.glob("best.*"))


@pytest.mark.parametrize("fields", [{"path": None}, {"arguments": [1]}, {"arguments": 5}])
def test_a_script_without_a_file_is_one_sentence(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str], fields: dict[str, Any]
) -> None:
    assert main([str(make_sweep([toy(workload="my train.py")], config=scripts_config(**fields))), "--only", "best"]) == 2
    assert "names no file; put its path and arguments there" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--steps", "many"], ["--nodes", "0"], ["--constraint", "compile_s"]])
def test_what_is_wrong_with_the_job_is_said_before_anything_is_written(make_sweep: MakeSweep, words: list[str]) -> None:
    folder = make_sweep([toy()])
    before = sorted(folder.iterdir())
    assert main([str(folder), "--no-rerun", *words]) == 2
    assert sorted(folder.iterdir()) == before
