"""Workers meet at a store that listens on one address, and listen nowhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from listening import addresses
from compile_sweep.harness.distributed import join, serve

rank, num_workers = int(sys.argv[1]), int(sys.argv[2])
port = serve("127.0.0.1", num_workers, 60) if rank == 0 else int(sys.stdin.readline())
if rank == 0:
    print(port, flush=True)
join("gloo", rank=rank, num_workers=num_workers, address="127.0.0.1", port=port, timeout_s=60)
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps([total.item(), sorted({address for address, _ in addresses([os.getpid()])})]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_workers", [pytest.param(1, marks=pytest.mark.nightly("one worker, which meets nobody; `make test` runs two")), 2]
)
def test_workers_reduce_and_listen_on_the_loopback_alone(num_workers: int, repository: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(num_workers)],
            env={"PYTHONPATH": f"{repository}:{repository / 'tests'}", "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_workers)
    ]
    try:
        first = workers[0]
        assert first.stdout is not None
        port = first.stdout.readline()
        for worker in workers[1:]:
            assert worker.stdin is not None
            worker.stdin.write(port)
            worker.stdin.flush()
        for worker in workers:
            printed, _ = worker.communicate(timeout=120)
            total, listened = json.loads(printed.splitlines()[-1])
            assert total == num_workers
            assert listened == ["127.0.0.1"]
    finally:
        for worker in workers:
            worker.kill()
