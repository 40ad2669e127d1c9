"""Segmentation and detection on two workers: they train together with DDP, on samples of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_WORKER = """
import json, sys
import torch, torch.distributed as dist
from compile_sweep import load_workload
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.shapes import PadToMax
rank, device = int(sys.argv[1]), torch.device("cpu")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
protocol = Protocol(compared_steps=2, visits=1, min_passes=1, max_passes=1, cpu_window_s=0.0, eager_batches=0)
workload = load_workload(sys.argv[3])("tiny", 0)
found = measure(prepare(workload, CompileSettings.parse(sys.argv[4]), device), rank=rank, protocol=protocol)
first = workload.pool(PadToMax(max_length=1), rank=rank, device=device)[0]
told = {"numerics": found.numerics["status"], "worst": found.numerics["worst"], "breaks": found.graph_break_reasons}
print(json.dumps({**told, "sum": float(first.inputs["pixel_values"].sum()), "source": found.source}), flush=True)
dist.destroy_process_group()
"""


def trained(meeting: Path, repository: Path, *case: str) -> list[dict[str, Any]]:
    """Returns what each of two workers reports about a workload under a setting."""
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank), str(meeting), *case],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [worker.communicate(timeout=500)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.nightly(
    "compiles in two processes; test_distributed.py trains on two workers, test_built_in_workloads.py tells their samples apart"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("segmentation", "scope=full,backend=aot_eager,workload.ema=on,workload.batch_size=3"),
        ("detection", "scope=regional,backend=aot_eager"),
    ],
)
def test_two_workers_train_right_on_samples_of_their_own(name: str, spelled: str, tmp_path: Path, repository: Path) -> None:
    one, other = trained(tmp_path / "meeting", repository, name, spelled)
    assert (one["numerics"], other["numerics"]) == ("ok", "ok"), (one["worst"], other["worst"])
    assert one["sum"] != other["sum"]
    assert one["breaks"] == []
    assert ("moving_average" in one["source"]) is ("ema=on" in spelled)
