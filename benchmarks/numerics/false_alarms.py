"""How often a healthy compiled run is called `diverges`: runs of all built-in training workloads, judged as a trial judges them.

Background: each run trains a built-in workload in its smallest size, or a small variational autoencoder that draws much (Gaussian
noise and dropout of one half on 8 rows), from weights and batches of a seed of its own, in float32 or under bfloat16 autocast,
with dropout as the workload has it or without. Compiled with `aot_eager`, which changes random numbers and the order of
operations, or with `--inductor` as a job would be. The gradient check and the comparison with eager are the harness's own; only
timing is left out.

Output: a line of JSON per run in FILE, which a second call continues, and a table of the results.
`python -m benchmarks.numerics.false_alarms FILE --runs 200 --processes 20`.
"""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro
from torch import Tensor, nn

from benchmarks.numerics.divided import divided
from compile_sweep import command_line
from compile_sweep.contract.base import Workload, load_workload
from compile_sweep.contract.from_model import WorkloadFromModel
from compile_sweep.contract.seeding import seed_all
from compile_sweep.contract.workload_names import BUILT_IN
from compile_sweep.harness.apply import applied
from compile_sweep.harness.numerics.check import check_numerics
from compile_sweep.harness.numerics.references import build_model_on, record_run
from compile_sweep.harness.numerics.step_check import check_step
from compile_sweep.harness.numerics.trajectory import COMPARED_STEPS
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings

PROG = "python -m benchmarks.numerics.false_alarms"
NOISY = "noisy autoencoder"


class NoisyAutoencoder(nn.Module):
    """Reconstructs 24 numbers a row from 8, with noise in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.narrow, self.wide = nn.Dropout(0.5), nn.Linear(24, 16), nn.Linear(8, 24)

    def forward(self, rows: Tensor) -> Tensor:
        mean, log_scale = self.narrow(self.drop(rows)).chunk(2, -1)
        made = self.wide(mean + log_scale.exp() * torch.randn_like(mean))
        divergence = (mean.square() + (2 * log_scale).exp() - 2 * log_scale).mean()
        return nn.functional.mse_loss(made, rows) + 0.1 * divergence


class Run(NamedTuple):
    """What one run trains."""

    seed: int
    autocast: bool
    dropout: bool
    workload: str

    @property
    def key(self) -> str:
        """Names the run in the file."""
        precision = "bfloat16 autocast" if self.autocast else "float32"
        return f"{self.workload}, {precision}, {'its own dropout' if self.dropout else 'no dropout'}, seed {self.seed}"


def runs() -> Iterator[Run]:
    """All runs, one seed after the other, without end."""
    names = [NOISY, *(name for name in BUILT_IN if load_workload(name)(load_workload(name).sizes[-1], 0).trains)]
    for seed in itertools.count():
        for autocast, dropout, name in itertools.product((False, True), (True, False), names):
            yield Run(seed, autocast, dropout, name)


def workload_of(run: Run) -> Workload:
    """Returns the run's workload."""
    if run.workload == NOISY:
        kind: Any = WorkloadFromModel(NoisyAutoencoder, lambda number: {"rows": torch.randn(8, 24)}, lambda m, b: m(b["rows"]))
        workload = kind("only", run.seed)
    else:
        kind = load_workload(run.workload)
        workload = kind(kind.sizes[-1], run.seed)
    workload.autocast_dtype = lambda device: torch.bfloat16 if run.autocast else None
    if not run.dropout:
        build = workload.build_model
        workload.build_model = lambda: without_dropout(build())
    return workload  # type: ignore[no-any-return]


def without_dropout(model: nn.Module) -> nn.Module:
    """Returns the model with every dropout probability set to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout", "hidden_dropout"):  # of attention in transformers
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def judged(run: Run, device: torch.device, field: str) -> dict[str, Any]:
    """Returns the harness's judgment of the run, with `field` added to the setting."""
    began = time.perf_counter()
    torch._dynamo.reset()
    prepared = prepare(workload_of(run), CompileSettings.parse(f"scope=full{field}"), device)
    workload = prepared.workload
    with workload.process_settings():
        pool = workload.pool(prepared.policy, rank=0, device=device)
        batches = [batch for _, batch in zip(range(COMPARED_STEPS), itertools.cycle(pool), strict=False)]
        model = build_model_on(workload, device)
        optimizer = prepared.optimizer(model)
        seed_all(run.seed)
        with applied(prepared, model, optimizer) as step:
            trajectory = record_run(workload, model, step, batches)
            gradients = check_step(prepared, model, step, batches[0], draws=trajectory.random)
        numerics = check_numerics(prepared, batches, trajectory, [], gradient_check=gradients)
    assert gradients is not None
    return {
        "group": f"{run.workload}, {'bfloat16 autocast' if run.autocast else 'float32'}",
        "random": numerics.random,
        "status": str(numerics.status),
        "worst": numerics.worst,
        "gradients": str(gradients.outcome),
        "why": gradients.reason,
        "error": gradients.error,
        "allowed": gradients.allowed,
        "evaluations": gradients.evaluations,
        "share_checked": gradients.share_checked,
        "seconds": round(time.perf_counter() - began, 1),
    }


def report(found: Sequence[Mapping[str, Any]]) -> str:
    """Formats the table, with a row per workload and precision."""
    lines = [
        "| healthy runs of | runs | random | diverges | other than ok | gradients ok | skipped | evaluations | could have seen |",
        "|---" * 9 + "|",
    ]
    for group in [*sorted({str(one["group"]) for one in found}), ""]:
        rows = [one for one in found if group in ("", one["group"])]
        statuses, outcomes = [one["status"] for one in rows], [one["gradients"] for one in rows]
        seen = [one["allowed"] for one in rows if one["gradients"] == "ok"]
        cells = [
            group or "all",
            len(rows),
            sum(one["random"] for one in rows),
            statuses.count("diverges"),
            len(rows) - statuses.count("diverges") - statuses.count("ok"),
            outcomes.count("ok"),
            outcomes.count("skipped"),
            f"{statistics.median(one['evaluations'] for one in rows):.0f}",
            f"{100 * statistics.median(seen):.2g} % of a layer" if seen else "—",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Find how often a healthy compiled run is called `diverges`."""

    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file of results; a second call continues it."""
    runs: int = 200
    processes: int = os.cpu_count() or 1
    """How many processes divide the runs, each on one core."""
    inductor: command_line.Flag = False
    """Compile with Inductor instead of `aot_eager`."""
    cuda: command_line.Flag = False
    """Run on the GPU."""


def main() -> int:
    """Executes the runs that the file lacks, and prints the table; returns the command's exit code."""
    return command_line.main_of(Options, _judge, PROG)()


def _judge(options: Options) -> int:
    device, field = torch.device("cuda" if options.cuda else "cpu"), "" if options.inductor else ",backend=aot_eager"
    # By its module's name, because a spawned process cannot import `__main__` as its own.
    here = import_module("benchmarks.numerics.false_alarms")
    tasks = {f"{run.key}{field}": (run, device, field) for run in itertools.islice(here.runs(), options.runs)}
    found = divided(options.output, tasks, here.judged, options.processes)
    print(report([*found.values()]))
    return 0 if found.keys() == tasks.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
