"""What several GPUs are worth for one job that trains on them together, and for a sweep that tries settings side by side.

Background: `workers` runs the same settings with 1, 2, 4, … workers per trial, each worker with its own GPU and its own data, so
the batch grows with them; efficiency is samples per second and worker, relative to one worker. `sweep` runs one list of settings
twice, on one GPU with its share of the host's cores, and on all GPUs; the share is what a host with one GPU would have, so
compile times may be compared too. Both run real sweeps, in processes of their own. Their folders contain ordinary records; a
command that is repeated with the same words continues where it stopped.

Output: a table, and a JSON file, written anew after each sweep.

    python -m benchmarks.scaling workers --output scaling.json                                   # 1, 2, 4, … GPUs of this host
    python -m benchmarks.scaling sweep --output sweep.json                                       # 1 against all
    python -m benchmarks.scaling workers --output s.json --device cpu --size tiny --counts 1 2   # a dry run
    python -m benchmarks.scaling sweep --output w.json --device cpu --size tiny --at-once 2
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

import analysis
from benchmarks.host_queue import only_gpus
from benchmarks.output_files import make_room
from benchmarks.scaling import tables
from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.ddp_settings import OptimizeDdp
from compile_sweep.schema.errors import CompileSweepError, ConfigError
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, read
from compile_sweep.schema.settings import CompileSettings, OptimizerKind, Scope
from orchestrator.config import Device
from orchestrator.environment import fingerprint
from orchestrator.guard import cores
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.scaling"
WIDTH = 170

EIGHT = (
    "scope=eager", "scope=eager,optimizer=fused", "scope=regional", "scope=regional,optimizer=fused",
    "scope=regional,dynamic=auto", "scope=regional,dynamic=mark", "scope=full", "scope=full,optimizer=fused",
)  # fmt: skip
"""Settings that `sweep` tries, whose compile takes from nothing to a minute."""

MAX_AUTOTUNE = "scope=full,mode=max-autotune,optimizer=compiled,inductor.coordinate_descent_tuning=off"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    output: Path  # the JSON file to write; the sweeps' folders go beside it, in a folder of the same name
    workload: str = "captioning"
    size: str = "base"
    device: Device = Device.CUDA
    budget_s: float = 3000.0  # seconds after which no further trial starts; the next run of the same command goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions(_Common):
    """Trains with 1, 2, 4, … workers under the same settings and reports how throughput scales."""

    counts: tuple[int, ...] = ()
    """Workers a trial; by default the powers of two up to the number of GPUs."""
    scopes: tuple[Scope, ...] = (Scope.EAGER, Scope.FULL, Scope.REGIONAL)
    optimizers: tuple[OptimizerKind, ...] = (OptimizerKind.FUSED, OptimizerKind.COMPILED)
    optimize_ddp: tuple[OptimizeDdp, ...] = (OptimizeDdp.DDP_OPTIMIZER, OptimizeDdp.NO_OPTIMIZATION)
    """Tried with several workers, where anything is compiled."""
    max_autotune: Flag = False
    """Also scope=full with max-autotune and a compiled optimizer, which compiles for long."""
    settings: tuple[str, ...] = ()
    """Further settings, with every number of workers; ddp.NAME only with several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(_Common):
    """Runs one sweep on one GPU and on all, and compares wall time and compile times."""

    settings: tuple[str, ...] = EIGHT
    at_once: int | None = None
    """Trials side by side; by default one a GPU."""
    part: Literal["one", "all", "both"] = "both"
    """Which of the two sweeps to run now; each may take longer than a machine is lent for."""


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _command(words))


def _command(words: Sequence[str]) -> int:
    found = command_line.chosen({"workers": (WorkersOptions, workers), "sweep": (SweepOptions, sweep)}, PROG, words)
    if found is None:
        return 0
    options, command = found
    make_room(options.output)
    Console(width=WIDTH).print(command(options))
    return 0


