"""`python -m analysis.recommend DIR --steps 200000`: which setting to train a job with, and what that saves.

The setting with the shortest expected total of starts and steps is recommended, among those that keep all constraints. It is
compared with the best eager setting and with `torch.compile(model)` as it comes, by totals of the same job.

The recommended setting by length of the job as a table for a text. Markdown; no text of a record is mark-up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import tyro

from analysis.choose.break_even import Costs, Job, Reign, Starts, costs, is_plain, reigns, samples_per_step
from analysis.choose.pareto import assured, is_noisy_trial
from analysis.choose.uncertainty import chance
from analysis.command_line import SweepFolder, amount, count, is_number
from analysis.formatting import MISSING, cell, duration, figure, number, percent, span, whole
from analysis.load import load
from compile_sweep import command_line
from compile_sweep.command_line import Flag, Repeated, Several
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Constraint
from compile_sweep.schema.settings import Scope

PROG = "python -m analysis.recommend"

USUAL_STEPS = (1_000, 10_000, 100_000, 1_000_000)

EQUAL = 0.05
"""A setting that is the shortest with at least this probability cannot be told apart from the recommended one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A sweep and the job that a setting is wanted for."""

    folder: SweepFolder
    """The folder a sweep wrote."""
    steps: Annotated[tuple[str, ...], Several(is_number), tyro.conf.arg(metavar="N …")] = ()
    """Length of the job, such as 200000, 200k or 1M."""
    restarts: Annotated[str, tyro.conf.arg(metavar="N")] = "0"
    """Times it is begun again."""
    nodes: Annotated[str, tyro.conf.arg(metavar="N")] = "1"
    """Nodes it runs on."""
    gpus_per_node: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """GPUs of each; by default as many as a trial had workers."""
    starts: Starts = Starts.COLD
    """What caches its starts find."""
    start_overhead_s: Annotated[str, tyro.conf.arg(metavar="S")] = "0"
    """Seconds of each start whatever the setting."""
    price_per_gpu_hour: Annotated[str | None, tyro.conf.arg(metavar="PRICE")] = None
    """Also say what it costs."""
    constraint: Annotated[tuple[str, ...], Repeated, tyro.conf.arg(metavar="BOUND")] = ()
    """A bound the setting must keep, such as compile_s<=120 or peak_memory_bytes<=40GiB; may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(JobOptions):
    """Say which setting to train a job with, and what that saves."""

    markdown: Flag = False
    """Print it as a table for a text instead."""


class Gain(NamedTuple):
    """What the recommended setting saves against another one, over the whole job."""

    trial: pd.Series
    """The other's row."""
    saved_s: float
    """Negative if it costs time."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    share: float
    """Of the other's total."""
    saved_cost: float | None
    """In the price's currency; None without a price."""


class Recommendation(NamedTuple):
    """The setting for a job, and why."""

    job: Job
    samples_per_step: int
    """Of one worker."""
    trial: pd.Series
    """Its row of `costs.table`."""
    costs: Costs
    """Of every setting that keeps the constraints."""
    equals: pd.DataFrame
    """Rows of others that might as well be the shortest, the most probable first."""
    over_eager: Gain | None
    """Against the best eager setting; None if none is usable, or it is the one recommended."""
    over_plain: Gain | None
    """Against `torch.compile(model)` as it comes, likewise."""
    reigns: list[Reign]
    """The shortest setting for every length of such a job."""
    excluded: dict[str, int]
    """Constraint → usable settings that do not keep it."""


def recommend(
    df: pd.DataFrame, job: Job, *, constraints: Sequence[Constraint] = (), attempts: pd.DataFrame | None = None
) -> Recommendation:
    """The setting under which the job takes least, with what it gains.

    Args:
        df: trials as `load` returns them.
        job: the job.
        constraints: bounds the setting must keep; those it is compared with need not.
        attempts: what `load` returns with `all_attempts`, to see how settings scatter between runs.

    Raises:
        ConfigError: no trial is usable, or none keeps the constraints.
    """
    every = costs(df, job, attempts=attempts)
    kept, excluded = _within(every.table, constraints)
    allowed = every.table[kept]
    draws = every.draws[:, kept]
    shortest = np.bincount(draws.argmin(axis=1), minlength=len(allowed)) / len(draws)
    allowed = allowed.assign(best_probability=shortest)
    chosen = allowed.iloc[0]
    others = allowed.iloc[1:]
    return Recommendation(
        job=job,
        samples_per_step=samples_per_step(every.table),
        trial=chosen,
        costs=every._replace(table=allowed, draws=draws),
        equals=others[others["best_probability"] >= EQUAL].sort_values("best_probability", ascending=False, kind="stable"),
        over_eager=_gain(every, chosen, (every.table["scope"] == Scope.EAGER).to_numpy(dtype=bool), job),
        over_plain=_gain(every, chosen, _as_it_comes(every.table), job),
        reigns=reigns(allowed),
        excluded=excluded,
    )


