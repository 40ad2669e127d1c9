"""`best.py` of a setting measured with several workers: run by two processes that communicate by gloo."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from toy_workloads import Toy

from analysis.best_script import Outcome, best_script, rerun
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

CPU = torch.device("cpu")


def exported(spelled: str, *, num_workers: int, device: str = "cpu") -> pd.Series:
    """A trial's row, as far as an export reads it."""
    settings = CompileSettings.parse(spelled)
    workload = Toy("only", 0)
    return pd.Series(
        {
            "source": prepare(workload, settings, CPU, num_workers=num_workers).source(workload.build_model()),
            "workload": "toy_workloads:Toy",
            "size": "only",
            "settings_key": settings.key,
            "settings_label": settings.label,
            "pipeline": "resident",
            "device": device,
            "num_workers": 2,
            "wall_s": 1.0,
            "samples_per_s": 100.0,
            "samples_per_s_low": 0.001,
            "samples_per_s_high": 1e9,
        }
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spelled", "num_workers"),
    [
        pytest.param("scope=eager,ddp.compression=fp16,ddp.gradient_as_bucket_view=on", 2, id="wrapped as measured"),
        pytest.param(
            "scope=eager",
            1,
            id="measured with one worker",
            marks=pytest.mark.nightly("two more processes; `make test` runs the script with two workers"),
        ),
    ],
)
def test_two_workers_train_by_the_exported_settings(spelled: str, num_workers: int) -> None:
    trial = exported(spelled, num_workers=num_workers)
    came = rerun(trial, best_script(trial, seed=0), timeout_s=500)
    assert came.outcome is Outcome.INSIDE, came.sentence
    assert (came.came["workers"], came.came["finite"]) == (2, True)


@pytest.mark.nightly("two processes that import torch only to refuse; `make test` covers one worker on another device")
@pytest.mark.ray
@pytest.mark.slow
def test_where_the_devices_are_others_nothing_is_run() -> None:
    trial = exported("scope=eager", num_workers=2, device="NVIDIA H200")
    came = rerun(trial, best_script(trial, seed=0), timeout_s=500)
    assert came.outcome is Outcome.OTHER_DEVICE, came.sentence
    assert "2 × NVIDIA H200" in came.sentence


def test_the_script_says_how_to_start_so_many_workers() -> None:
    script = best_script(exported("scope=full,ddp.static_graph=on", num_workers=2), seed=0)
    assert "python -m torch.distributed.run --nproc-per-node 2 best.py" in script
    assert "DistributedDataParallel(model, static_graph=True)" in script
