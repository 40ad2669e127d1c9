"""What sharing compile caches is worth: for a job's restart, for a whole sweep, and when moving artifacts. See docs/results.md.

Background: compiling is most of what a sweep spends its GPU hours on. Each command answers one question about that, in a file of
its own: `restart.py`, `sweeps.py`, `transfer.py`. Results are written to the JSON at once, so a run that is killed keeps them.

Output: a table, and a JSON file.

    python -m benchmarks.cache restart --output restart.json                                     # one GPU
    python -m benchmarks.cache restart --output restart.json --device cpu --size tiny            # a dry run
    python -m benchmarks.cache sweeps results/cold results/shared --output sweeps.json
    python -m benchmarks.cache transfer --output transfer.json
"""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.cache import restart, sweeps, transfer
from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.contract.base import load_workload
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device

PROG = "python -m benchmarks.cache"
WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """Times the first step in a process with empty caches, and in one that restores what the first one compiled."""

    output: Path
    """The JSON file to write."""
    settings: tuple[str, ...] = ("scope=full", "scope=regional")
    """Compile settings, like scope=regional,dynamic=auto."""
    precompile: Flag = False
    """Repeat each with Dynamo's traces stored as well."""
    profile: Flag = True
    """Profile the rest of the warm first step, in one or two more processes."""
    workload: str = "captioning"
    size: str = "base"
    device: Device = Device.CUDA
    steps: int = 20
    """Steps that the cold process and the warm one take."""
    budget_s: float = 560.0
    """Stop after this many seconds, and leave out what was not measured by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepsOptions:
    """Compares a sweep whose trials started cold with one of the same settings whose trials shared compiled artifacts."""

    cold: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="COLD")]
    """Folder of the one run with --starts cold."""
    shared: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SHARED")]
    """Folder of the one run with --starts shared."""
    output: Path
    """The JSON file to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Times publishing and fetching a bundle's worth of artifacts, on one node and across two Ray nodes on this host."""

    output: Path
    """The JSON file to write."""
    mb: float = 35.0
    """Total size of the artifacts, in 10⁶ bytes."""
    artifacts: int = 350
    """Number of artifacts."""
    rounds: int = 5
    """Of each route; the median counts."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _dispatch(arguments))


def _dispatch(words: Sequence[str]) -> int:
    if (chosen := command_line.chosen(COMMANDS, PROG, words)) is None:
        return 0
    options, run = chosen
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no such folder")
    Console(width=WIDTH).print(*run(options), sep="\n", highlight=False)
    return 0


def _restart(options: RestartOptions) -> list[Table]:
    _check_positive(options, "steps", "budget_s")
    settings = tuple(CompileSettings.parse(text) for text in options.settings)
    workload = load_workload(options.workload)(options.size, 0)
    for setting in settings:
        setting.validate_for(workload.max_length)
    plan = restart.Plan(
        settings=settings,
        precompile=options.precompile,
        workload=options.workload,
        size=options.size,
        device=options.device,
        profile=options.profile,
        steps=options.steps,
        budget_s=options.budget_s,
    )
    return restart.restart(options.output, plan)


def _sweeps(options: SweepsOptions) -> list[Table | str]:
    return sweeps.compare(options.output, options.cold, options.shared)


def _transfer(options: TransferOptions) -> list[Table]:
    _check_positive(options, "mb", "artifacts", "rounds")
    return transfer.transfer(options.output, mb=options.mb, artifacts=options.artifacts, rounds=options.rounds)


def _check_positive(options: RestartOptions | TransferOptions, *names: str) -> None:
    for name in names:
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} is too few; use more than 0")


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], Sequence[Table | str]]]] = {
    "restart": (RestartOptions, _restart),
    "sweeps": (SweepsOptions, _sweeps),
    "transfer": (TransferOptions, _transfer),
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that child processes are ended, too
    sys.exit(main(sys.argv[1:]))
