"""The regional recipe as its source times it, and how much of its figures a process pays only once, whatever it compiles.

Background: "Reducing cold start compilation time with regional compilation" compiles 64 layers of two 10 × 10 linear ones, first
the whole model, then each layer, in one process: 29.71 and 1.75 s, a factor of 17. What a process pays at its first compile, such
as importing Inductor and starting its compilers, is only in the first figure there. A sweep (`--workload layers`) gives each
setting a process of its own, so both pay it. This measures both arrangements, and a third in which each process compiled
something else before.

Output: for the forward pass and for training, seconds of the first step of either scope with empty caches, in each arrangement,
and full divided by regional; a JSON file.

    python -m benchmarks.recipes.regional_recipe --output regional_recipe.json
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.output_files import make_room
from compile_sweep import command_line
from compile_sweep.schema.errors import CompileSweepError
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.run.sweep_folder import write_json
from workloads.layers import NUM_LAYERS

PROG = "python -m benchmarks.recipes.regional_recipe"
LIMIT_S = 300.0  # limit for one process, in seconds

FULL, REGIONAL, OTHER = "full", "regional", "other"
ARRANGEMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "one process, full first": ((FULL, REGIONAL),),
    "a process each": ((FULL,), (REGIONAL,)),
    "a process each, after another compile": ((OTHER, FULL), (OTHER, REGIONAL)),
}
"""Processes of each arrangement, and what each compiles, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Time the regional recipe."""

    output: Path
    """The JSON file to write."""
    num_layers: int = NUM_LAYERS["base"]


def main(words: list[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _benchmark(command_line.parse(Options, PROG, words)))


def _benchmark(options: Options) -> int:
    make_room(options.output)
    printed = Table("", "arrangement", "full, s", "regional, s", "full over regional", box=None)
    rows = []
    for trains in (False, True):
        for name, processes in ARRANGEMENTS.items():
            took: dict[str, float] = {}
            for order in processes:
                took |= _in_a_process(order, options.num_layers, trains=trains)
            what, ratio = "training" if trains else "forward", took[FULL] / took[REGIONAL]
            rows.append({"what": what, "arrangement": name, "full_s": took[FULL], "regional_s": took[REGIONAL], "ratio": ratio})
            printed.add_row(what, name, f"{took[FULL]:.2f}", f"{took[REGIONAL]:.2f}", f"{ratio:.1f}×")
    Console().print(printed)
    write_json(options.output, {"environment": fingerprint().to_dict(), "num_layers": options.num_layers, "rows": rows})
    return 0


def _in_a_process(order: tuple[str, ...], num_layers: int, *, trains: bool) -> dict[str, float]:
    """Returns seconds of first steps in a fresh process with empty caches, by what was compiled, without preparatory ones."""
    with tempfile.TemporaryDirectory() as caches:
        told = json.dumps({"order": order, "num_layers": num_layers, "trains": trains})
        environment = {**os.environ, **compile_cache_env(Path(caches))}
        process = f"a process that compiles {' then '.join(order)}"
        try:
            done = subprocess.run(
                [sys.executable, "-c", f"from {__spec__.name} import first_steps; first_steps()", told],
                env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))},
                capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CompileSweepError(f"{process} was not done after {LIMIT_S:g} s") from None
    if done.returncode:
        raise CompileSweepError(f"{process} failed: {done.stderr[-500:]}")
    return {name: seconds for name, seconds in json.loads(done.stdout.splitlines()[-1]).items() if name != OTHER}


def first_steps() -> None:
    """Runs in such a process: prints the seconds of each first step as JSON."""
    import time

    import torch
    from torch._inductor.utils import fresh_cache

    from workloads.layers import ROWS, WIDTH, LayersModel

    told = json.loads(sys.argv[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    took = {}
    for name in told["order"]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = LayersModel(1 if name == OTHER else told["num_layers"], trains=told["trains"]).to(device)
        hidden = torch.randn(2 * ROWS if name == OTHER else ROWS, WIDTH, device=device)
        model(hidden)  # loads the device's libraries
        for module in model.layers if name == REGIONAL else [model]:
            module.compile()
        wait()
        with fresh_cache(), torch.set_grad_enabled(told["trains"]):
            began = time.perf_counter()
            out = model(hidden)
            if told["trains"]:
                out.backward()
            wait()
            took[name] = time.perf_counter() - began
    print(json.dumps(took))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