def sentences(found: Recommendation) -> list[str]:
    """The recommendation in words, the most important first."""
    trial, job = found.trial, found.job
    total = f"{duration(trial['total_s'])} (95 %: {_span(trial['total_s_low'], trial['total_s_high'])})"
    money = "" if number(trial["cost"]) is None else f", {figure(trial['cost'])} at {figure(job.price_per_gpu_hour)} a GPU-hour"
    said = [
        f"For {describe(job, found.samples_per_step)}: “{trial['settings_label']}”.",
        f"It takes {total}, of it {duration(trial['fixed_s'])} for starting and compiling; "
        f"{figure(trial['gpu_hours'])} GPU-hours{money}.",
    ]
    if not trial["starts_known"] and job.starts is Starts.COLD:
        said.append("Its cold compile time is an estimate: it was measured with warm caches only.")
    elif not trial["starts_known"]:
        said.append("Its warm start was not measured; that of a cold one stands in.")
    for gain, other in ((found.over_eager, "the best eager setting"), (found.over_plain, "torch.compile(model) as it comes")):
        if gain is not None:
            said.append(_gained(gain, other))
    if found.over_eager is None and trial["scope"] != Scope.EAGER:
        said.append("What it gains over eager is not known: no eager trial is usable.")
    if found.over_plain is None and not _as_it_comes(trial.to_frame().T)[0]:
        said.append("What it gains over torch.compile(model) as it comes is not known: no such trial is usable.")
    if is_noisy_trial(trial):
        rates = span(trial["samples_per_s_low"], trial["samples_per_s_high"], "samples/s")
        known = number(trial["samples_per_s_low"]) is not None
        said.append(f"Its steps were noisy: its throughput may be {rates}." if known else "Its steps were noisy.")
    said.append(_confidence(found))
    said += [
        f"{left} usable setting{' does' if left == 1 else 's do'} not keep {constraint}."
        for constraint, left in found.excluded.items()
        if left
    ]
    if left_out := found.costs.left_out:
        trials = "1 usable trial is" if left_out == 1 else f"{left_out} usable trials are"
        said.append(f"{trials} left out: of another environment, number of workers or input pipeline, and not to be compared.")
    return said


def describe(job: Job, samples: int) -> str:
    """The job in words."""
    starts = {
        Starts.COLD: "every start cold",
        Starts.FIRST_COLD: "the first start cold and restarts warm",
        Starts.WARM: "every start warm",
    }[job.starts]
    restarts = f"{job.restarts} restart{'' if job.restarts == 1 else 's'}, " if job.restarts else ""
    nodes = f"{job.nodes} nodes, " if job.nodes > 1 else ""
    return f"{whole(job.steps)} steps of {samples} samples a worker, {nodes}{restarts}{starts}"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """The command; returns its exit code: 0, or 2 for what it cannot work with.

    Args:
        arguments: of the command line, by default this process's.
        prog: how a person calls it.
    """
    return command_line.run_with(Options, _command, prog, arguments)


def job_of(told: JobOptions, steps: int) -> Job:
    """The job that options describe, of so many steps.

    Raises:
        ConfigError: a number that no job has.
    """
    gpus, price = told.gpus_per_node, told.price_per_gpu_hour
    return Job(
        steps=steps,
        restarts=count(told.restarts),
        nodes=count(told.nodes),
        gpus_per_node=None if gpus is None else count(gpus),
        starts=told.starts,
        start_overhead_s=amount(told.start_overhead_s),
        price_per_gpu_hour=None if price is None else amount(price),
    )


def trials_of(told: JobOptions) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The trials and all attempts that options speak of."""
    return load(told.folder), load(told.folder, all_attempts=True)


def _command(told: Options) -> int:
    lengths = [count(text) for text in told.steps] if told.steps else list(USUAL_STEPS)
    jobs = [job_of(told, steps) for steps in lengths]
    constraints = [Constraint.parse(text) for text in told.constraint]
    df, attempts = trials_of(told)
    found = [recommend(df, job, constraints=constraints, attempts=attempts) for job in jobs]
    if told.markdown:
        print(recommendation_markdown(found), end="")
        return 0
    for one in found:
        first, *others = sentences(one)
        print(first, *(f"  {sentence}" for sentence in others), f"  --settings {one.trial['settings_key']!r}", "", sep="\n")
    print("The shortest by length of the job:", *(f"  {line}" for line in by_length(found[0])), sep="\n")
    return 0


def by_length(found: Recommendation) -> list[str]:
    """A line for each range of job lengths and the setting that is the shortest in it."""
    lines = []
    for reign in found.reigns:
        until = "" if reign.to_steps is None else f" to {whole(reign.to_steps)}"
        price = found.job.price_per_gpu_hour
        gpus = found.job.gpus(int(reign.trial["num_workers"]))
        cost = "" if price is None else f", {figure(reign.from_s * gpus * price / 3600)}"
        after = "" if reign.from_steps == 1 else f" ({duration(reign.from_s)}{cost})"
        lines.append(f"from {whole(reign.from_steps)}{after}{until} steps: “{reign.trial['settings_label']}”")
    return lines


def _within(table: pd.DataFrame, constraints: Sequence[Constraint]) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
    """Which rows keep every constraint, and how many break each; what was not measured breaks it."""
    kept = np.ones(len(table), dtype=np.bool_)
    excluded = {}
    for constraint in constraints:
        has_column = constraint.name in table
        told = assured(table, constraint.name, at_most=constraint.is_upper) if has_column else np.full(len(table), np.nan)
        values = [number(value) for value in told]
        keeps = np.array([value is not None and constraint.excess(value) <= 0 for value in values], dtype=np.bool_)
        if not keeps.any():
            known = [value for value in values if value is not None]
            nearest = f"the nearest has {min(known, key=constraint.excess):.4g}" if known else "none has that figure"
            raise ConfigError(f"no usable setting keeps the constraint {constraint}; {nearest}")
        excluded[str(constraint)] = int((~keeps).sum())
        kept &= keeps
    if not kept.any():
        raise ConfigError(f"no usable setting keeps all constraints at once ({', '.join(excluded)}); relax one of them")
    return kept, excluded


def _as_it_comes(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which rows are `torch.compile(model)` with nothing said."""
    return np.array([is_plain(str(key)) for key in table["settings_key"]], dtype=np.bool_)


