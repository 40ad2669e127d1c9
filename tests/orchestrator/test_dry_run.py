"""What the command prints without starting anything: the plan of `--dry-run`, and the source of `--source`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from begun_sweeps import SETTINGS, contents

from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator import sweep
from orchestrator.config import Device, Run, SearchConfig, SweepConfig
from orchestrator.plan.resolve import resolve
from orchestrator.run import sweep_folder
from orchestrator.search import Searcher

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_starts", "no_gpu")]


def test_a_dry_run_starts_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--dry-run", "--size", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "eager" in captured.out
    assert "estimate:" in captured.out
    assert list(Path.cwd().iterdir()) == []


def test_what_would_run_on_a_gpu_is_planned_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["modes", "--dry-run", "--device", "cuda", "--size", "tiny"]) == 0
    plan = capsys.readouterr().out
    assert "full, reduce-overhead, static" in plan  # CUDA graphs, which no CPU has
    assert "estimate:" in plan
    assert list(Path.cwd().iterdir()) == []
    assert sweep.main(["modes", "--device", "cuda", "--size", "tiny"]) == 2
    assert "plan with --dry-run" in capsys.readouterr().err


def test_a_folder_is_the_users_where_no_shell_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    assert sweep.main(["quickstart", "--dry-run", "--size", "tiny", "--output=~/deep/sweep"]) == 0
    assert f"artifacts in {tmp_path}/home/deep/cache" in capsys.readouterr().out
    assert sweep.main(["--dry-run", "--searcher", "gain", "--learn-from=~/earlier"]) == 2
    assert f"{tmp_path}/home/earlier holds no trial records" in capsys.readouterr().err


def test_a_dry_run_says_what_else_may_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["quickstart", "--dry-run", "--max-concurrent", "2", "--pipeline", "real"]) == 0
    out = capsys.readouterr().out
    assert "captioning (tiny) with its own loader" in out
    assert "then contended members of the front again, alone" in out
    assert sweep.main(["quickstart", "--dry-run", "--max-concurrent", "2", "--no-confirm"]) == 0
    assert "contention" not in capsys.readouterr().out


def test_settings_of_two_jobs_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = ["--dry-run", "--workload", "decoder", "--size", "tiny"]
    assert sweep.main([*decoder, "generation", "--vary", "workload.new_tokens=1,4"]) == 2
    mixed = [*decoder, "--settings", "scope=eager", "scope=modular,workload.new_tokens=1"]
    assert sweep.main(mixed) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "workload.new_tokens changes what a sample is" in line] == said
    assert "1 and 4" in said[0]
    assert "1 and its usual value" in said[1]
    assert sweep.main([*decoder, "generation", "--vary", "workload.new_tokens=1"]) == 0
    assert "new_tokens=1" in capsys.readouterr().out


def test_a_field_is_varied_over_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--settings", "scope=full", "scope=regional", "--vary", "group_window=1,10", "autocast=bf16,off"]
    assert sweep.main(words) == 0
    out = capsys.readouterr().out
    assert "8 settings" in out
    assert "regional, default, static, grouped 10, autocast off" in out


def test_a_setting_is_printed_as_the_source_that_a_trial_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--source", "scope=full,optimizer=fused"]) == 0
    out = capsys.readouterr().out
    compile(out, "pasted.py", "exec")
    assert "return torch.compile(model, dynamic=False)" in out


def test_a_number_of_buckets_becomes_the_best_so_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--dry-run", "--settings", "num_buckets=3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"full, default, buckets \d+/\d+/\d+ +3 ", out), out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "starts cold, artifacts in {parent}/cache"),
        (["--output", "deep/sweep"], "starts cold, artifacts in {here}/deep/cache"),
        (["--cache-store", "mine"], "starts cold, artifacts in {here}/mine"),
        (["--cache-store", "a:b:[c]"], "starts cold, artifacts in {here}/a:b:[c]"),
        (["--cache-store", "s3://bucket/mine"], "starts cold, artifacts in s3://bucket/mine"),
        (["--cache-store", "none"], "artifacts are not kept"),
        (
            ["--starts", "auto"],
            "starts auto, artifacts in {parent}/cache: compile times are warm, and the front is measured again cold",
        ),
    ],
)
def test_a_dry_run_says_where_artifacts_are_kept(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["--dry-run", "--settings", "scope=full", *words]) == 0
    here = Path.cwd()
    assert line.format(here=here, parent=here / "results") in capsys.readouterr().out.splitlines()


def test_a_resumed_sweep_keeps_its_cache_and_measures_cold_what_was_only_warm(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SETTINGS[1]
    known = {"settings": full.to_dict(), "settings_key": full.key, "status": Status.OK, "samples_per_s": 5.0}
    warm = TrialRecord(trial_id="002-a", caches=Caches.WARM, **known)  # type: ignore[arg-type]
    append(theirs, warm)
    assert sweep.main(["--dry-run", "--resume", "--output", str(theirs), "--starts", "shared", "--cache-store", "/mine"]) == 0
    assert "0 settings" in capsys.readouterr().out
    assert sweep.main(["--dry-run", "--resume", "--output", str(theirs)]) == 0
    out = capsys.readouterr().out
    assert "1 settings" in out
    assert "artifacts are not kept" in out  # as the sweep began


def test_a_dry_run_of_a_search_says_what_it_chooses_from_what_it_is_after_and_when_it_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--dry-run",
        "--size",
        "tiny",
        "--searcher",
        "gain",
        "--constraint",
        "compile_s<=60",
        "--stop",
        "front stable for 6 trials",
    ]
    assert sweep.main([*words, "--gpu-budget-s", "1200", "--num-trials", "40"]) == 0
    printed = capsys.readouterr().out
    assert "recipe grid: captioning (tiny), 132 of 132 settings left to choose from" in printed
    assert "searcher gain: samples_per_s:max, compile_s:min, peak_memory_bytes:min, within compile_s<=60" in printed
    assert "until 40 trials or 1200 GPU-seconds or front stable for 6 trials, one at a time, trials are stopped early" in printed
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "searcher", "prunes"),
    [
        ([], "None", None),
        (["--stop", "front stable for 6 trials"], "grid", "not stopped early"),  # the order stays the recipe's
        (["--constraint", "compile_s<=60"], "grid", "are stopped early"),
        (["--constraint", "compile_s<=60", "--prune", "off"], "grid", "not stopped early"),
        (["--searcher", "random", "--prune", "off"], "random", "not stopped early"),
    ],
)
def test_what_a_search_is_unless_it_is_said(
    words: list[str], searcher: str, prunes: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main(["quickstart", "--dry-run", "--size", "tiny", *words]) == 0
    printed = capsys.readouterr().out
    assert (f"searcher {searcher}:" in printed) is (prunes is not None)
    assert prunes is None or prunes in printed


@pytest.mark.parametrize(
    ("words", "until"),
    [
        ([], "300 s"),
        (["auto"], "300 s"),
        (["--effort", "standard"], "600 s"),
        (["--effort", "thorough"], "3600 s"),
        (["--time-budget-s", "200"], "200 s"),
        (["--num-trials", "3"], "3 trials"),
        (["--stop", "front stable for 2 trials"], "300 s or front stable for 2 trials"),
    ],
)
def test_auto_says_what_it_would_try_first_why_and_until_when(
    words: list[str], until: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert sweep.main(["--dry-run", "--workload", "layers", "--size", "tiny", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "searcher levers: samples_per_s:max" in lines
    assert f"until {until}, one at a time, trials are stopped early" in lines
    first = lines.index(next(line for line in lines if line.startswith("first")))
    assert re.match(r"eager +21 s +what runs today", lines[first + 1])
    assert "(×1." in lines[first + 2]
    assert any("scope=" in line for line in lines[first + 2 : first + 4])
    assert re.fullmatch(r"estimate: .* min for these; later ones depend on their results", lines[-1])


def test_auto_lets_no_setting_compile_for_most_of_its_time() -> None:
    quick = resolve(SweepConfig(), Run(), before=None, environment=sweep.fingerprint(), output=Path("out"))
    assert (quick.time_budget_s, quick.compile_deadline_s) == (300.0, 150.0)
    asked = resolve(
        SweepConfig(compile_deadline_s=250.0), Run(), before=None, environment=sweep.fingerprint(), output=Path("out")
    )
    assert asked.compile_deadline_s == 250.0
    other = resolve(SweepConfig(recipe="grid"), Run(), before=None, environment=sweep.fingerprint(), output=Path("out"))
    assert (other.time_budget_s, other.compile_deadline_s) == (None, 600.0)


def test_a_resumed_search_goes_on_as_it_began(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = SearchConfig(
        searcher=Searcher.RANDOM, objectives=("samples_per_s:max",), stop="front stable for 3 trials", prune=True
    )
    config = SweepConfig(
        recipe="quickstart",
        workload="captioning",
        size="tiny",
        settings=SETTINGS,
        search=search,
        device=Device.CPU,
    )
    sweep_folder.resume(theirs, config, sweep.fingerprint(), None)
    capsys.readouterr()
    assert sweep.main(["--resume", "--output", str(theirs), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 settings left to choose from" in printed
    until = "until front stable for 3 trials, one at a time, trials are"
    assert f"searcher random: samples_per_s:max\n{until} stopped early" in printed
    assert sweep.main(["--resume", "--output", str(theirs), "--dry-run", "--searcher", "gain", "--prune", "off"]) == 0
    printed = capsys.readouterr().out
    assert f"searcher gain: samples_per_s:max\n{until} not stopped early" in printed


def test_a_dry_run_of_a_resume_shows_what_is_left_and_changes_nothing(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(theirs)
    assert sweep.main(["--dry-run", "--resume", "--output", str(theirs)]) == 0
    out = capsys.readouterr().out
    assert "1 already recorded" in out
    assert "full, default, static" in out
    assert "eager" not in out
    assert contents(theirs) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "{theirs}"], "holds a sweep already; add --resume"),
        (["--output", "file/new"], "cannot be written (Not a directory)"),
        (["--resume", "--output", "{theirs}", "--seed", "7"], "holds another sweep: its seed is 0, not 7"),
        (["--searcher", "gain", "--learn-from", "nowhere"], "--learn-from {here}/nowhere holds no trial records"),
    ],
)
def test_a_dry_run_refuses_what_the_sweep_would_and_changes_nothing(
    words: list[str], said: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here := Path.cwd()).joinpath("file").touch()
    before = contents(theirs.parent)
    assert sweep.main(["--dry-run", "--size", "tiny", *(word.format(theirs=theirs) for word in words)]) == 2
    assert said.format(here=here) in capsys.readouterr().err
    assert contents(theirs.parent) == before


def test_a_dry_run_does_not_go_on_in_another_environment(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description = theirs / "sweep.json"
    description.write_text(re.sub(r'"torch": "[^"]+"', '"torch": "1.0"', description.read_text()))
    assert sweep.main(["--dry-run", "--resume", "--output", str(theirs)]) == 2
    assert "their figures cannot be compared" in capsys.readouterr().err


def test_figures_of_another_job_are_not_learnt_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (earlier := tmp_path / "earlier").mkdir()
    one_token = CompileSettings.parse("scope=eager,workload.new_tokens=1")
    known = {"status": Status.OK, "workload": "decoder", "size": "tiny", "environment_key": sweep.fingerprint().key}
    settings = {"settings": one_token.to_dict(), "settings_key": one_token.key}
    record = TrialRecord(trial_id="1", samples_per_s=5.0, **settings, **known)  # type: ignore[arg-type]
    append(earlier, record)
    words = ["--dry-run", "--workload", "decoder", "--size", "tiny", "--searcher", "gain", "--learn-from", str(earlier)]
    assert sweep.main(words) == 2
    assert "workload.new_tokens changes what a sample is" in capsys.readouterr().err
    assert sweep.main([*words, "--vary", "workload.new_tokens=1"]) == 0
