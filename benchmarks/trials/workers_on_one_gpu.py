"""What compiles and what breaks with several workers if there is only one GPU: both workers share it and communicate by gloo.

Background: NCCL needs a GPU per worker. What a compiler makes of a model whose workers communicate inside the forward pass
(SyncBN) or the backward pass (DDP) depends on there being several workers, not on their speed, so one GPU can show it. It cannot
show speed: gloo uses the host's memory, and the workers take turns on the GPU. So no speed is reported.

Output: for each case graphs, graph breaks with their reasons, what fell back to eager or got no CUDA graph, and the check of the
numbers against eager workers; a table, and a JSON file. About two minutes per case on an H200.

    python -m benchmarks.trials.workers_on_one_gpu --output workers_on_one_gpu.json
    python -m benchmarks.trials.workers_on_one_gpu --output w.json --size tiny --device cpu --settings backend=aot_eager
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.trials.workers_on_one_gpu"
NUM_WORKERS = 2
WIDTH = 170
LIMIT_S = 420.0  # limit for one case, in seconds
ANSWER = "worker "  # prefix of the line meant for the parent; torch may print others

TOLD = (
    "graphs", "graph_break_reasons", "fallbacks", "recompile_limit_hits", "cudagraph_skips", "cudagraph_skip_reasons", "numerics",
    "compile_s", "peak_memory_bytes",
)  # fmt: skip
"""Figures that do not depend on the workers' speed, and the seconds and memory of compiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compile for two workers that share a GPU, and report the outcome."""

    output: Path
    """The JSON file to write."""
    workload: str = "segmentation"
    size: str = "b0"
    device: Device = Device.CUDA
    settings: tuple[str, ...] = (
        "scope=full",
        "scope=full,workload.norm=sync",
        "scope=full,mode=reduce-overhead,workload.norm=sync",
        "scope=full,workload.norm=sync,ddp.optimize_ddp=no_optimization",
        "scope=full,workload.norm=sync,ddp.optimize_ddp=python_reducer",
    )


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _benchmark(command_line.parse(Options, PROG, words)))


def _benchmark(options: Options) -> int:
    make_room(options.output)
    if options.device is Device.CUDA and not fingerprint().num_gpus:
        raise ConfigError("--device cuda needs a GPU, and none is visible; use cpu")
    for spelled in options.settings:
        CompileSettings.parse(spelled)
    printed = Table("settings", "graphs", "breaks", "fell back", "CUDA graphs skipped", "numerics", "why it breaks", box=None)
    rows: list[dict[str, Any]] = []
    for spelled in options.settings:
        row = {"settings": spelled, **_by_two(options, spelled)}
        rows.append(row)
        printed.add_row(*_cells(row))
        described = {"workload": options.workload, "size": options.size, "num_workers": NUM_WORKERS, "backend": "gloo"}
        write_json(options.output, {"environment": fingerprint().to_dict(), **described, "rows": rows})
    Console(width=WIDTH).print(printed)
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["settings"], *["–"] * 5, row["error"]]
    counts = len(row["graph_break_reasons"]), len(row["fallbacks"]), row["cudagraph_skips"]
    why = dict.fromkeys(reason.splitlines()[0] for reason in row["graph_break_reasons"])
    return [row["settings"], str(row["graphs"]), *map(str, counts), row["numerics"], "; ".join(why) or "–"]


def _by_two(options: Options, spelled: str) -> dict[str, Any]:
    """Returns worker 0's report of a case, from processes with empty caches, or the error that ended one."""
    with tempfile.TemporaryDirectory() as scratch:
        words = json.dumps([scratch, options.workload, options.size, str(options.device), spelled])
        environment = {**os.environ, **compile_cache_env(Path(scratch))}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, ["", *sys.path]))
        logs = [Path(scratch) / f"worker-{rank}.log" for rank in range(NUM_WORKERS)]
        workers = []
        for rank, path in enumerate(logs):
            with path.open("wb") as log:
                command = [sys.executable, "-c", f"from {__spec__.name} import worker; worker()", str(rank), words]
                workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(LIMIT_S) for process in workers]
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S:g} s"}
        finally:
            for process in workers:
                process.kill()
                process.wait()
        said = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in logs]
    for code, lines in zip(codes, said, strict=True):
        if code:
            return {"error": next((line for line in reversed(lines) if "Error" in line), f"exit code {code}")}
    found: dict[str, Any] = json.loads(next(line for line in said[0] if line.startswith(ANSWER)).removeprefix(ANSWER))
    return found


def worker() -> None:
    """Runs in each of the processes."""
    from torch import distributed

    from compile_sweep.contract.base import load_workload
    from compile_sweep.harness.measure import measure
    from compile_sweep.harness.prepare import prepare

    rank, (scratch, workload, size, device, spelled) = int(sys.argv[1]), json.loads(sys.argv[2])
    distributed.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=NUM_WORKERS)
    try:
        found = measure(prepare(load_workload(workload)(size, 0), CompileSettings.parse(spelled), device), rank=rank)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        told = {name: value for name, value in found.to_dict().items() if name in TOLD}
        told["numerics"] = found.numerics["status"]
        print(ANSWER + json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
