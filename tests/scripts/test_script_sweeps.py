"""The commands on a person's script: a plan's settings, what is refused, and a whole sweep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_sweep.schema import record
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.redact import redact_json
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import SEE_OUTPUT
from compile_sweep.script.winner import settings_of
from orchestrator.plan.recipes import AS_WRITTEN
from orchestrator.plan.scripts import findings_lines, job_of, split_arguments
from orchestrator.run import trial_spec
from orchestrator.run.worker import _with_last_words
from orchestrator.sweep import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_plan_begins_with_the_script_as_it_is_and_says_what_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["quickstart", "--script", "plain_loop.py", "--device", "cpu", "--dry-run", "--output", "new", "--", "--width", "32"]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "recipe quickstart: plain_loop.py (script)" in said
    assert said.index("as the script has it") < said.index("regional, default, auto")
    assert "the script pads its own" in said
    assert "the script orders its own samples" in said
    assert "compile loss" not in said
    assert (
        main(["quickstart", "--script", "plain_loop.py", "--device", "cpu", "--dry-run", "--output", "new", "--compile-loss"])
        == 0
    )
    assert "compile loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--script", "nothing.py"], "there is no such file"),
        (["--script", "data"], "--script data is a folder; name the Python file in it that trains"),
        (["--script", "python plain_loop.py --width 32"], "arguments after --: --script plain_loop.py -- --width 32"),
        (["--script", "WANDB_MODE=off torchrun -m lib.train"], "is a whole command; name only the file, and its arguments after"),
        (["--script", "my plain_loop.py"], "there is no such file"),
        (["--script", "data/meta.pkl"], "is not a Python file; name the one that trains"),
        (["--script", "train.ipynb"], "is a notebook; save it as a Python file"),
        (["width=32", "--script", "vae.py"], "a script's own arguments follow after --, as in -- width=32"),
        (["--", "--width", "32"], "name one with --script FILE"),
        (["--in-place"], "name one with --script FILE"),
        (["--compile-loss"], "name one with --script FILE"),
        (["--settings", "scope=full,compile_loss=on"], "compile_loss is for scripts"),
        (["--settings", "scope=full,activation_checkpointing=off"], "activation_checkpointing=off is for scripts that recompute"),
        (["--script", "vae.py", "--settings", "scope=regional,compile_loss=on"], "compile_loss goes with scope=full"),
        (["--script", "vae.py", "--workload", "gpt2"], "--workload is for workloads"),
        (["--script", "vae.py", "--precompile"], "--precompile is for workloads"),
        (["--script", "vae.py", "--largest-batch"], "--largest-batch is for workloads"),
        (["--script", "vae.py", "--starts", "shared", "--cache-store", "redis://127.0.0.1:1"], "name a folder, s3://… or gs://…"),
        (["--script", "vae.py", "--settings", "scope=full,autocast=bf16"], "the script chooses its own autocast"),
        (["--script", "vae.py", "--explain", "scope=full"], "orchestrator.check --script"),
        (["--settings", "scope=eager,as_written=on"], "a workload has none; use --script"),
    ],
)
def test_what_does_not_go_with_a_script_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.ipynb").touch()
    own, *rest = [words[: words.index("--")], words[words.index("--") :]] if "--" in words else [words]
    assert main([*own, "--dry-run", "--device", "cpu", "--output", "new", *(rest[0] if rest else [])]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_scripts_arguments_are_what_follows_the_first_two_dashes() -> None:
    assert split_arguments(["--seed", "1", "--", "--seed", "2", "--", "x"]) == (["--seed", "1"], ["--seed", "2", "--", "x"])
    assert split_arguments(["--seed", "1"]) == (["--seed", "1"], None)
    assert split_arguments(["--batch-arg", "--batch-size", "--", "x"]) == (["--batch-arg=--batch-size"], ["x"])


def test_what_trials_found_is_said_once_as_the_unchanged_script_has_it() -> None:
    module, waits = "module net 2: Net of 9 parameters", "a step waits for its data {} of the time"
    findings = {
        "scope=full": [waits.format("9%"), module, "module net 3: Net of 8 parameters", "optimizer SGD, fused", "3 steps"],
        CompileSettings.from_dict(AS_WRITTEN).key: [module, waits.format("31%"), "optimizer SGD"],
    }
    expected = [waits.format("31%"), module, "optimizer SGD", "module net 3: Net of 8 parameters", "3 steps"]
    assert findings_lines(findings) == [f"found: {line}" for line in expected]


@pytest.mark.ray
@pytest.mark.nightly("sweeps three settings with Ray; other tests cover a trial and the plan separately")
def test_a_script_is_swept_its_winner_found_and_its_folder_left_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    output = tmp_path / "sweep"
    settings = ["scope=regional,dynamic=auto,backend=aot_eager", "scope=full,dynamic=auto,backend=aot_eager"]
    words = ["--script", "plain_loop.py", "--device", "cpu", "--settings", *settings, "--output", str(output)]
    run = subprocess.run(
        [sys.executable, "-m", "orchestrator.sweep", *words, "--", "--width", "32"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    trials = record.read(output)
    assert [(trial.label, trial.reason) for trial in trials] == [(None, None)] * 4
    assert [trial.settings["as_written"] for trial in trials] == [True, None, None, True]
    assert {trial.workload for trial in trials} == {"plain_loop.py"}
    assert all(trial.findings[0].startswith("module model: Net") for trial in trials)
    assert [trial.model_facts.get("has_blocks") for trial in trials] == [True, None, None, True]
    assert (output / "report.html").is_file()
    assert "compile-sweep recommend" in run.stdout
    assert settings_of(output).key in {trial.settings_key for trial in trials}
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_sweep_keeps_the_environment_and_ends_with_a_script_that_cannot_be_measured(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "heavy.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    (folder / "beside.py").touch()
    (folder / "tools").mkdir()
    (folder / "tools" / "odd.py").write_text(
        "import os, sys\nimport heavy, torch\nimport beside\nassert beside.__file__.startswith(os.getcwd()), beside.__file__\n"
        "imported = 'once' if heavy.IMPORTED_BY != os.getpid() else 'anew'\n"
        "sys.exit(f'no data, {imported}, threads: {torch.get_num_threads()}')\n"
    )
    words = ["--script", "tools/odd.py", "--device", "cpu", "--runner", "local", "--output", str(tmp_path / "sweep")]
    run = subprocess.run(
        [sys.executable, "-m", "orchestrator.sweep", *words, "--settings", "scope=eager,optimizer=fused", "scope=full"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "packages"), "."]), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (trial,) = record.read(tmp_path / "sweep")
    assert run.returncode == 2
    why = "the script ended after 0 steps with the message 'no data, once, threads: 1'"
    assert why in str(trial.reason)
    assert run.stderr.splitlines()[-1].startswith(f"error: odd.py cannot be measured as it is, and so with no setting: {why}")
    assert run.stderr.splitlines()[-1].endswith(f"; its whole output is in {tmp_path / 'sweep' / 'logs'}")


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("usage: train.py [-h] --data DATA\ntrain.py: error: --data is required\n", ": 'train.py: error: --data is required'"),
        ("", " (it printed nothing)"),
    ],
    ids=["a usage error", "nothing"],
)
def test_a_script_that_ends_at_once_is_quoted(printed: str, said: str, tmp_path: Path) -> None:
    up = "2026-11-30T07:58:54+00:00 worker 0 of 1 is up on vm, on cores 0, 1, as process 2093\n"
    log = tmp_path / "worker-0.log"
    log.write_text(f"{up}an earlier attempt\n{up}{printed}2026-11-30T07:58:55+00:00 building\n")
    text = f"the script ended with exit code 2 after 0 steps; {SEE_OUTPUT}"
    assert _with_last_words(text, log).startswith(f"{text}{said}")
    assert _with_last_words("the script raised OSError", log) == "the script raised OSError"


@pytest.mark.slow
def test_auto_tries_no_other_setting_of_a_script_that_fails_as_it_is_and_goes_on_once_it_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output = tmp_path / "train.py", tmp_path / "sweep"
    text = Path("plain_loop.py").read_text()
    script.write_text(f"raise RuntimeError('no data')\n{text}")

    monkeypatch.setattr(trial_spec, "_TIMED_SHARE", 1 / 500)  # a second of timed steps, whose figures are not looked at
    words = ["--device", "cpu", "--runner", "local", "--no-confirm", "--output", str(output), "--time-budget-s", "500"]
    first = ["--script", str(script), "--num-trials", "2", "--vary", "backend=aot_eager", "--cache-store", "none"]
    assert main([*words, *first]) == 2
    why = "train.py cannot be measured as it is, and so with no setting: the script raised RuntimeError at train.py:1"
    assert why in capsys.readouterr().err
    assert [trial.settings["as_written"] for trial in record.read(output)] == [True]
    assert (output / "report.html").is_file()
    script.write_text(text)
    assert main([*words, "--resume"]) == 0
    tried = [(trial.settings["as_written"], trial.status) for trial in record.read(output)]
    assert tried[:2] == [(True, "failed"), (True, "ok")]
    others = {status for as_written, status in tried if as_written is None}
    assert others
    assert others <= {"ok", "stopped"}, "one that is slower than the script as it is may be stopped"


COUNTER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(16, 32), nn.Linear(32, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.two(self.one(x).relu()) * (1 + 1 / (1 + self.calls))

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(100000):
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_auto_tries_what_the_advice_on_a_trial_names_and_goes_on_with_it(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "sweep"
    script.write_text(COUNTER)
    words = ["--device", "cpu", "--runner", "local", "--cache-store", "none", "--output", str(output), "--script", str(script)]
    assert main([*words, "--num-trials", "4", "--vary", "backend=aot_eager", "--no-confirm"]) == 0
    remedy = "dynamo.allow_unspec_int_on_nn_module=on"
    full = [trial for trial in record.read(output) if trial.settings["scope"] == "full"]
    assert (full[0].label, remedy in full[0].settings_key) == ("recompile-limit", False)
    assert remedy in (full[0].reason or "")
    assert full[1].settings_key == f"{full[0].settings_key},{remedy}"
    assert full[1].label != "recompile-limit"
    assert all(remedy in trial.settings_key for trial in full[1:])


def test_a_secret_among_the_arguments_has_to_be_given_again(folder: Path) -> None:
    job = job_of(str(folder / "char_lm.py"), ["--lr", "1", "--password", "planted1"])
    assert job is not None
    stored = redact_json(job.to_dict(), {})
    assert stored["arguments"] == ["--lr", "1", "--password", "***"]
    with pytest.raises(ConfigError, match="held a secret, which was not written down; give all of them again after --"):
        job_of(None, None, stored=stored)
    again = job_of(None, job.arguments, stored=stored)
    assert again is not None
    assert again.arguments == job.arguments
