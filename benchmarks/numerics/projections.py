"""How close the gradients of compiled and of eager code are to precise ones, and which wrong gradients can be told from them.

Background: a workload without dropout is compiled with Inductor and trained for a few steps under bfloat16 autocast; then its
gradients are compared as in `compile_sweep.harness.numerics.beside_eager`. To see what is found, the compiled gradients of one
layer after the other are multiplied by a factor, and the layers are judged again.

Output: a table with a row for each workload. `python -m benchmarks.numerics.projections gpt2:small --device cuda`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Annotated

import torch
import tyro
from torch import nn

from benchmarks.numerics.gradient_errors import trained
from compile_sweep import command_line
from compile_sweep.contract.base import load_workload
from compile_sweep.harness.numerics.beside_eager import BesideEager, Projections, layer_errors
from compile_sweep.harness.numerics.finite_differences import PRECISIONS, Differentiated
from compile_sweep.harness.numerics.step_check import run_eagerly, run_precisely

PROG = "python -m benchmarks.numerics.projections"

BFLOAT16 = 2.0**-9
FACTORS = (1.02, 1.05, 1.1, 1.2, 1.5)


def without_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of a model to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p", "attn_dropout_p", "dropout_prob", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def projected(name: str, device: torch.device) -> dict[str, Projections] | None:
    """Returns the projections of a workload's layers."""
    workload, _, size = name.partition(":")
    kind = load_workload(workload)
    precision = "" if device.type == "cuda" else ",autocast=bf16"
    field = f"dynamic=static{precision}"
    made = kind(size or kind.sizes[-1], 0)
    with trained(made, field, device, backend="inductor", change=without_dropout) as one:
        for number in range(4):
            one.step(one.pool[number % len(one.pool)])
        step = Differentiated.of_model(one.model, lambda: one.step.forward_and_backward(one.pool[0]), device)
        found = BesideEager(
            step, PRECISIONS[-1][1], rounding=BFLOAT16, seed=0, draws=False, eagerly=run_eagerly, starts_nearby=True
        )
        try:
            return found.layers(run_precisely)
        finally:
            found.put_back()


def share_found(layers: Mapping[str, Projections], factor: float) -> float:
    """Returns the share of compared layers that are found, and no others, if their compiled gradients are multiplied."""
    names = list(layer_errors(layers))
    found = 0
    for name in names:
        spoiled = replace(layers[name], compiled=[factor * value for value in layers[name].compiled])
        errors = layer_errors({**layers, name: spoiled})
        found += [other for other, one in errors.items() if one.is_wrong] == [name]
    return found / len(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compares gradients with eager's, both projected on precise ones."""

    workloads: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD:SIZE")]
    """Built-in workloads."""
    device: str = "cpu"
    """The device to train on."""


def _print_table(options: Options) -> None:
    print("| | layers compared | eager | compiled | largest error | of what is allowed |", *(f"{f:g} × |" for f in FACTORS))
    print("|---|---|" + "--:|" * (4 + len(FACTORS)))
    for name in options.workloads:
        layers = projected(name, torch.device(options.device))
        if not layers:
            print(f"| {name} | not finite |")
            continue
        errors = layer_errors(layers)
        worst = max(errors.values(), key=lambda one: abs(one.error) / one.allowed)
        typical = (median(mean(of(layers[key])) for key in errors) for of in (lambda one: one.eager, lambda one: one.compiled))
        cells = [
            name,
            f"{len(errors)} of {len(layers)}",
            *(f"{value:.3f}" for value in typical),
            f"{100 * abs(worst.error):.2g} %",
        ]
        cells += [
            f"{abs(worst.error) / worst.allowed:.2f}",
            *(f"{100 * share_found(layers, factor):.0f} %" for factor in FACTORS),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    return command_line.main_of(Options, _print_table, PROG)()


if __name__ == "__main__":
    sys.exit(main())
