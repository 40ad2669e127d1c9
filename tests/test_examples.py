"""A `best.py` in a training loop and in Hugging Face's `Trainer`: the examples run, and train as they do without it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.best_script import best_script
from compile_sweep.contract.base import load_workload
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

STEPS = 6
SPELLED = [
    "scope=full,dynamic=mark,backend=eager,optimizer=fused",
    "scope=regional,dynamic=buckets,bucket_size=32,backend=eager",
]

FURTHER = pytest.mark.nightly("compiles the whole model again; `make test` trains it in a plain loop under the same settings")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch, repository: Path, tmp_path: Path, one_thread: None) -> None:
    monkeypatch.syspath_prepend(str(repository))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """Runs an example with the `best.py` of some settings next to it and returns its names; does not call `main`."""

    def start(example: str, spelled: str) -> dict[str, Any]:
        monkeypatch.delitem(sys.modules, "best", raising=False)
        (tmp_path / "best.py").write_text(best_of(spelled), encoding="utf-8")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return runpy.run_module(example)

    return start


def best_of(spelled: str) -> str:
    settings = CompileSettings.parse(spelled)
    workload = load_workload("examples.bring_your_own:Texts")("only", 0)
    trial = {
        "source": prepare(workload, settings, "cpu").source(workload.build_model()),
        "workload": "examples.bring_your_own:Texts",
        "size": "only",
        "settings_key": settings.key,
        "settings_label": settings.label,
        "pipeline": "resident",
        "num_workers": 1,
        "device": "cpu",
        **dict.fromkeys(("samples_per_s", "samples_per_s_low", "samples_per_s_high"), 100.0),
    }
    return best_script(pd.Series(trial), seed=0)


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("spelled", SPELLED)
def test_a_plain_loop_trains_under_it_as_without_it(run: Callable[[str, str], dict[str, Any]], spelled: str) -> None:
    expected = run("examples.plain_loop", "scope=eager,padding=longest")["main"](STEPS)
    assert num_graphs() == 0
    losses = run("examples.plain_loop", spelled)["main"](STEPS)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert 1 <= num_graphs() <= 2
    assert losses[0] != losses[-1]


@pytest.mark.slow
def test_a_trainer_of_several_workers_refuses_what_it_would_not_average(
    run: Callable[[str, str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = run("examples.trainer", "scope=full,backend=aot_eager")
    monkeypatch.setattr(example["TrainingArguments"], "world_size", 2)
    with pytest.raises(ValueError, match=r"scope=full compiles past .* for several workers; use regional"):
        example["main"](steps=1)


@pytest.mark.slow
def test_a_trainers_schedule_does_not_compile_a_compiled_optimizer_again(run: Callable[[str, str], dict[str, Any]]) -> None:
    example = run("examples.trainer", "scope=regional,backend=aot_eager,optimizer=compiled")
    losses = example["main"](steps=STEPS)
    assert num_graphs() == 2  # of a block and of the optimizer
    assert example["main"](kind=example["Trainer"], steps=STEPS) == pytest.approx(losses, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spelled", [pytest.param(SPELLED[0], marks=FURTHER), SPELLED[1]])
def test_a_trainer_trains_under_it_as_without_it(run: Callable[[str, str], dict[str, Any]], spelled: str) -> None:
    example = run("examples.trainer", spelled)
    losses = example["main"](steps=STEPS)
    assert 1 <= num_graphs() <= 2
    assert example["main"](kind=example["Trainer"], steps=STEPS) == pytest.approx(losses, rel=1e-3)
    assert len(losses) == STEPS
