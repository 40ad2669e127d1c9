"""Whether a trial's `compile_s` is what compiling costs in a process started by hand: both in turn, cold.

Background: trials are forked from a process that has imported torch and the workload, so imports that count as compiling in a
fresh process might be missing from their figures, and what a trial does beside its steps might be added. A process by hand
imports torch, builds the model, compiles it with plain `torch.compile` and trains; compile caches are empty each time. Its
compile time is defined as a trial's: the seconds of the warm-up less a median steady step for each of its steps.

Output of `python -m benchmarks.trials.compile_fidelity --output FILE`: for each setting the seconds of both in each round and the
ratio of their medians, trial over hand, which should be within 3 % of 1; the seconds as JSON in FILE.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.contract.base import load_workload
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import CompileSweepError, ConfigError
from compile_sweep.schema.settings import CompileSettings
from orchestrator.guard.scratch_folders import compile_cache_env

PROG = "python -m benchmarks.trials.compile_fidelity"
WARM_UP_STEPS, STEADY_STEPS = 20, 30
BY_HAND: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "scope=full": lambda model, update: (torch.compile(model), update),
    "scope=full,mode=reduce-overhead": lambda model, update: (torch.compile(model, mode="reduce-overhead"), update),
    "scope=full,backend=aot_eager": lambda model, update: (torch.compile(model, backend="aot_eager"), update),
    "scope=full,optimizer=compiled": lambda model, update: (torch.compile(model), torch.compile(update, dynamic=False)),
    "scope=full,dynamic=true": lambda model, update: (torch.compile(model, dynamic=True), update),
    "scope=regional": lambda model, update: (in_regions(model), update),
}
"""What is called in place of the model and of the optimizer's step, by setting."""


def in_regions(model: Any) -> Any:
    for block in model.model.transformer.h:
        block.compile()
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare `compile_s` of trials of the workload gpt2 with a process by hand."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The file for the figures, as JSON."""
    size: str = "tiny"
    """The workload's size."""
    rounds: int = 3
    """Times that each setting is compiled in either way."""
    settings: tuple[str, ...] = tuple(setting for setting in BY_HAND if torch.cuda.is_available() or "overhead" not in setting)
    """Settings, from those that are written by hand here."""


def by_hand(setting: str, size: str) -> float:
    """Trains as one would without this project; returns the seconds of compiling."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = load_workload("gpt2")(size, 0)
    model = workload.build_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    policy = CompileSettings.parse("scope=full,dynamic=static").shape_policy(workload.max_length)
    batches = [dict(batch.inputs) for batch in workload.pool(policy, rank=0, device=device)]
    autocast = workload.autocast_dtype(device)
    forward, update = BY_HAND[setting](model, optimizer.step)
    seconds = []
    for step in range(WARM_UP_STEPS + STEADY_STEPS):
        began = time.perf_counter()
        with torch.autocast(device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = forward(**batches[step % len(batches)])
        loss.backward()
        update()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sum(seconds[:WARM_UP_STEPS]) - WARM_UP_STEPS * statistics.median(seconds[WARM_UP_STEPS:])


def of_a_process(setting: str, size: str) -> float:
    """Returns the seconds of compiling by hand, in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        command = [
            sys.executable,
            "-c",
            f"from benchmarks.trials.compile_fidelity import *; print(by_hand({setting!r}, {size!r}))",
        ]
        done = subprocess.run(
            command, env={**os.environ, **compile_cache_env(Path(caches))}, stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode != 0:
        raise CompileSweepError("the process by hand failed; its error is above")
    return float(done.stdout.split()[-1])


def of_trials(options: Options) -> dict[str, float]:
    """Returns `compile_s` by setting, from one cold sweep."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--workload", "gpt2", "--size", options.size, "--runner", "local", "--cache-store", "none", "--no-warm-start"]
        words += ["--no-confirm", "--output", str(Path(folder, "sweep")), "--settings"]
        words += [f"{setting},dynamic=static" if "dynamic" not in setting else setting for setting in options.settings]
        subprocess.run([sys.executable, "-m", "orchestrator.sweep", *words], stdout=sys.stderr, check=True)
        found = [trial.compile_s for trial in records.read(Path(folder, "sweep"))]
    if len(found) != len(options.settings) or None in found:
        raise CompileSweepError("a trial was not measured; the sweep's lines are above")
    return {setting: seconds or 0.0 for setting, seconds in zip(options.settings, found, strict=True)}


def main() -> int:
    return command_line.main_of(Options, _compare, PROG)()


def _compare(options: Options) -> int:
    if options.output is None:
        raise ConfigError("--output is missing: name the file for the figures")
    if unknown := set(options.settings) - BY_HAND.keys():
        raise ConfigError(f"--settings {min(unknown)} is not written by hand here; use {', '.join(BY_HAND)}")
    make_room(options.output)
    hand: dict[str, list[float]] = {setting: [] for setting in options.settings}
    trial: dict[str, list[float]] = {setting: [] for setting in options.settings}
    for _ in range(options.rounds):
        for setting, seconds in of_trials(options).items():
            trial[setting].append(seconds)
        for setting in options.settings:
            hand[setting].append(of_a_process(setting, options.size))
            rows = {s: {"trial_s": trial[s], "hand_s": hand[s]} for s in options.settings}
            found = {"torch": torch.__version__, "size": options.size, "rows": rows}
            options.output.write_text(json.dumps(found, indent=2) + "\n")
    print("| setting | trials, s | by hand, s | ratio of medians |\n|---|--:|--:|--:|")
    for setting in options.settings:
        both = [trial[setting], hand[setting]]
        cells = [", ".join(f"{one:.1f}" for one in each) for each in both]
        print(f"| {setting} | {' | '.join(cells)} | {statistics.median(both[0]) / statistics.median(both[1]):.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