def workers(options: WorkersOptions) -> Table:
    """Runs a sweep for each number of workers and writes the JSON."""
    num_gpus = fingerprint().num_gpus if options.device is Device.CUDA else 0
    counts = options.counts or tuple(count for count in (1, 2, 4, 8, 16) if count <= num_gpus)
    if not counts or min(counts) < 1:
        raise ConfigError("--counts is empty; on a host without GPUs say --device cpu --counts 1 2")
    if num_gpus and max(counts) > num_gpus:
        raise ConfigError(f"--counts {max(counts)} needs as many GPUs, and {num_gpus} are visible")
    ends_at = time.monotonic() + options.budget_s
    for count in counts:
        at_once = max(1, num_gpus // count)
        _run(options, _folder(options, f"workers-{count}"), asked(options, count), ends_at, at_once=at_once, num_workers=count)
        found = {str(n): _records(_folder(options, f"workers-{n}")) for n in counts}
        table, values = tables.of_workers({int(n): rows for n, rows in found.items()})
        write_json(options.output, {"environment": fingerprint().to_dict(), "workload": options.workload, **values})
    return table


def asked(options: WorkersOptions, count: int) -> list[str]:
    """Returns keys of the settings for this many workers, the cheapest first."""
    spelled = [f"scope={scope},optimizer={optimizer}" for scope in options.scopes for optimizer in options.optimizers]
    if Scope.EAGER in options.scopes:
        spelled.insert(0, "scope=eager")  # torch's own optimizer: the source's baseline
    if options.max_autotune:
        spelled.append(MAX_AUTOTUNE)
    keys: dict[str, None] = {}
    for words in spelled:
        setting = CompileSettings.parse(words)
        split = count > 1 and setting.scope is not Scope.EAGER
        variants = [f"{words},ddp.optimize_ddp={mode}" for mode in options.optimize_ddp] if split else [words]
        keys |= {CompileSettings.parse(variant).key: None for variant in variants}
    given = [CompileSettings.parse(words) for words in options.settings]
    return [*keys, *(setting.key for setting in given if setting.ddp is None or count > 1)]


def sweep(options: SweepOptions) -> Table:
    """Runs the two sweeps and writes the JSON."""
    at_once = options.at_once or (fingerprint().num_gpus if options.device is Device.CUDA else 0)
    if at_once < 2:
        raise ConfigError(
            "two trials are needed to be side by side; on a host with fewer than 2 GPUs say --device cpu --at-once 2"
        )
    ends_at = time.monotonic() + options.budget_s
    keys = list(dict.fromkeys(CompileSettings.parse(words).key for words in options.settings))
    share = cores.cpu_share(0, at_once)
    if options.part in ("one", "both"):
        _run(options, _folder(options, "one"), keys, ends_at, at_once=1, cpus=share, one_gpu=True)
    if options.part in ("all", "both"):
        _run(options, _folder(options, "all"), keys, ends_at, at_once=at_once)
    recorded = {name: (_records(_folder(options, name)), _walls(_folder(options, name))) for name in ("one", "all")}
    table, values = tables.of_sweeps(recorded["one"], recorded["all"], at_once=at_once, num_settings=len(keys))
    write_json(options.output, {"environment": fingerprint().to_dict(), "workload": options.workload, **values})
    return table


def _run(
    options: _Common,
    folder: Path,
    keys: Sequence[str],
    ends_at: float,
    *,
    at_once: int,
    num_workers: int = 1,
    cpus: Collection[int] = (),
    one_gpu: bool = False,
) -> None:
    """Runs a sweep of the settings, or what remains of it, in a process of its own."""
    left_s = ends_at - time.monotonic()
    if left_s <= 0:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "orchestrator.sweep", "--workload", options.workload, "--size", options.size,
        "--device", str(options.device), "--workers-per-trial", str(num_workers), "--max-concurrent", str(at_once),
        "--time-budget-s", f"{left_s:.0f}", "--no-confirm", "--no-warm-start", "--cache-store", "none", "--output", str(folder),
        "--settings", *keys,
    ]  # fmt: skip
    if (folder / SWEEP_FILE).exists():
        command.append("--resume")
    environment = {**os.environ, **(only_gpus([0]) if one_gpu and options.device is Device.CUDA else {})}
    ended = subprocess.run(
        command, env=environment, check=False, preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None
    )
    if ended.returncode:
        raise CompileSweepError(f"the sweep in {folder} ended with exit code {ended.returncode}; what it said stands above")


def _folder(options: _Common, name: str) -> Path:
    return options.output.with_suffix("") / name


def _records(folder: Path) -> list[dict[str, Any]]:
    """Returns rows of the sweep's trials, the latest of each setting; empty if it has not run."""
    if not (folder / TRIALS_FILE).exists():
        return []
    frame = analysis.load(folder).astype(object)
    rows: list[dict[str, Any]] = frame.where(frame.notna(), None).to_dict("records")
    return rows


def _walls(folder: Path) -> list[float]:
    """Returns the seconds of each run of the sweep that completed a trial, from its start to its last trial's end."""
    if not (folder / SWEEP_FILE).exists():
        return []
    described = json.loads((folder / SWEEP_FILE).read_text())
    starts = [datetime.fromisoformat(run["started_at"]) for run in [*described["runs"], described]]
    walls = [0.0] * len(starts)
    for trial in read(folder):
        began = datetime.fromisoformat(trial.started_at)
        run = max(index for index, start in enumerate(starts) if start <= began)
        walls[run] = max(walls[run], (began - starts[run]).total_seconds() + trial.wall_s)
    return [wall for wall in walls if wall]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
