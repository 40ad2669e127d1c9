"""How small an error of one layer's gradient the gradient check finds, and how often it calls a right one wrong.

Background: the errors are injected after the backward of an eager step, so that no compiling is needed: the check sees a step
whose gradients of one layer are too large, and the same step without the error where it asks for eager. Layers, batches and
weights are drawn anew for each trial. Right steps are those of the built-in training workloads, in their smallest size and with
their own dropout, compiled with `aot_eager` once for each and checked at other weights and batches.

Output: a table of shares found, by error, with dropout and without, in float32 and under bfloat16 autocast; and how many checks
of right steps said what. `python -m benchmarks.numerics.gradient_errors 40`. On a GPU, `python -m
benchmarks.numerics.gradient_errors --gpu` checks workloads of a real size under bfloat16 autocast instead, right and with errors
in one layer and in all but the last.
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
import torch._dynamo
from torch import Tensor, nn

from compile_sweep.contract.base import Batch, Workload, load_workload
from compile_sweep.contract.seeding import seed_all
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.harness.apply import TrainStep, applied
from compile_sweep.harness.numerics.finite_differences import Differentiated
from compile_sweep.harness.numerics.gradient_check import (
    GradientCheck,
    Outcome,
    check_gradients,
    check_step,
)
from compile_sweep.harness.numerics.references import build_model_on
from compile_sweep.harness.prepare import Prepared, prepare
from compile_sweep.schema.settings import CompileSettings

ERRORS = (0.005, 0.01, 0.02, 0.05, 0.2)
TRIALS = 20  # number of trials for each error, kind of model and precision

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


def injected(error: float, *, seed: int, dropout: float, autocast: bool) -> GradientCheck:
    """Checks a step whose gradient of one layer, drawn by the seed, is (1 + error) times the true one."""
    seed_all(seed)
    model = Transformer(dropout)
    ids = torch.randint(WORDS, (8, 16))
    parameters = dict(model.named_parameters())
    layer = random.choice(sorted({name.rpartition(".")[0] for name in parameters}))
    is_eager = False

    def run() -> float:
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

    step = Differentiated(
        parameters=parameters,
        buffers=lambda: list(model.buffers()),
        run=run,
        discard=model.zero_grad,
        gradients=lambda: [parameter.grad for parameter in parameters.values()],
        device=CPU,
    )
    found = check_gradients(step, rounding=2.0**-9 if autocast else 2.0**-24, draws=dropout > 0, eagerly=eagerly)
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
def trained(workload: Workload, field: str, device: torch.device) -> Iterator[Trained]:
    """Compiles a workload with `aot_eager` and trains it in the block.

    Args:
        workload: The workload, unmodified.
        field: A further field of the setting; empty for none.
        device: The device to train on.
    """
    settings = CompileSettings.parse(",".join(filter(None, ("scope=full,backend=aot_eager", field))))
    prepared = prepare(workload, settings, device)
    workload = prepared.workload
    with workload.process_settings():
        pool = workload.pool(prepared.policy, rank=0, device=device)
        model = build_model_on(workload, device)
        optimizer = prepared.optimizer(model)
        seed_all(0)
        with applied(prepared, model, optimizer) as step:
            yield Trained(prepared, pool, model, step)
    torch._dynamo.reset()


def right(name: str, *, repeats: int) -> Iterator[GradientCheck]:
    """Yields checks of an unmodified built-in workload, at weights during training, on one batch after the other."""
    kind = load_workload(name)
    with trained(kind(kind.sizes[-1], 0), "", CPU) as one:
        for number in range(repeats):
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


def main() -> None:
    """Prints both tables."""
    if sys.argv[1:] == ["--gpu"]:
        on_a_gpu()
        return
    torch.set_num_threads(1)  # the kernels are small
    print("| | " + " | ".join(f"{100 * error:g} %" for error in ERRORS) + " | right ones called wrong | skipped |")
    print("|---" * (len(ERRORS) + 3) + "|")
    for autocast in (False, True):
        for dropout in (0.0, 0.1):
            cells, skipped = [], 0
            for error in (*ERRORS, 0.0):
                outcomes = Counter(
                    injected(error, seed=seed, dropout=dropout, autocast=autocast).outcome for seed in range(TRIALS)
                )
                skipped += outcomes[Outcome.SKIPPED]
                cells.append(f"{outcomes[Outcome.WRONG]} of {TRIALS}")
            title = f"{'bfloat16 autocast' if autocast else 'float32'}, dropout {dropout:g}"
            print(f"| {title} | {' | '.join(cells)} | {skipped} |", flush=True)
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    print("\n| right steps of | ok | wrong | skipped | evaluations, median | largest error of the ok ones |")
    print("|---|---|---|---|---|---|")
    for name in BUILT_IN:
        if not load_workload(name)(load_workload(name).sizes[-1], 0).trains:
            continue
        checks = list(right(name, repeats=repeats))
        outcomes = Counter(check.outcome for check in checks)
        counts = " | ".join(str(outcomes[outcome]) for outcome in (Outcome.OK, Outcome.WRONG, Outcome.SKIPPED))
        evaluations = sorted(check.evaluations for check in checks)[len(checks) // 2]
        largest = max((check.error or 0.0 for check in checks if check.outcome is Outcome.OK), default=0.0)
        print(f"| {name} | {counts} | {evaluations} | {100 * largest:.2g} % |", flush=True)


if __name__ == "__main__":
    main()
