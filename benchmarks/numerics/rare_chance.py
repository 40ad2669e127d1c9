"""Counts right and wrong runs that are called diverging where random numbers rarely act.

In place of a compiled run, an eager run with other random numbers is judged by the check of losses, gradients and parameters: as
it is, with a loss 1 % too high, and with gradients 5 % too large. The model is a small perceptron; either dropout acts on its
first layer's outputs, or each row skips its second layer with a probability.

`python -m benchmarks.numerics.rare_chance [--seeds N]` prints a row for each case. About a minute for each seed on one core.
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_sweep import WorkloadFromModel
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics.check import NumericsStatus, check_numerics
from compile_sweep.harness.numerics.references import record_run
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

CASES = [("dropout", 1e-4), ("dropout", 1e-3), ("dropout", 0.1), ("skips", 1e-3), ("skips", 1e-2), ("skips", 0.1)]
WRONG = ("nothing", "loss 1 %", "gradients 5 %")
STEPS = 10
CPU = torch.device("cpu")


class Perceptron(nn.Module):
    def __init__(self, kind: str, probability: float) -> None:
        super().__init__()
        self.kind, self.probability = kind, probability
        self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.relu(self.first(rows))
        if self.kind == "dropout":
            return self.head(torch.relu(self.second(F.dropout(hidden, self.probability))))
        kept = torch.bernoulli(torch.full((len(rows), 1), 1 - self.probability))
        return self.head(kept * hidden + (1 - kept) * torch.relu(self.second(hidden)))


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {"rows": torch.randn(32, 32, generator=generator), "classes": torch.randint(10, (32,), generator=generator)}


def loss(model: nn.Module, of: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(of["rows"]), of["classes"])


def is_called_wrong(kind: str, probability: float, wrong: str, seed: int) -> bool:
    """Judges one run."""
    workload = WorkloadFromModel(partial(Perceptron, kind, probability), batch, loss)("only", 100 * seed)
    settings = CompileSettings.parse("scope=eager")
    pool = workload.pool(settings.shape_policy(workload.max_length), rank=0, device=CPU)
    batches = [pool[at % len(pool)] for at in range(STEPS)]
    prepared, model = prepare(workload, settings, CPU), workload.build_model()
    if wrong == "loss 1 %":
        model.register_forward_hook(lambda module, inputs, value: value + 0.01 * value.detach())
    elif wrong == "gradients 5 %":
        for weights in model.parameters():
            weights.register_hook(lambda gradient: 1.05 * gradient)
    torch.manual_seed(7777 + seed)
    with applied(prepared, model, workload.optimizer(model, settings.optimizer)) as step:
        run = record_run(workload, model, step, batches)
    return check_numerics(prepared, batches, run, [1.0]).status is NumericsStatus.DIVERGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=15, metavar="N", help="runs of each case")
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print(f"| {' | '.join(('random numbers', *WRONG))} |\n|---|--:|--:|--:|")
    for kind, probability in CASES:
        counts = [sum(is_called_wrong(kind, probability, wrong, seed) for seed in seeds) for wrong in WRONG]
        print(f"| {kind} {probability:g} | {' | '.join(f'{count} of {len(seeds)}' for count in counts)} |", flush=True)


if __name__ == "__main__":
    main()
