"""Whether a trial's figures are those of a plain training loop: both in turn on one device, ABAB.

Background: what measures a training step may slow it down, by timing, by hooks, by what it keeps in memory. `hand_loop` is
the loop one would write without this project, on the workload's model and batches, timed by a wall clock over many steps. It
stays alive in a process of its own and takes its turn when told to; each trial is `measure()` in a fresh process. Compile caches
are shared, because only steady steps count.

Output of `python -m benchmarks.trials.harness_fidelity --output FILE`: steps/s of both for each setting and their ratio, trial
over loop, which should be 0.98 or more; the same as JSON in FILE. About six minutes on an H200, two of them for cold compiles.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.contract.base import Batch
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.errors import CompileSweepError, ConfigError
from compile_sweep.schema.settings import CompileSettings, Mode
from orchestrator.guard.scratch_folders import compile_cache_env
from workloads.captioning import Captioning

GOAL = 0.98
SETTINGS = ("scope=eager,padding=max", "scope=full,mode=default", "scope=full,mode=reduce-overhead")
WARM_UP_STEPS = 5
POOL_BATCHES, TINY_POOL_BATCHES = 24, 4
PASSES = 3
ANSWER = "harness-fidelity "  # prefix of lines meant for the parent; torch may print others


def hand_loop(mode: str | None, workload: Captioning, device: torch.device) -> Callable[[], float]:
    """Returns a training loop without this project's harness, as a function that returns steps/s over `PASSES` passes.

    Args:
        mode: Mode of `torch.compile`; None for eager.
        workload: Its model and batches, all padded to one length.
        device: The device to train on.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)  # like the workload; see docs/log.md
    model = workload.build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    batches = list(resident(workload, device))
    forward = model if mode is None else torch.compile(model, mode=mode, dynamic=False)

    def train(batch: Batch) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = forward(**batch.inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for step in range(WARM_UP_STEPS):
        train(batches[step % len(batches)])
    wait()

    def steps_per_s() -> float:
        for batch in batches[-2:]:  # untimed, after a pause
            train(batch)
        wait()
        started = time.perf_counter()
        for _ in range(PASSES):
            for batch in batches:
                train(batch)
        wait()
        return PASSES * len(batches) / (time.perf_counter() - started)

    return steps_per_s


def resident(workload: Captioning, device: torch.device) -> Iterator[Batch]:
    """Yields the batches that both train on."""
    policy = CompileSettings.parse("scope=full").shape_policy(workload.max_length)
    yield from workload.pool(policy, rank=0, device=device)


def trial(settings: CompileSettings, workload: Captioning, device: torch.device) -> float:
    """Returns the steps/s of `measure`, by the mean, like the loop's."""
    found = measure(
        prepare(workload, settings, device),
        protocol=Protocol(
            compared_steps=1, min_passes=PASSES, max_passes=PASSES, min_window_s=0.0, cpu_window_s=0.0, eager_batches=4
        ),
    )
    return found.samples_per_s / workload.batch_size


def refuse_another_loop(spelled: str) -> None:
    """Refuses settings that the loop cannot run, since it varies only the mode.

    Raises:
        ConfigError: The loop cannot run the settings.
        SettingsError: The text does not describe settings.
    """
    able = ("scope=eager,padding=max", *(f"scope=full,mode={mode}" for mode in Mode))
    if CompileSettings.parse(spelled).key not in {CompileSettings.parse(text).key for text in able}:
        raise ConfigError(f"--settings {spelled}: the loop by hand is eager or one mode; use {able[0]} or scope=full,mode=MODE")


def child(kind: str, spelled: str, workload: Captioning, device: torch.device) -> None:
    """Answers each line on its input with a rate: the loop repeatedly, the trial once."""
    settings = CompileSettings.parse(spelled)
    if kind == "trial":
        print(ANSWER + json.dumps(trial(settings, workload, device)), flush=True)
        return
    steps_per_s = hand_loop(str(settings.mode) if settings.mode else None, workload, device)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(steps_per_s()), flush=True)


@contextmanager
def started(kind: str, spelled: str, arguments: argparse.Namespace, caches: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a child of this script, which ends with the block."""
    command = [sys.executable, "-m", "benchmarks.trials.harness_fidelity", "--child", kind, "--settings", spelled]
    process = subprocess.Popen(
        [*command, "--size", arguments.size, "--device", arguments.device, "--output", str(arguments.output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **compile_cache_env(Path(caches))},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answer(process: subprocess.Popen[str]) -> float:
    """Returns the child's next rate."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(ANSWER):
            return float(json.loads(line.removeprefix(ANSWER)))
    raise CompileSweepError("the child ended without an answer; its error is above")


def compared(spelled: str, arguments: argparse.Namespace, caches: str) -> dict[str, Any]:
    """Returns the alternating rates of the loop and of trials."""
    loop_rates: list[float] = []
    trial_rates: list[float] = []
    with started("loop", spelled, arguments, caches) as loop:
        for _ in range(arguments.rounds):
            loop_rates.append(answer(loop))
            with started("trial", spelled, arguments, caches) as one:
                trial_rates.append(answer(one))
    return {
        "settings": spelled,
        "loop_steps_per_s": loop_rates,
        "trial_steps_per_s": trial_rates,
        "ratio": statistics.fmean(trial_rates) / statistics.fmean(loop_rates),
    }


def main() -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(_compare)


def _compare() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--size", default="base", choices=Captioning.sizes)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=2, help="times that each takes its turn")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help="as a record's key spells them; one length only")
    parser.add_argument("--child", choices=("loop", "trial"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        workload = Captioning(arguments.size, 0)
        workload.pool_batches = POOL_BATCHES if arguments.size == "base" else TINY_POOL_BATCHES
        child(arguments.child, arguments.settings[0], workload, torch.device(arguments.device))
        return 0
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds} is too few; use 1 or more")
    for spelled in arguments.settings:
        refuse_another_loop(spelled)
    make_room(arguments.output)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "size": arguments.size,
        "goal": GOAL,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as caches:
        for spelled in arguments.settings:
            row = compared(spelled, arguments, caches)
            rates = {name: ", ".join(f"{rate:.3f}" for rate in row[f"{name}_steps_per_s"]) for name in ("loop", "trial")}
            ratio = f"trial/loop {row['ratio']:.4f} (goal {GOAL})"
            print(f"{row['settings']}: loop {rates['loop']}; trial {rates['trial']}; {ratio}", flush=True)
            result["rows"].append(row)
            arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
