"""What a `best.py` runs, for a training workload and for an inference workload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.training_script import main, train
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["layers", "layers-inference"])
def test_exported_settings_run_by_themselves(name: str) -> None:
    settings = CompileSettings.parse("scope=eager")
    workload = load_workload(name)("tiny", 0).under(settings)
    exported: dict[str, Any] = {}
    exec(prepare(workload, settings, CPU).source(workload.build_model()), exported)
    came = train(
        exported["make_step"],
        workload=name,
        size="tiny",
        seed=0,
        settings=settings.key,
        pipeline="resident",
        passes=2,
        device=CPU,
    )
    assert came["finite"]
    assert came["samples_per_s"] > 0


@pytest.mark.parametrize("passes", ["0", "-1", "2.5", "many"])
def test_passes_that_are_none_are_refused_before_anything_runs(
    passes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["best.py", "--device", "cpu", f"--passes={passes}"])
    with pytest.raises(SystemExit) as stopped:
        main(
            lambda model: pytest.fail("it ran"),
            workload="layers",
            size="tiny",
            seed=0,
            settings="scope=eager",
            pipeline="resident",
        )
    assert stopped.value.code == 2
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == f"best.py: error: argument --passes: '{passes}' is not a whole number of 1 or more"
    )


def test_outputs_that_are_infinite_by_right_are_finite_enough_and_those_that_are_no_number_are_not() -> None:
    def step_of(value: float) -> Any:
        return lambda model: lambda inputs: torch.full((4,), value)

    told: dict[str, Any] = {"workload": "layers-inference", "size": "tiny", "seed": 0, "settings": "scope=eager"}
    found = [
        train(step_of(value), **told, pipeline="resident", passes=1, device=CPU)["finite"] for value in (-torch.inf, torch.nan)
    ]
    assert found == [True, False]
