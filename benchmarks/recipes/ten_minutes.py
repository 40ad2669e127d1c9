"""What recipe `auto` finds in five and ten minutes on one machine, compared with the best that an expert writes by hand.

Background: every user's question is whether ten minutes of their GPU give what an expert would have found. The ways by
hand are those of `benchmarks.by_hand.best`, for the same job; the sweeps run the command as a person calls it, with the local
runner. The clock starts with the command, so that its own start counts.

Output: a JSON file with, for each budget, the best setting, its samples/s relative to the best by hand, the seconds until
98 % of the best by hand and of the sweep's own best were reached, and the fraction of trials' seconds spent compiling or timing.

Each of these takes at most nine minutes, with the one way by hand that won (and `--lines` for ways measured before):

    T="python -m benchmarks.recipes.ten_minutes --output $OUT/auto.json"
    $T resnet --size resnet50 --by-hand resnet --ways "CUDA graphs, fused, channels_last" --budget-s 300
    $T resnet --size resnet50 --lines by_hand.jsonl --budget-s 520
    $T segmentation --size b0 --by-hand segmentation --ways "CUDA graphs, fused, channels_last" --budget-s 400
    $T captioning --size base --by-hand captioning --ways "CUDA graphs, fused, grouped, unmasked" --budget-s 380
    $T benchmarks/by_hand/gpt2_script.py --by-hand gpt2_script --ways "compiled, fused" "CUDA graphs, fused" --budget-s 380
    $T gpt2 --size small --by-hand gpt2 --ways "CUDA graphs, compiled optimizer" --budget-s 400
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from orchestrator.config import Effort
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.recipes.ten_minutes"
ENOUGH = 0.98  # fraction of the best by hand that should be reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare recipe auto with what an expert writes by hand."""

    workload: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD")]
    """The workload to sweep, or the path of a script."""
    size: str | None = None
    """Its size; by default as a sweep has it."""
    output: Path
    """The JSON file to write; the sweeps' folders go beside it."""
    by_hand: str | None = None
    """The job of benchmarks.by_hand.best to compare with."""
    lines: Path | None = None
    """Lines of JSON that benchmarks.by_hand.best printed before, in place of measuring."""
    ways: tuple[str, ...] = ()
    """Names of ways by hand; by default all of them, which for ResNet take six minutes."""
    budget_s: tuple[float, ...] = (Effort.QUICK.seconds, Effort.STANDARD.seconds)
    """Seconds of each sweep."""
    words: tuple[str, ...] = ()
    """Further words for the sweep's command, each as =--option."""


def main() -> int:
    return command_line.main_of(Options, _compare, PROG)()


def _compare(options: Options) -> int:
    make_room(options.output)
    by_hand = _by_hand(options)
    best = max((float(line["samples_per_s"]) for line in by_hand), default=None)
    told: dict[str, Any] = {"workload": options.workload, "size": options.size, "by_hand": by_hand, "sweeps": {}}
    for budget_s in options.budget_s:
        folder = options.output.with_suffix("") / f"{budget_s:.0f}_s"
        began = datetime.now(UTC)
        code, seconds = _sweep(options, folder, budget_s)
        sweep = {"exit_code": code, "seconds": round(seconds, 1), **found(records.read(folder), began, best)}
        told["sweeps"][f"{budget_s:.0f}"] = sweep
        print(json.dumps({"budget_s": budget_s, **sweep}), flush=True)
        write_json(options.output, told)  # after each, so that results survive if the machine goes away
    return 0


def _by_hand(options: Options) -> list[dict[str, Any]]:
    if options.lines is not None:
        return parsed(options.lines.read_text(encoding="utf-8"))
    if options.by_hand is None:
        return []
    words = [
        sys.executable,
        "-m",
        "benchmarks.by_hand.best",
        options.by_hand,
        *(["--way", *options.ways] if options.ways else []),
    ]
    run = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout, end="", flush=True)
    return parsed(run.stdout)


def parsed(text: str) -> list[dict[str, Any]]:
    """Returns the lines of JSON that `benchmarks.by_hand.best` printed.

    Raises:
        ConfigError: No line is one.
    """
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if not lines or not all(float(line["samples_per_s"]) > 0 for line in lines):
            raise ValueError("no figures")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"nothing was measured by hand ({error}); look at what benchmarks.by_hand.best printed") from None
    return lines


def _sweep(options: Options, folder: Path, budget_s: float) -> tuple[int, float]:
    size = ["--size", options.size] if options.size else []
    what = "--script" if options.workload.endswith(".py") else "--workload"
    words = [what, options.workload, *size, "--runner", "local", "--cache-store", "none", "--output", str(folder)]
    words += ["--time-budget-s", str(budget_s), *(word.removeprefix("=") for word in options.words)]
    began = time.monotonic()
    code = subprocess.run([sys.executable, "-m", "orchestrator.sweep", *words], check=False).returncode
    return code, time.monotonic() - began


def found(trials: Sequence[TrialRecord], began: datetime, by_hand: float | None) -> Mapping[str, Any]:
    """Returns what a sweep's records say.

    Args:
        trials: The records, in order.
        began: When the command was started.
        by_hand: Samples/s of the best way by hand, if it is known.
    """
    usable = [trial for trial in trials if trial.status is Status.OK and trial.samples_per_s]
    if not usable:
        return {"trials": len(trials), "best": None}
    best = max(usable, key=lambda trial: trial.samples_per_s or 0.0)
    fastest = float(best.samples_per_s or 0.0)
    working_s = sum((trial.compile_s or 0.0) + sum(trial.step_ms) / 1e3 for trial in trials)
    told: dict[str, Any] = {
        "trials": len(trials),
        "best": best.settings_key,
        "samples_per_s": fastest,
        "over_eager": round(fastest / float(usable[0].samples_per_s or fastest), 3),
        "own_best_at_s": _reached_s(usable, began, ENOUGH * fastest),
        "compiling_or_timing": round(working_s / sum(trial.wall_s for trial in trials), 3),
        "order": [[trial.settings_key, trial.status, trial.samples_per_s, round(trial.wall_s, 1)] for trial in trials],
    }
    if by_hand is not None:
        told |= {"over_by_hand": round(fastest / by_hand, 4), "by_hand_at_s": _reached_s(usable, began, ENOUGH * by_hand)}
    return told


def _reached_s(usable: Sequence[TrialRecord], began: datetime, samples_per_s: float) -> float | None:
    """Returns the seconds from the start of the command to the end of the first trial that is as fast; None if none is."""
    ends = [
        (datetime.fromisoformat(trial.started_at) - began).total_seconds() + trial.wall_s
        for trial in usable
        if (trial.samples_per_s or 0.0) >= samples_per_s
    ]
    return round(min(ends), 1) if ends else None


if __name__ == "__main__":
    sys.exit(main())