def _gain(every: Costs, chosen: pd.Series, among: npt.NDArray[np.bool_], job: Job) -> Gain | None:
    """Against the shortest of some rows; None if there are none, or the chosen one is one of them and the shortest."""
    rows = every.table[among]
    if rows.empty or rows.index[0] == chosen.name:
        return None
    other = rows.iloc[0]
    at, mine = (every.table.index.get_loc(row.name) for row in (other, chosen))
    low, high = np.quantile(every.draws[:, at] - every.draws[:, mine], [0.025, 0.975])
    saved = float(other["total_s"] - chosen["total_s"])
    costs_known = job.price_per_gpu_hour is not None
    return Gain(
        trial=other, saved_s=saved, low=float(low), high=float(high), share=saved / float(other["total_s"]),
        saved_cost=float(other["cost"] - chosen["cost"]) if costs_known else None,
    )  # fmt: skip


def _gained(gain: Gain, other: str) -> str:
    name = f"{other} (“{gain.trial['settings_label']}”, {duration(gain.trial['total_s'])})"
    money = "" if gain.saved_cost is None else f", {figure(abs(gain.saved_cost))} in money"
    span = f"95 %: {_span(gain.low, gain.high)}"
    if gain.saved_s < 0:
        return f"Against {name} it loses {duration(-gain.saved_s)} ({span}), {percent(-gain.share)}{money}."
    noise = "" if gain.low > 0 else "; that may be noise"
    return f"It saves {duration(gain.saved_s)} ({span}), {percent(gain.share)}{money}, against {name}{noise}."


def _confidence(found: Recommendation) -> str:
    """How certain it is that no other setting takes less."""
    certain = f"That it takes least of {len(found.costs.table)} settings is {chance(found.trial['best_probability'])} probable"
    if found.equals.empty:
        return f"{certain}."
    names = [f"“{row['settings_label']}” ({chance(row['best_probability'])})" for _, row in found.equals.iterrows()]
    return f"{certain}; it cannot be told apart from {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}."


def _span(low: object, high: object) -> str:
    return f"{_signed(low)} to {_signed(high)}"


def _signed(seconds: object) -> str:
    value = number(seconds)
    return f"−{duration(-value)}" if value is not None and value < 0 else duration(value)


def recommendation_markdown(found: Sequence[Recommendation]) -> str:
    """A row for each job, then a line for each range of lengths with the setting that is the shortest in it.

    Args:
        found: one or more, of jobs that differ in their length alone.
    """
    has_price = any(number(one.trial["cost"]) is not None for one in found)
    headings = [
        "steps",
        "setting",
        "total (95 %)",
        "of it starts",
        "probable",
        "against the best eager",
        "against `torch.compile(model)`",
    ]
    headings += ["costs"] if has_price else []
    lines = [headings, ["--:", "---", *["--:"] * (len(headings) - 2)]]
    for one in found:
        trial = one.trial
        total = f"{duration(trial['total_s'])} ({duration(trial['total_s_low'])} to {duration(trial['total_s_high'])})"
        row = [whole(one.job.steps), cell(str(trial["settings_label"])), total, duration(trial["fixed_s"])]
        row += [chance(float(trial["best_probability"])), _gain_cell(one.over_eager), _gain_cell(one.over_plain)]
        lines.append([*row, *([figure(trial["cost"])] if has_price else [])])
    flips = [f"- {cell(line)}" for line in by_length(found[0])]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in lines), "", *flips]) + "\n"


def _gain_cell(gain: Gain | None) -> str:
    if gain is None:
        return MISSING
    sign = "−" if gain.saved_s > 0 else "+"
    return f"{sign}{duration(abs(gain.saved_s))}, {sign}{100 * abs(gain.share):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
