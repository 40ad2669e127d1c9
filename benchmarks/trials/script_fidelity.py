"""Whether a script's figures in a trial are those of its own clock: both in turn on one device, ABAB.

Background: a trial runs a person's script under hooks that mark its steps, note its losses and count its samples, which must cost
next to nothing. The script is `by_hand/gpt2_script.py`, eagerly and with its own `torch.compile`; by itself it prints its mean
step, and a trial measures it as it is.

Output of `python -m benchmarks.trials.script_fidelity --output FILE`: milliseconds a step by both and their ratio, the script's
own over the trial's, which should be 0.98 or more; the same as JSON in FILE. About eight minutes on an H100; `--size tiny` on a
CPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from compile_sweep.script.trial import ScriptTrial
from orchestrator.guard.scratch_folders import compile_cache_env

GOAL = 0.98
SCRIPT = Path(__file__).parents[1] / "by_hand" / "gpt2_script.py"
SIZES = {
    "base": [],
    "tiny": [
        "--layers",
        "2",
        "--heads",
        "2",
        "--width",
        "64",
        "--length",
        "64",
        "--batch",
        "4",
        "--vocabulary",
        "512",
        "--steps",
        "300",
    ],
}


def by_itself(arguments: list[str], environment: dict[str, str]) -> float:
    """Returns the milliseconds of a mean step, as the script prints it."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=True, timeout=1200
    )
    return float(run.stdout.split(" ms a step")[0].split()[-1])


def in_a_trial(arguments: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Returns the milliseconds of a mean step, from a trial's throughput."""
    with tempfile.TemporaryDirectory(dir=folder) as base:
        trial = ScriptTrial(
            job=ScriptJob.of(str(SCRIPT), [*arguments, "--steps", "1000000"]),
            settings=CompileSettings.parse("scope=eager,as_written=on"),
            base=Path(base),
            references=folder / f"references-{len(arguments)}",
            environment=environment,
            shows_output=False,
        )
        found = trial.run()
        print(f"  numbers {found['numerics']['status']}, waits for data {found['data_wait_share']:.1%}", flush=True)
    batch = int(arguments[arguments.index("--batch") + 1]) if "--batch" in arguments else 16
    return 1e3 * batch / float(found["samples_per_s"])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--output", type=Path, help="JSON file")
    options.add_argument("--size", choices=SIZES, default="base")
    options.add_argument("--rounds", type=int, default=3)
    told = options.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="compile-sweep-") as made:
        folder = Path(made)
        environment = {**os.environ, **compile_cache_env(folder)}
        for name, arguments in (("eager", SIZES[told.size]), ("compiled", [*SIZES[told.size], "--compile"])):
            own, trials = [], []
            for _ in range(told.rounds):
                own.append(by_itself(arguments, environment))
                trials.append(in_a_trial(arguments, folder, environment))
                print(f"{name}: {own[-1]:.2f} ms by itself, {trials[-1]:.2f} ms in a trial", flush=True)
            ratio = statistics.median(own) / statistics.median(trials)
            rows.append({"script": name, "own_step_ms": own, "trial_step_ms": trials, "ratio": ratio})
            print(f"{name}: ratio {ratio:.4f}, {'reached' if ratio >= GOAL else 'missed'} {GOAL}", flush=True)
    if told.output:
        told.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ratio"] >= GOAL for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
