"""Several workers that measure settings together, without Ray: processes of this file, which communicate by gloo or NCCL."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compile_sweep.child_process import die_with

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


@dataclass(frozen=True, slots=True)
class Job:
    """A measurement that all workers make together."""

    workload: str
    settings: str
    size: str = "only"
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the protocol that differ from those of a short measurement."""


def measured_together(
    jobs: Sequence[Job],
    *,
    num_workers: int = 2,
    device: str = "cpu",
    pipeline: str = "resident",
    timeout_s: float = 1500,
) -> list[list[dict[str, Any]]]:
    """Returns, for each job, each worker's result: a measurement's values, or `error` with an exception's text.

    A job that fails in one worker must fail in all, since the others would wait for it forever.
    """
    with tempfile.TemporaryDirectory(prefix="workers-") as scratch:
        told = {
            "jobs": [asdict(job) for job in jobs],
            "device": device,
            "pipeline": pipeline,
            "workers": num_workers,
            "stacks_after_s": 0.6 * timeout_s,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)]),
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            **({"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} if device == "cpu" else {}),
        }
        told["scratch"] = scratch
        # One process imports torch for all on the CPU; a process that was forked cannot use a GPU.
        groups = [[*range(num_workers)]] if device == "cpu" else [[rank] for rank in range(num_workers)]
        processes = [
            subprocess.Popen([sys.executable, __file__, json.dumps({**told, "ranks": ranks})], env=environment)
            for ranks in groups
        ]
        try:
            for process in processes:
                process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(path.read_text()[-8000:] for path in Path(scratch).glob("*.log"))) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = [Path(scratch, f"{rank}.log").read_text() for rank in range(num_workers)]
        assert all(process.returncode == 0 for process in processes), said
        by_rank = [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(num_workers)]
    return [[ranks[place] for ranks in by_rank] for place in range(len(jobs))]


def _work_together(told: dict[str, Any]) -> int:
    """Runs the ranks, all but the last in forked processes, which end with this one; returns the exit code."""
    import compile_sweep.harness.measure
    import compile_sweep.harness.prepare  # noqa: F401

    *forked, last = told["ranks"]
    parent, children = os.getpid(), []
    for rank in forked:
        if (child := os.fork()) == 0:
            die_with(parent)
            _log_and_work(told, rank)
            os._exit(0)
        children.append(child)
    _log_and_work(told, last)
    return max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs, default=0)


def _log_and_work(told: dict[str, Any], rank: int) -> None:
    """Runs one rank with a log of its own; ends the process if it fails."""
    log = os.open(f"{told['scratch']}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _work({**told, "rank": rank})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()


def _work(told: dict[str, Any]) -> None:
    import torch
    from torch._dynamo.utils import counters

    from compile_sweep.contract.base import load_workload
    from compile_sweep.harness.measure import Protocol, measure
    from compile_sweep.harness.prepare import prepare
    from compile_sweep.schema.settings import CompileSettings

    faulthandler.dump_traceback_later(told["stacks_after_s"])
    rank, scratch = told["rank"], told["scratch"]
    device = torch.device("cpu")
    if told["device"] == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{scratch}/store", rank=rank, world_size=told["workers"])
    short = {"compared_steps": 4, "min_passes": 2, "max_passes": 2, "cpu_window_s": 0.0, "real_passes": 1, "eager_budget_s": 2.0}
    found: list[dict[str, Any]] = []
    for job in [Job(**words) for words in told["jobs"]]:
        print(job, flush=True)
        torch._dynamo.reset()
        counters.clear()
        gc.collect()
        gc.freeze()  # a measurement collects six times, and imported objects are not garbage
        try:
            workload = load_workload(job.workload)(job.size, 0)
            prepared = prepare(workload, CompileSettings.parse(job.settings), device)
            protocol = Protocol(**{**short, **job.protocol})
            measurement = measure(prepared, rank=rank, protocol=protocol, pipeline=told["pipeline"])
            found.append(
                {
                    **measurement.to_dict(),
                    "optimize_ddp": torch._dynamo.config.optimize_ddp,
                    "aot_graphs": counters["aot_autograd"]["total"],
                }
            )
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    Path(scratch, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(_work_together(json.loads(sys.argv[1])))
