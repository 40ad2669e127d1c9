"""What the benchmarks' commands refuse before they run for minutes, and which GPUs they use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import H200

from benchmarks import host_queue
from benchmarks.recipes import regional_recipe
from benchmarks.scaling import __main__ as scaling
from benchmarks.search import __main__ as search_benchmark
from benchmarks.search import live_search
from benchmarks.trials import contention, harness_fidelity
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import Mode
from orchestrator.config import Device


def with_words(main: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """Wraps a command that reads `sys.argv`, so that it takes its words as an argument."""

    def given(words: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["program", *words])
        return main()

    return given


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (live_search, ["one", "other"]),
        (regional_recipe, []),
        (contention, ["--device", "cpu", "--side-by-side", "2"]),
        (scaling, ["workers", "--device", "cpu", "--counts", "1"]),
        (search_benchmark, ["--flat"]),
        (harness_fidelity, ["--device", "cpu"]),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_timed(
    module: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    main = with_words(module.main, monkeypatch) if module in (search_benchmark, harness_fidelity) else module.main
    first, rest = (words[:1], words[1:]) if module is scaling else ([], words)
    assert main([*first, *rest, "--output", str(tmp_path / "file" / "found.json")]) == 2
    assert "found.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rounds", "0"], "--rounds 0 is too few"),
        (["--settings", "scope=regional"], "the loop by hand is eager or one mode"),
        (["--settings", "scope=fulll"], "scope"),
    ],
)
def test_what_the_loop_by_hand_cannot_do_is_a_sentence(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = with_words(harness_fidelity.main, monkeypatch)
    assert main(["--device", "cpu", "--output", str(tmp_path / "found.json"), *words]) == 2
    assert named in capsys.readouterr().err


def test_the_loop_by_hand_stands_beside_the_settings_that_it_runs() -> None:
    for spelled in (*harness_fidelity.SETTINGS, *(f"scope=full,mode={mode}" for mode in Mode)):
        harness_fidelity.refuse_another_loop(spelled)
    for spelled in ("scope=full,optimizer=fused", "scope=full,dynamic=mark", "scope=eager,padding=longest"):
        with pytest.raises(ConfigError):
            harness_fidelity.refuse_another_loop(spelled)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host where this process may use the third and the fourth GPU."""
    for module in (host_queue, contention, scaling):
        monkeypatch.setattr(module, "fingerprint", lambda: replace(H200, num_gpus=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")


@pytest.mark.usefixtures("two_gpus")
def test_trials_side_by_side_take_the_gpus_that_their_parent_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def started(*command: Any, env: dict[str, str], **others: Any) -> None:
        seen.append(env["CUDA_VISIBLE_DEVICES"])
        raise ConfigError("enough")

    monkeypatch.setattr("subprocess.Popen", started)
    job = contention.Job(
        setting="scope=full", workload="captioning", size="tiny", device=Device.CUDA, index=1, num_shares=2, slots="", result=""
    )
    with pytest.raises(ConfigError), contention._process(job, tmp_path):
        pass
    words = ["sweep", "--output", str(tmp_path / "s.json"), "--part", "one"]
    assert scaling.main(words) == 2
    assert seen == ["3", "2"]


@pytest.mark.usefixtures("two_gpus")
def test_more_trials_than_gpus_are_not_timed_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contention.main(["--output", str(tmp_path / "c.json"), "--side-by-side", "3"]) == 2
    assert "--side-by-side 3 needs as many GPUs, and 2 are visible" in capsys.readouterr().err


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core makes one thread")
def test_a_process_of_the_search_benchmark_has_one_thread_for_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # restored at the end
    squares = "__import__('numpy').ones((400, 400)) @ __import__('numpy').ones((400, 400))"
    with search_benchmark._processes(1) as pool:
        assert pool.submit(eval, f"({squares}, len(__import__('os').listdir('/proc/self/task')))[1]").result() == 1
