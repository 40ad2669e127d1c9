"""How small an error of one layer's gradient the gradient check finds, and how often it calls a right one wrong.

Background: the errors are injected after the backward of an eager step, so that no compiling is needed: the check sees a step
whose gradients of one layer are too large, and the same step without the error and with other dropout masks where it asks for
eager. Layers, batches and weights are drawn anew for each trial. Right steps are those of the built-in training workloads, in
their smallest size and with their own dropout, compiled with `aot_eager` once for each and checked at other weights and batches.

Output: a line of JSON in FILE for each task, which a second call continues, and a table of shares found, by error, with dropout
and without, in float32 and under bfloat16 autocast; and how many checks of right steps said what.
`python -m benchmarks.numerics.gradient_errors FILE --processes 20`. On a GPU, `python -m benchmarks.numerics.gradient_errors
--gpu` checks workloads of a real size under bfloat16 autocast instead, right and with errors in one layer or in all but one.
"""

import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, cast

import torch
import torch._dynamo
import tyro
from torch import Tensor, nn

from benchmarks.numerics.divided import divided
from compile_sweep import command_line
from compile_sweep.contract.base import Batch, Workload, load_workload
from compile_sweep.contract.seeding import seed_all
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.harness.apply import TrainStep, applied
from compile_sweep.harness.numerics.finite_differences import Differentiated
from compile_sweep.harness.numerics.gradient_check import (
    GradientCheck,
    Outcome,
    check_gradients,
)
from compile_sweep.harness.numerics.references import build_model_on
from compile_sweep.harness.numerics.step_check import check_step, without_autocast
from compile_sweep.harness.prepare import Prepared, prepare
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings

PROG = "python -m benchmarks.numerics.gradient_errors"

ERRORS = (0.005, 0.01, 0.02, 0.05, 0.2, 0.0)


class Kind(NamedTuple):
    """A kind of step."""

    autocast: bool
    dropout: float
    draws_eagers: bool = False  # as Inductor does with inductor.fallback_random=on

    @property
    def title(self) -> str:
        drawn = ", eager's random numbers" if self.draws_eagers else ""
        return f"{'bfloat16 autocast' if self.autocast else 'float32'}, dropout {self.dropout:g}{drawn}"


KINDS = (Kind(False, 0.0), Kind(False, 0.1), Kind(False, 0.1, True), Kind(True, 0.0), Kind(True, 0.1), Kind(True, 0.1, True))
CHECKS_AT_ONCE = 10  # checks of right steps in one task, which compiles once

