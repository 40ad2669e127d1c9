"""Segmentation and detection on two workers: they train together through DDP, on samples of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = [
    ("segmentation", "scope=full,backend=aot_eager,workload.ema=on,workload.batch_size=3"),
    ("detection", "scope=regional,backend=aot_eager"),
]

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
protocol = Protocol(compared_steps=3, visits=1, min_passes=1, max_passes=1, cpu_window_s=0.0, eager_batches=0)
for name, spelled in json.loads(sys.argv[3]):
    workload = load_workload(name)("tiny", 0)
    found = measure(prepare(workload, CompileSettings.parse(spelled), device), rank=rank, protocol=protocol)
    first = workload.pool(PadToMax(max_length=1), rank=rank, device=device)[0]
    told = {"numerics": found.numerics["status"], "worst": found.numerics["worst"], "breaks": found.graph_break_reasons}
    print(json.dumps({**told, "sum": float(first.inputs["pixel_values"].sum()), "source": found.source}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> list[list[dict[str, Any]]]:
    """What each of two workers says of each case."""
    meeting = tmp_path_factory.mktemp("workers") / "meeting"
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(rank), str(meeting), json.dumps(CASES)],
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
    return [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{spelled}" for name, spelled in CASES])
def test_two_workers_train_right_on_samples_of_their_own(told: list[list[dict[str, Any]]], case: int) -> None:
    one, other = (worker[case] for worker in told)
    assert (one["numerics"], other["numerics"]) == ("ok", "ok"), (one["worst"], other["worst"])
    assert one["sum"] != other["sum"]
    assert one["breaks"] == []
    assert ("moving_average" in one["source"]) is ("ema=on" in CASES[case][1])
