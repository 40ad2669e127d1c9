"""What each lever gives by itself over the best setting without it, measured on one machine, as a Markdown table.

Background: a setting that wins combines several levers, and the front does not tell which of them decided. Here each lever of the
best setting known (docs/results.md) is taken away by itself, and each other lever is added to it by itself. Everything is one
sweep with the local runner, cold; levers that tell the most run first, each trial's record is written as it ends, and no trial
starts that would probably end after `--budget-s`. The same command again, with the same output, measures what is left.

Output: the sweep's folder, and the table. A lever is in a row with and without it: samples/s, ratio, peak GiB, compile seconds.

    python -m benchmarks.levers.lever_table gpt2 --output levers/gpt2 --budget-s 520
    python -m benchmarks.levers.lever_table captioning --output levers/captioning --levers "bf16 residual" "merged q, k, v"
    python -m benchmarks.levers.lever_table --table levers/*
"""

import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from compile_sweep import command_line
from compile_sweep.contract.base import load_workload
from compile_sweep.describe import describe
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.setting_text import parse_pairs, suggest
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.space import Target, choose

PROG = "python -m benchmarks.levers.lever_table"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Lever:
    """One change of the best setting."""

    changes: Mapping[str, Any]  # fields and their values in the other setting; None takes the field away
    is_taken_away: bool = False  # whether the best setting has the lever, so that the other one is without it


def without(**changes: Any) -> Lever:
    return Lever(changes, is_taken_away=True)


def added(text: str) -> Lever:
    return Lever(dict(parse_pairs(text)))


@dataclass(frozen=True, slots=True)
class Job:
    """A workload with its best known setting."""

    workload: str
    size: str
    best: str
    levers: Mapping[str, Lever]
    """Levers by name, those that tell the most first."""