CPU = torch.device("cpu")
WIDTH, WORDS = 32, 100


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    """Four blocks: 26 layers with parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(_Block(dropout) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def injected(error: float, *, seed: int, dropout: float, autocast: bool, draws_eagers: bool) -> GradientCheck:
    """Checks a step whose gradient of one layer, drawn by the seed, is (1 + error) times the true one."""
    seed_all(seed)
    model = Transformer(dropout)
    ids = torch.randint(WORDS, (8, 16))
    parameters = dict(model.named_parameters())
    layer = random.choice(sorted({name.rpartition(".")[0] for name in parameters}))
    is_eager = False

    def run() -> float:
        if is_eager and not draws_eagers:
            torch.rand(1)  # so that eager draws other random numbers, as it does beside Inductor
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        loss.backward()
        for name, parameter in parameters.items():
            if not is_eager and name.rpartition(".")[0] == layer and parameter.grad is not None:
                parameter.grad *= 1 + error
        return float(loss.detach())

    @contextmanager
    def eagerly() -> Iterator[None]:
        nonlocal is_eager
        is_eager = True
        yield
        is_eager = False

    @contextmanager
    def precisely() -> Iterator[None]:
        with eagerly(), without_autocast():
            yield

    step = Differentiated.of_model(model, run, CPU)
    rounding = 2.0**-9 if autocast else 2.0**-24
    found = check_gradients(
        step, rounding=rounding, draws=dropout > 0, draws_eagers=draws_eagers, eagerly=eagerly, precisely=precisely
    )
    if found.outcome is Outcome.WRONG and layer not in found.layers:
        print(f"another layer was named than {layer}: {', '.join(found.layers)}", file=sys.stderr)
    return found


class Trained(NamedTuple):
    """A workload in training."""

    prepared: Prepared
    pool: Sequence[Batch]
    model: nn.Module
    step: TrainStep


@contextmanager
def trained(
    workload: Workload,
    field: str,
    device: torch.device,
    *,
    backend: str = "aot_eager",
    change: Callable[[nn.Module], None] = lambda model: None,
) -> Iterator[Trained]:
    """Compiles a workload as a whole and trains it in the block.

    Args:
        workload: The workload, unmodified.
        field: A further field of the setting; empty for none.
        device: The device to train on.
        backend: What compiles it.
        change: Changes the model before it is compiled.
    """
    settings = CompileSettings.parse(",".join(filter(None, (f"scope=full,backend={backend}", field))))
    prepared = prepare(workload, settings, device)
    workload = prepared.workload
    with workload.process_settings():
        pool = workload.pool(prepared.policy, rank=0, device=device)
        model = build_model_on(workload, device)
        change(model)
        optimizer = prepared.optimizer(model)
        seed_all(0)
        with applied(prepared, model, optimizer) as step:
            yield Trained(prepared, pool, model, step)
    torch._dynamo.reset()


def right(name: str, seed: int) -> Iterator[GradientCheck]:
    """Yields checks of an unmodified built-in workload, at weights during training, on one batch after the other."""
    kind = load_workload(name)
    with trained(kind(kind.sizes[-1], seed), "", CPU) as one:
        for number in range(CHECKS_AT_ONCE):
            batch = one.pool[number % len(one.pool)]
            state = torch.get_rng_state()
            one.step(batch)
            draws = not torch.equal(state, torch.get_rng_state())
            found = check_step(one.prepared, one.model, one.step, batch, draws=draws)
            assert found is not None
            yield found


REAL = (("gpt2", "small", ""), ("gpt2", "small", "batch_size=64"), ("captioning", "base", ""), ("resnet", "resnet50", ""))
"""Workload, size and field of a setting."""

ALL_BUT_ONE = "all but the last"
INJECTED = (("right", 0.0), ("one layer", 0.1), ("one layer", 0.2), ("one layer", 0.5), (ALL_BUT_ONE, 0.1), (ALL_BUT_ONE, 0.2))
"""Layers whose gradients are too large, and by what fraction."""


def on_a_gpu() -> None:
    """Prints what the check says of workloads of a real size, one line for each error."""
    gpu = torch.device("cuda")
    print("| | gradients too large | outcome | error | allowed | layers checked | evaluations | seconds | named |")
    print("|---|---|---|--:|--:|--:|--:|--:|---|")
    for name, size, field in REAL:
        with trained(load_workload(name)(size, 0), field, gpu) as one:
            for number in range(6):
                state = torch.cuda.get_rng_state()
                one.step(one.pool[number % len(one.pool)])
            draws = not torch.equal(state, torch.cuda.get_rng_state())
            for what, error in INJECTED:
                began = time.monotonic()
                found = _checked_with(error, one, everywhere=what == ALL_BUT_ONE, draws=draws)
                shares = (found.error, found.allowed, found.share_checked)
                cells = [f"{name} {size} {field}".strip(), f"{what}: {100 * error:g} %", found.outcome.value]
                cells += ["" if share is None else f"{100 * share:.3g} %" for share in shares]
                cells += [str(found.evaluations), f"{time.monotonic() - began:.1f}", ", ".join(list(found.layers)[:2])]
                print(f"| {' | '.join(cells)} |", flush=True)


def _checked_with(error: float, one: Trained, *, everywhere: bool, draws: bool) -> GradientCheck:
    """Checks a step on the first batch; where it is compiled, gradients of one layer or of all but the last are too large."""
    layers = sorted({name.rpartition(".")[0] for name, p in one.model.named_parameters() if p.requires_grad and p.ndim > 1})
    spoiled = set(layers[:-1]) if everywhere else {random.Random(1).choice(layers)}

    def run(batch: Batch) -> float:
        loss = one.step.forward_and_backward(batch)
        if torch._dynamo.eval_frame._stance.stance != "force_eager":
            for name, parameter in one.model.named_parameters():
                if name.rpartition(".")[0] in spoiled and parameter.grad is not None:
                    parameter.grad *= 1 + error
        return loss

    spoiled_step = cast(TrainStep, SimpleNamespace(forward_and_backward=run))
    found = check_step(one.prepared, one.model, spoiled_step, one.pool[0], draws=draws)
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Find how small an error of one layer's gradient the gradient check finds, and how often it calls a right one wrong."""

    output: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None
    """The file of results; a second call continues it."""
    trials: int = 20
    """Trials for each error, dropout and precision."""
    checks: int = 40
    """Checks of right steps of each built-in workload, in tens."""
    processes: int = os.cpu_count() or 1
    """How many processes divide the work, each on one core."""
    gpu: command_line.Flag = False
    """Check workloads of a real size on the GPU instead, and print what is found."""


