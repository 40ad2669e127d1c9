"""What a `best.py` runs, on a workload that trains and on one that only infers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workloads.base import load_workload
from workloads.compiling import source_for
from workloads.rerun import train
from workloads.settings import CompileSettings

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["layers", "layers-inference"])
def test_exported_settings_run_by_themselves(name: str) -> None:
    settings = CompileSettings.parse("scope=eager")
    workload = load_workload(name)("tiny", 0).under(settings)
    exported: dict[str, Any] = {}
    exec(source_for(settings, workload, workload.build_model(), CPU), exported)
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