_COMPILED = {
    "CUDA graphs": without(mode=None),
    "fused optimizer": without(optimizer=None),
}
_INDUCTOR = {
    "optimizer=compiled": added("optimizer=compiled"),
    "combo kernels": added("inductor.combo_kernels=on"),
    "mix-order reduction": Lever({"inductor.triton.mix_order_reduction": "off"}, is_taken_away=True),
    "its split size tuned": added("inductor.triton.mix_order_reduction_autotune_split_size=on"),
    "coordinate descent": added("inductor.coordinate_descent_tuning=on"),
    "max_autotune_pointwise": added("inductor.max_autotune_pointwise=on"),
    "loop ordering after fusion": Lever({"inductor.loop_ordering_after_fusion": "off"}, is_taken_away=True),
    "cooperative reductions": added("inductor.triton.cooperative_reductions=on"),
    "static_gradients": added("static_gradients=on"),
    "activation_memory_budget=0.5": added("activation_memory_budget=0.5"),
    "max_autotune_gemm": added("inductor.max_autotune_gemm=on"),
}
_ATTENTION = {
    "cuDNN attention": added("sdpa_kernel=cudnn"),
    "flash attention": added("sdpa_kernel=flash"),
}
_OF_IMAGES = {
    "channels_last": without(memory_format=None),
    "CUDA graphs": _COMPILED["CUDA graphs"],
    "compiling": without(scope="eager", mode=None, dynamic=None),
    "fused optimizer": _COMPILED["fused optimizer"],
    "whole model in one piece": without(scope="regional"),
}
_GRAPHS = "mode=reduce-overhead,optimizer=fused"
_CAPTIONS = f"{_GRAPHS},group_window=100,attention=unmasked"
_NEXT = {
    "cuDNN attention": _ATTENTION["cuDNN attention"],
    "bf16 residual": added("workload.residual=autocast"),
    "merged q, k, v": added("workload.qkv=merged"),
}
_ALL_NEXT = Lever({name: value for lever in _NEXT.values() for name, value in lever.changes.items()})
_OF_CAPTIONS = {
    "cuDNN attention, bf16 residual, merged q, k, v": _ALL_NEXT,
    **_NEXT,
    "CUDA graphs": _COMPILED["CUDA graphs"],
    "unmasked": without(attention=None),
    "grouped captions": without(group_window=None),
    "fused optimizer": _COMPILED["fused optimizer"],
}
JOBS: Mapping[str, Job] = {
    "gpt2": Job(
        "gpt2",
        "small",
        f"scope=full,{_GRAPHS}",
        {
            **_COMPILED,
            "whole model in one piece": without(scope="regional"),
            "compiling": without(scope="eager", mode=None, dynamic=None),
            **_ATTENTION,
            **_INDUCTOR,
            "auto_chunker": added("inductor.auto_chunker.enable=on"),
        },
    ),
    "resnet": Job(
        "resnet", "resnet50", f"scope=full,memory_format=channels_last,{_GRAPHS}", {**_OF_IMAGES, **_INDUCTOR}
    ),
    "segmentation": Job(
        "segmentation",
        "b0",
        f"scope=full,memory_format=channels_last,{_GRAPHS}",
        {**_OF_IMAGES, **_ATTENTION, **_INDUCTOR},
    ),
    # Compiles in 24 s where the whole model takes 93, so a budget has room for more levers. Blocks have nearly all kernels.
    "captioning": Job(
        "captioning",
        "base",
        f"scope=regional,num_buckets=3,{_CAPTIONS}",
        {
            **_OF_CAPTIONS,
            "whole model in one piece": Lever({"scope": "full"}),
            "three buckets": without(num_buckets=None, dynamic="mark"),
            **_INDUCTOR,
        },
    ),
    "captioning-full": Job(
        "captioning",
        "base",
        f"scope=full,dynamic=mark,{_CAPTIONS},inductor.triton.mix_order_reduction=off",
        {
            "cuDNN attention, bf16 residual, merged q, k, v": _ALL_NEXT,
            "the same in three buckets with mix-order reduction": Lever(
                {**_ALL_NEXT.changes, "dynamic": None, "num_buckets": 3, "inductor.triton.mix_order_reduction": None}
            ),
            **{name: lever for name, lever in _OF_CAPTIONS.items() if lever is not _ALL_NEXT},
            "whole model in one piece": without(scope="regional"),
            **{name: lever for name, lever in _INDUCTOR.items() if "mix-order" not in name and "split size" not in name},
        },
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Measure what each lever gives by itself, or print the table of what was measured."""

    job: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="JOB")] = None
    """gpt2, resnet, segmentation, captioning (blocks, which compile fast), or captioning-full."""
    output: Path | None = None
    """The sweep's folder. A folder with records is continued."""
    budget_s: float = 520.0
    """Seconds for all trials."""
    size: str | None = None
    """Another size of the workload, such as tiny."""
    levers: tuple[str, ...] = ()
    """Names of the levers to measure, in this order; by default all."""
    table: tuple[Path, ...] = ()
    """Folders to print the table of instead of measuring."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a job that this machine can run."""

    best: CompileSettings
    others: Mapping[str, CompileSettings]  # the other setting of each lever, in the order to measure
    excluded: Mapping[str, str]  # levers that cannot run here, with the reason


def plan_of(job: Job, target: Target, names: Sequence[str] = ()) -> Plan:
    """Resolves the best setting and its changes for a workload and machine.

    Args:
        job: The job.
        target: What settings must fit.
        names: Levers to measure, in this order; empty for all.

    Raises:
        ConfigError: The job has no lever of such a name, or the best setting cannot run here.
    """
    for name in names:
        if name not in job.levers:
            raise ConfigError(f"--levers: {job.workload} has no lever {name!r}; {suggest(name, job.levers)}")
    fields = dict(parse_pairs(job.best))
    if not target.has_gpu:  # a dry run, without CUDA graphs
        fields.pop("mode", None)
    best = _chosen(fields, target)
    if isinstance(best, str):
        raise ConfigError(f"the best setting of {job.workload} cannot run here: {best}")
    others: dict[str, CompileSettings] = {}
    excluded: dict[str, str] = {}
    for name in names or job.levers:
        changed = {key: value for key, value in {**fields, **job.levers[name].changes}.items() if value is not None}
        other = _chosen(changed, target)
        if isinstance(other, str):
            excluded[name] = other
        elif other == best:
            excluded[name] = "the same as the best setting here"
        else:
            others[name] = other
    return Plan(best, others, excluded)


def _chosen(fields: Mapping[str, Any], target: Target) -> CompileSettings | str:
    """Returns the settings, or why they cannot run here."""
    choice = choose([fields], target)
    return choice.settings[0] if choice.settings else choice.excluded[0].reason


def rows_of(job: Job, plan: Plan, trials: Sequence[TrialRecord]) -> Iterator[str]:
    """Yields the Markdown rows of a job, one for each lever whose other setting was measured.

    Args:
        job: The job.
        plan: Its settings.
        trials: The sweep's records; of several of one setting, the last counts.
    """
    by_key = {trial.settings_key: trial for trial in trials}
    best = by_key.get(plan.best.key)
    for name, other in plan.others.items():
        trial = by_key.get(other.key)
        if best is None or trial is None:
            continue
        pair = (best, trial) if job.levers[name].is_taken_away else (trial, best)
        cells = [name, *map(_rate, pair), _ratio(*pair), _both(pair, _memory), _both(pair, _compile_s), _remarks(pair)]
        yield f"| {' | '.join(cells)} |"


HEADINGS = (
    "| lever | with it, samples/s | without it | gives | peak GiB, with and without | compile s, with and without | remarks |",
    "|---|--:|--:|--:|--:|--:|---|",
)


def _rate(trial: TrialRecord) -> str:
    return "–" if trial.samples_per_s is None else f"{trial.samples_per_s:,.{0 if trial.samples_per_s >= 100 else 1}f}"


def _ratio(one: TrialRecord, other: TrialRecord) -> str:
    """Returns the ratio of two rates with its 95 % interval, from the trials' own intervals taken as independent."""
    if not one.samples_per_s or not other.samples_per_s:
        return "–"
    ratio = one.samples_per_s / other.samples_per_s
    spread = math.hypot(*(_deviation(trial) for trial in (one, other)))
    return f"{ratio:.3f}× ({ratio / math.exp(spread):.3f}–{ratio * math.exp(spread):.3f})"


def _deviation(trial: TrialRecord) -> float:
    """Returns half of the width of the interval of a rate's logarithm."""
    low, high = trial.samples_per_s_ci95 or (0.0, 0.0)
    return math.log(high / low) / 2 if 0 < low <= high < math.inf else 0.0


def _memory(trial: TrialRecord) -> str:
    return "–" if trial.peak_memory_bytes is None else f"{trial.peak_memory_bytes / _GIB:.1f}"


def _compile_s(trial: TrialRecord) -> str:
    return "–" if trial.compile_s is None else f"{trial.compile_s:.1f}"


def _both(pair: tuple[TrialRecord, TrialRecord], figure: Any) -> str:
    return ", ".join(map(figure, pair))


def _remarks(pair: tuple[TrialRecord, TrialRecord]) -> str:
    told = []
    for trial, which in zip(pair, ("with", "without"), strict=True):
        if trial.status is not Status.OK:
            told.append(f"{which}: `{trial.label or trial.status}`")
        elif trial.stable is False:
            told.append(f"{which}: noisy")
    return "; ".join(told)


def target_of(workload: str, size: str, *, has_gpu: bool) -> Target:
    """Returns what settings of this workload must fit."""
    return Target.of(describe(load_workload(workload)(size, 0)), has_gpu=has_gpu)


def main() -> int:
    return command_line.main_of(Options, _run, PROG)()


def _run(options: Options) -> int:
    if options.table:
        for folder in options.table:
            _print_table(folder)
        return 0
    if options.job is None or options.job not in JOBS:
        raise ConfigError(f"there is no job {options.job!r}; use one of {', '.join(JOBS)}")
    if options.output is None:
        raise ConfigError("--output is missing: name the folder for the records")
    job = JOBS[options.job]
    size = options.size or job.size
    plan = plan_of(job, target_of(job.workload, size, has_gpu=torch.cuda.is_available()), options.levers)
    for name, reason in plan.excluded.items():
        print(f"left out: {name}: {reason}", flush=True)
    settings = [plan.best.key, *(other.key for other in plan.others.values())]
    words = ["--workload", job.workload, "--size", size, "--runner", "local", "--cache-store", "none", "--no-warm-start"]
    words += ["--no-confirm", "--time-budget-s", str(options.budget_s), "--output", str(options.output), "--settings", *settings]
    if records.read(options.output):
        words.append("--resume")
    command = [sys.executable, "-m", "orchestrator.sweep", *words]
    print(shlex.join(command), flush=True)
    code = subprocess.run(command, check=False).returncode
    _print_table(options.output)
    return code


def _print_table(folder: Path) -> None:
    """Prints the table of a folder's records, for the job whose best setting is among them."""
    trials = records.read(folder)
    if not trials:
        raise ConfigError(f"{folder} has no records; name the folder of a sweep of {PROG}")
    done = {trial.settings_key for trial in trials}
    for name, job in JOBS.items():
        if trials[0].workload != job.workload:
            continue
        target = target_of(job.workload, trials[0].size, has_gpu=trials[0].device != "cpu")
        plan = plan_of(job, target)
        if plan.best.key in done:
            (best,) = [trial for trial in trials if trial.settings_key == plan.best.key][-1:]
            print(f"\n{name}, {best.size}, on {best.device}; the best setting, `{plan.best.key}`: {_rate(best)} samples/s\n")
            print("\n".join([*HEADINGS, *rows_of(job, plan, trials)]))


if __name__ == "__main__":
    sys.exit(main())