def checked(task: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what the checks of a task found, as JSON can hold it."""
    checks = right(**arguments) if task == "right" else [injected(**arguments)]
    return [
        {"outcome": one.outcome.value, "error": one.error, "evaluations": one.evaluations, "reason": one.reason} for one in checks
    ]


def main() -> int:
    """Prints both tables; returns the command's exit code."""
    return command_line.main_of(Options, _check, PROG)()


def _check(options: Options) -> int:
    if options.gpu:
        on_a_gpu()
        return 0
    if options.output is None:
        raise ConfigError("FILE is missing; name a file for the results")
    names = [name for name in BUILT_IN if load_workload(name)(load_workload(name).sizes[-1], 0).trains]
    tasks: dict[str, tuple[Any, ...]] = {}
    for name, seed in itertools.product(names, range(-(-options.checks // CHECKS_AT_ONCE))):
        tasks[f"{name}, seed {seed}"] = ("right", {"name": name, "seed": seed})
    for kind, error, seed in itertools.product(KINDS, ERRORS, range(options.trials)):
        tasks[f"{kind.title}, error {error:g}, seed {seed}"] = ("injected", {"error": error, "seed": seed, **kind._asdict()})
    # By its module's name, because a spawned process cannot import `__main__` as its own.
    run = import_module("benchmarks.numerics.gradient_errors").checked
    found = divided(options.output, tasks, run, options.processes)
    print(_report(found, names))
    return 0 if found.keys() == tasks.keys() else 1


def _report(found: Mapping[str, Any], names: Sequence[str]) -> str:
    """Formats both tables."""

    def checks_of(title: str) -> list[dict[str, Any]]:
        return [check for task, checks in found.items() if task.startswith(f"{title}, ") for check in checks]

    heads = [f"{100 * error:g} %" for error in ERRORS if error]
    lines = [f"| | {' | '.join(heads)} | correct ones called wrong | skipped |", "|---" * (len(heads) + 3) + "|"]
    for title in (kind.title for kind in KINDS):
        counts = [Counter(check["outcome"] for check in checks_of(f"{title}, error {error:g}")) for error in ERRORS]
        cells = [f"{count[Outcome.WRONG.value]} of {count.total()}" for count in counts]
        skipped = sum((count[Outcome.SKIPPED.value] for count in counts), 0)
        lines.append(f"| {title} | {' | '.join(cells)} | {skipped} of {sum(count.total() for count in counts)} |")
    head = "| correct steps of | ok | wrong | skipped | forwards and backwards, median | largest error of the ok ones |"
    lines += ["", head, "|---" * 6 + "|"]
    for name in names:
        checks = checks_of(name)
        outcomes = Counter(check["outcome"] for check in checks)
        counted = " | ".join(str(outcomes[outcome.value]) for outcome in (Outcome.OK, Outcome.WRONG, Outcome.SKIPPED))
        evaluations = statistics.median_low([check["evaluations"] for check in checks] or [0])
        largest = max((check["error"] or 0.0 for check in checks if check["outcome"] == Outcome.OK.value), default=0.0)
        lines.append(f"| {name} | {counted} | {evaluations} | {100 * largest:.2g} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
