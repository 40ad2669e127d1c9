"""The queue of benchmarks: jobs get slots of their own, finished ones are not repeated, and bad lists give one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import is_running, wait_until

from benchmarks.host_queue import Job, main, read_jobs, words_of
from compile_sweep import command_line
from compile_sweep.contract.base import load_workload
from orchestrator.config import AUTO, SweepCommand
from orchestrator.plan.recipes import find_recipe

pytestmark = pytest.mark.slow

SHOW_CORES = 'import os; print("cores", sorted(os.sched_getaffinity(0)))'


def listed(tmp_path: Path, *lines: str) -> tuple[str, Path]:
    path, output = tmp_path / "list.jobs", tmp_path / "out"
    path.write_text("\n".join(["# a comment", "", *lines]))
    return str(path), output


def ended(output: Path) -> dict[str, object]:
    values = json.loads((output / "queue.json").read_text())
    return {name: one["exit_code"] for name, one in values.items()}


def test_jobs_run_on_cores_of_their_own_and_the_done_ones_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = listed(
        tmp_path,
        f"one 1: python -c '{SHOW_CORES}'",
        f"other 1: python -c '{SHOW_CORES}'",
        f"whole all: python -c '{SHOW_CORES}'",
        "fails 1: python -c 'raise SystemExit(3)'",
        "too-large 9: python -c pass",
    )
    words = [path, "--output", str(output), "--places", "2"]
    assert main(words) == 1
    assert ended(output) == {"one": 0, "other": 0, "whole": 0, "fails": 3}
    said = capsys.readouterr().out
    assert "too-large: needs 9 GPUs, and here are 2; left out" in said
    assert "fails: ended with exit code 3, see fails.log" in said
    one, other, whole = ((output / f"{name}.log").read_text() for name in ("one", "other", "whole"))
    if len(os.sched_getaffinity(0)) > 1:
        assert one != other
        assert one != whole
    assert str(sorted(os.sched_getaffinity(0))) in whole
    assert main(words) == 1
    assert (output / "one.log").read_text() == one, "what is done is not repeated"
    assert "one: done before" in capsys.readouterr().out
    assert main([*words, "--only", "one", "whole"]) == 0


def test_jobs_that_are_named_run_in_that_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = listed(tmp_path, *(f"{name} 1: python -c pass" for name in ("one", "two", "three")))
    assert main([path, "--output", str(output), "--places", "1", "--only", "three", "one", "three"]) == 0
    begun = [line.split()[3] for line in capsys.readouterr().out.splitlines() if "begins" in line]
    assert begun == ["three:", "one:"]


def test_a_job_that_takes_too_long_is_stopped_and_begins_again(tmp_path: Path) -> None:
    path, output = listed(tmp_path, "long 1: python -c 'import time; time.sleep(600)'", "short 1: python -c pass")
    began = time.monotonic()
    assert main([path, "--output", str(output), "--for-s", "1", "--places", "1"]) == 1
    assert time.monotonic() - began < 25
    assert not (output / "queue.json").exists(), "neither is done"
    assert main([path, "--output", str(output), "--only", "short"]) == 0
    assert ended(output) == {"short": 0}


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_stops_the_queue_stops_its_jobs(tmp_path: Path, repository: Path, number: int, exit_code: int) -> None:
    mark = tmp_path / "pid"
    job = f'import os, time, pathlib; pathlib.Path("{mark}").write_text(str(os.getpid())); time.sleep(600)'
    path, output = listed(tmp_path, f"long 1: python -c '{job}'")
    command = [sys.executable, "-m", "benchmarks.host_queue", path, "--output", str(output)]
    queue = subprocess.Popen(  # which a shell may have told to ignore SIGINT, as it does in the background
        command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_until(lambda: mark.exists() and mark.read_text() != "", 60)
    queue.send_signal(number)
    assert queue.wait(60) == exit_code
    wait_until(lambda: not is_running(int(mark.read_text())), 30)


def test_a_sweep_that_began_is_resumed(tmp_path: Path) -> None:
    job = Job("table", 1, "python -m orchestrator.sweep captioning {sweep} --cache-store {out}/cache")
    folder = tmp_path / "table"
    begins = [sys.executable, "-m", "orchestrator.sweep", "captioning", "--output", str(folder)]
    assert words_of(job, tmp_path) == [*begins, "--cache-store", f"{tmp_path}/cache"]
    folder.mkdir()
    (folder / "sweep.json").write_text("{}")
    assert words_of(job, tmp_path) == [*begins, "--resume", "--cache-store", f"{tmp_path}/cache"]


@pytest.mark.parametrize(
    ("lines", "words", "named"),
    [
        (["what is this"], [], "line 3 of"),
        (["a 0: true"], [], "write NAME GPUS: COMMAND"),
        (["a 1: true", "a 1: true"], [], "calls a second job a"),
        (['a 1: echo "b', "c 1: true"], [], "line 3 of"),
        (["a 1: true"], ["--only", "b"], "use a"),
        (["a 1: there-is-no-such-command"], [], "there-is-no-such-command cannot be run"),
        (["a 1: true"], ["--places", "0"], "--places 0"),
    ],
)
def test_bad_lists_and_options_are_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], words: list[str], named: str
) -> None:
    path, output = listed(tmp_path, *lines)
    assert main([path, "--output", str(output), *words]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = listed(tmp_path, "a 1: true")
    output.touch()
    assert main([path, "--output", str(output)]) == 2
    assert "cannot be written (File exists)" in capsys.readouterr().err


def test_a_list_that_is_not_there_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none"), "--output", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_projects_own_list_asks_for_what_there_is(repository: Path, tmp_path: Path) -> None:
    jobs = read_jobs(repository / "benchmarks" / "gpu.jobs")
    assert len(jobs) > 20
    for job in jobs:
        program, module, *words = words_of(job, tmp_path)[1:]
        assert program == "-m"
        assert "{" not in " ".join(words)
        if module == "orchestrator.sweep":
            config = command_line.parse(SweepCommand, "sweep", words).sweep
            assert config.size in (AUTO, *load_workload(config.workload).sizes)
            if config.recipe is not None:
                find_recipe(config.recipe)
        else:
            path = repository / module.replace(".", "/")
            assert module == "pytest" or path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
