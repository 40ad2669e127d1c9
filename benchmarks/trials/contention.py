"""How much concurrent trials slow down each other's compile, with all cores for each and with a share of its own for each.

Background: four cold compiles at once on one host took 121 s to the first step where one alone took 54 s. `guard/cores.py`
gives each trial its share of the cores; this script measures what that is worth, with the same code and without Ray. Four
arrangements, one after the other: alone; side by side, each with all cores and as many compile workers as torch starts by
itself; side by side, each with its share; alone with a share, which tells fewer cores from neighbors, and which is left out
if time is short.

Output: a table, and a JSON file. It compares the wall time of the warm-up window, each in a new process with empty caches. The
window's steps are the same everywhere and take a second or two; the rest is compiling.

    python -m benchmarks.trials.contention --output contention.json                                       # 4 GPUs
    python -m benchmarks.trials.contention --output c.json --device cpu --size tiny --side-by-side 2      # a dry run
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.host_queue import only_gpus
from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.schema.errors import CompileSweepError, ConfigError
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.environment import fingerprint
from orchestrator.guard import cores
from orchestrator.guard.cpu_pressure import PressureGauge
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.trials.contention"
WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Time one setting's cold compile alone and side by side, before and after each trial got its own cores."""

    output: Path
    """The JSON file to write."""
    setting: str = "scope=full"
    """The setting, written as in a sweep's --settings."""
    workload: str = "captioning"
    size: str = "base"
    device: Device = Device.CUDA
    side_by_side: int | None = None
    """Trials at once; by default one per GPU, at most 4."""
    budget_s: float = 350.0
    """Stop after this many seconds, and leave out what was not measured by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Number of concurrent trials, and of shares that the cores are divided into; 1 gives all cores to each."""

    name: str
    trials: int
    num_shares: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Instructions for one process."""

    setting: str
    workload: str
    size: str
    device: Device
    index: int
    num_shares: int
    slots: str
    result: str


class _WarmedUp(Exception):
    """Ends a measurement after its warm-up."""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if arguments[:1] == [WORKER]:
        warm_up(Job(**json.loads(arguments[1])))
        return 0
    return command_line.run(lambda: compare(command_line.parse(Options, PROG, arguments)))


def compare(options: Options) -> int:
    """Runs the arrangements, prints the table and writes the JSON."""
    at_once = min(4, fingerprint().num_gpus) if options.side_by_side is None else options.side_by_side
    if at_once < 2:
        raise ConfigError(
            "two trials are needed to be side by side; on a host with fewer than 2 GPUs say --device cpu --side-by-side 2"
        )
    if options.device is Device.CUDA and at_once > fingerprint().num_gpus:
        raise ConfigError(f"--side-by-side {at_once} needs as many GPUs, and {fingerprint().num_gpus} are visible")
    CompileSettings.parse(options.setting)
    make_room(options.output)
    ends_at = time.monotonic() + options.budget_s
    found: list[dict[str, Any]] = []
    for arrangement in (
        Arrangement(name="alone", trials=1, num_shares=1),
        Arrangement(name="side by side, all cores each (before)", trials=at_once, num_shares=1),
        Arrangement(name="side by side, a share each (after)", trials=at_once, num_shares=at_once),
        Arrangement(name="alone, on a share", trials=1, num_shares=at_once),
    ):
        trials = _run(arrangement, options, ends_at)
        found.append({**asdict(arrangement), "trials": trials})
        write_json(options.output, {"environment": fingerprint().to_dict(), "setting": options.setting, "arrangements": found})
        print(
            f"{arrangement.name}: " + (", ".join(f"{trial['warmup_s']:.1f} s" for trial in trials) or "no time left"), flush=True
        )
    Console(width=110).print(_table(found))
    return 0


def warm_up(job: Job) -> None:
    """Runs in each process: binds to cores like a sweep's worker, and warms one setting up."""
    with cores.hold_slot(job.num_shares, job.index, Path(job.slots)) as slot:
        cpus = cores.cpu_share(slot, job.num_shares)
        cores.bind_process(cpus)
        import torch  # after binding to cores

        from compile_sweep.contract.base import load_workload
        from compile_sweep.harness.measure import measure
        from compile_sweep.harness.prepare import prepare
        from compile_sweep.harness.toolchain import start_compile_workers, warm_cpp_headers

        torch.set_num_threads(len(cpus))
        if job.device == Device.CPU:
            warm_cpp_headers()
        else:
            start_compile_workers()
        gauge = PressureGauge(cores=len(cpus))
        began = 0.0

        def on_phase(phase: Phase) -> None:
            nonlocal began
            if phase is Phase.WARMING_UP:
                gauge.start()
                began = time.monotonic()
            elif phase is Phase.STEADY:
                warmup_s = time.monotonic() - began
                values = {"cores": len(cpus), "warmup_s": warmup_s, "cpu_pressure": gauge.stop()}
                write_json(Path(job.result), values)
                raise _WarmedUp

        with contextlib.suppress(_WarmedUp):
            workload = load_workload(job.workload)(job.size, 0)
            measure(prepare(workload, CompileSettings.parse(job.setting), job.device), on_phase=on_phase)


def _run(arrangement: Arrangement, options: Options, ends_at: float) -> list[dict[str, Any]]:
    """Returns the results of an arrangement's trials that finished in time."""
    with tempfile.TemporaryDirectory(prefix="compile-sweep-contention-") as scratch:
        jobs = [
            Job(
                setting=options.setting,
                workload=options.workload,
                size=options.size,
                device=options.device,
                index=index,
                num_shares=arrangement.num_shares,
                slots=scratch,
                result=f"{scratch}/{index}.json",
            )
            for index in range(arrangement.trials)
        ]
        with contextlib.ExitStack() as running:
            processes = [running.enter_context(_process(job, Path(scratch))) for job in jobs]
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if process.wait(max(0.0, ends_at - time.monotonic())):
                        raise CompileSweepError(f"a trial of {arrangement.name} ended with code {process.returncode}; see above")
        return [json.loads(Path(job.result).read_text()) for job in jobs if Path(job.result).exists()]


@contextlib.contextmanager
def _process(job: Job, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a new process with empty caches; ends it and its children with the block."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / f"inductor-{job.index}"),
        "TRITON_CACHE_DIR": str(scratch / f"triton-{job.index}"),
        **(only_gpus([job.index]) if job.device is Device.CUDA else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.trials.contention", WORKER, json.dumps(asdict(job))],
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table("arrangement", "trials", "cores each", "warm-up s", "from–to", "over alone", "CPU pressure", box=None)
    alone = statistics.median(trial["warmup_s"] for trial in found[0]["trials"]) if found[0]["trials"] else None
    for arrangement in found:
        trials = arrangement["trials"]
        if not trials:
            continue
        seconds = [trial["warmup_s"] for trial in trials]
        pressures = [trial["cpu_pressure"] for trial in trials if trial["cpu_pressure"] is not None]
        table.add_row(
            arrangement["name"],
            str(len(trials)),
            str(trials[0]["cores"]),
            f"{statistics.median(seconds):.1f}",
            f"{min(seconds):.1f}–{max(seconds):.1f}",
            f"{statistics.median(seconds) / alone:.2f}×" if alone else "–",
            f"{statistics.median(pressures):.0%}" if pressures else "–",
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
