"""`python -m analysis.recommend DIR --steps 200000`: which setting to train a job with, and what that saves.

There are three answers: use a setting, stay with what is run today (the unchanged script, or plain eager), or cannot tell, with
what would tell. They are based on the total of starts and steps of one job, for the settings that meet all constraints.

`--markdown` prints the recommended setting by length of the job as a table. Text from records is escaped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import tyro

from analysis.choose.break_even import (
    Costs,
    Job,
    Reign,
    Starts,
    baseline_place,
    costs,
    has_tried_others,
    lines_of,
    reigns,
    samples_per_step,
)
from analysis.choose.decision import Decision, Line, Outcome, decide
from analysis.choose.pareto import assured, is_noisy_trial
from analysis.choose.uncertainty import Attempts, chance
from analysis.command_line import SweepFolder, amount, count, is_number, say
from analysis.decision_text import (
    SENTENCES,
    STARTS,
    TILES,
    memory_words,
    on_batches,
    saving_words,
    sentence_names,
    words_of_baseline,
)
from analysis.formatting import MISSING, cell, duration, durations, figure, number, span, text, whole
from analysis.load import load_for_analysis
from analysis.training_command import training_command
from compile_sweep import command_line
from compile_sweep.command_line import Flag, Repeated, Several
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Constraint

PROG = "python -m analysis.recommend"

_LENGTHS = (1_000, 10_000, 100_000, 1_000_000)

VERDICTS = {Outcome.USE: "use", Outcome.STAY: "stay", Outcome.UNCLEAR: "cannot tell"}

EQUAL = 0.05  # probability of being the fastest from which a setting cannot be told apart from the recommended one


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A sweep and the job that a setting is wanted for."""

    folder: SweepFolder
    """The folder a sweep wrote."""
    steps: Annotated[tuple[str, ...], Several(is_number), tyro.conf.arg(metavar="N …")] = ()
    """Length of the job, such as 200000, 200k or 1M."""
    restarts: Annotated[str, tyro.conf.arg(metavar="N")] = "0"
    """Number of restarts, after failures or preemptions."""
    nodes: Annotated[str, tyro.conf.arg(metavar="N")] = "1"
    """Number of nodes."""
    gpus_per_node: Annotated[str | None, tyro.conf.arg(metavar="N")] = None
    """GPUs per node; by default as many as a trial had workers."""
    starts: Starts = Starts.COLD
    """What the job's starts find in compile caches."""
    start_overhead_s: Annotated[str, tyro.conf.arg(metavar="S")] = "0"
    """Seconds that each start takes under any setting: scheduling, loading a checkpoint."""
    price_per_gpu_hour: Annotated[str | None, tyro.conf.arg(metavar="PRICE")] = None
    """Price of a GPU-hour; the cost of the job is then shown, too."""
    constraint: Annotated[tuple[str, ...], Repeated, tyro.conf.arg(metavar="BOUND")] = ()
    """A limit the setting must meet, such as compile_s<=120 or peak_memory_bytes<=40GiB; may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(JobOptions):
    """Say which setting to train a job with, and what that saves."""

    markdown: Flag = False
    """Print a Markdown table instead."""


class Tile(NamedTuple):
    """A figure, its caption, and the evidence."""

    caption: str
    figure: str
    under: str


class Recommendation(NamedTuple):
    """The setting for a job, and why."""

    job: Job
    samples_per_step: int
    """Samples per step of one worker."""
    trial: pd.Series
    """Row of the setting to train with: the baseline's if the answer is to stay, otherwise `about`."""
    about: pd.Series
    baseline: pd.Series | None
    """Row of what is run today, which may break the constraints; None if no eager trial is usable."""
    decision: Decision
    lines: list[Line]
    costs: Costs
    equals: pd.DataFrame
    """Rows of other settings that might be the fastest, the most probable first."""
    reigns: list[Reign]
    """The fastest setting for every length of such a job."""
    excluded: dict[str, int]


def recommend(
    df: pd.DataFrame, job: Job, *, constraints: Sequence[Constraint] = (), attempts: Attempts | None = None
) -> Recommendation:
    """Returns the setting with which the job is fastest, with its gain.

    Args:
        df: Trials as `load` returns them.
        job: The job.
        constraints: Bounds that the setting must meet; those it is compared with need not.
        attempts: Result of `load` with `all_attempts`, of one or several sweeps, to see how settings scatter between runs.

    Raises:
        ConfigError: No trial is usable, or none meets the constraints.
    """
    every = costs(df, job, attempts=attempts)
    kept, excluded = _within(every.table, constraints)
    allowed = every.table[kept]
    draws = every.draws[:, kept]
    shortest = np.bincount(draws.argmin(axis=1), minlength=len(allowed)) / len(draws)
    allowed = allowed.assign(best_probability=shortest)
    lines = lines_of(every.table)
    found = decide(lines, baseline_place(every.table), job.steps, allowed=list(kept), tried_others=has_tried_others(df))
    about, baseline = (None if place is None else every.table.iloc[place] for place in (found.setting, found.baseline))
    about = baseline if about is None else about
    assert about is not None, "a table of costs has a row"
    chosen = baseline if baseline is not None and found.outcome is Outcome.STAY else about
    others = allowed.drop(index=about.name)
    return Recommendation(
        job=job,
        samples_per_step=samples_per_step(every.table),
        trial=chosen,
        about=about,
        baseline=baseline,
        decision=found,
        lines=lines,
        costs=every._replace(table=allowed, draws=draws),
        equals=others[others["best_probability"] >= EQUAL].sort_values("best_probability", ascending=False, kind="stable"),
        reigns=reigns(allowed),
        excluded=excluded,
    )


def verdict(found: Recommendation) -> list[str]:
    """Says what to do, why, and what would tell, in the sentences that also end a sweep and stand in its report and `best.py`."""
    blanks = _blanks(found)
    said = [SENTENCES[name].format(**blanks) for name in sentence_names(found.decision)]
    batches = on_batches(found.about, found.baseline)
    return [*said, batches] if batches and found.decision.outcome is not Outcome.STAY else said


def tiles(found: Recommendation) -> list[Tile]:
    """Returns gain, total, memory and certainty of the setting at a glance; empty if the answer is to stay."""
    if found.decision.saving is None or found.decision.outcome is Outcome.STAY:
        return []
    blanks = _blanks(found)
    return [Tile(caption, value.format(**blanks), under.format(**blanks)) for caption, (value, under) in TILES.items()]


def _blanks(found: Recommendation) -> dict[str, str]:
    """Returns the values of the placeholders in `SENTENCES` and `TILES`."""
    about, baseline = found.about, found.baseline
    words, peak = "", None
    if baseline is not None:
        words = words_of_baseline(str(baseline["settings_key"]), str(baseline["setting_name"]))
        peak = number(baseline["peak_memory_bytes"])
    return {
        "setting": str(about["setting_name"]),
        "baseline": words,
        "job": describe(found.job, found.samples_per_step),
        **saving_words(found.decision, found.lines, found.job.steps),
        **memory_words(number(about["peak_memory_bytes"]), peak, words),
    }


def sentences(found: Recommendation) -> list[str]:
    """Returns the recommendation in words, the most important sentence first."""
    trial, job = found.trial, found.job
    total, low, high = durations(trial["total_s"], trial["total_s_low"], trial["total_s_high"])
    money = "" if number(trial["cost"]) is None else f", {figure(trial['cost'])} at {figure(job.price_per_gpu_hour)} a GPU-hour"
    gpu_time = "" if text(trial["device"]) == "cpu" else f"; {figure(trial['gpu_hours'])} GPU-hours{money}"
    said = [
        *verdict(found),
        f"“{trial['setting_name']}” takes {total} (95%: {low} to {high}), including {duration(trial['fixed_s'])} for starting "
        f"and compiling{gpu_time}.",
    ]
    if not trial["starts_known"] and job.starts is Starts.COLD:
        said.append("Its cold compile time is an estimate: it was measured with warm caches only.")
    elif not trial["starts_known"]:
        said.append("Its warm start was not measured, so its cold start is used instead.")
    if is_noisy_trial(trial):
        rates = span(trial["samples_per_s_low"], trial["samples_per_s_high"], "samples/s")
        known = number(trial["samples_per_s_low"]) is not None
        said.append(f"Its steps were noisy: its throughput may be {rates}." if known else "Its steps were noisy.")
    said += _equals(found)
    said += [
        f"{left} usable setting{' does' if left == 1 else 's do'} not meet {constraint}."
        for constraint, left in found.excluded.items()
        if left
    ]
    if left_out := found.costs.left_out:
        trials = "1 usable trial is" if left_out == 1 else f"{left_out} usable trials are"
        said.append(f"{trials} left out, because the environment, number of workers or input pipeline differs.")
    return said


def describe(job: Job, samples: int) -> str:
    """Describes the job in words."""
    restarts = f"{job.restarts} restart{'' if job.restarts == 1 else 's'}, " if job.restarts else ""
    nodes = f"{job.nodes} nodes, " if job.nodes > 1 else ""
    return f"{whole(job.steps)} steps of {samples} samples a worker, {nodes}{restarts}{STARTS[job.starts]}"


def job_of(told: JobOptions, steps: int) -> Job:
    """Returns the job that the options describe, with this many steps; raises ConfigError for a number out of range."""
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


def _command(told: Options) -> int:
    lengths = [count(text) for text in told.steps] if told.steps else list(_LENGTHS)
    jobs = [job_of(told, steps) for steps in lengths]
    constraints = [Constraint.parse(text) for text in told.constraint]
    df, attempts = load_for_analysis(told.folder)
    found = [recommend(df, job, constraints=constraints, attempts=attempts) for job in jobs]
    if told.markdown:
        print(recommendation_markdown(found), end="")
        return 0
    for one in found:
        first, *others = sentences(one)
        command = training_command(told.folder, one.trial)
        whole = f"In full: --settings {one.trial['settings_key']!r}" if command is None else f"To train with it: {command}"
        say(first, *(f"  {sentence}" for sentence in others))
        print(f"  {whole}\n")  # to copy as one line
    say("Fastest setting by length of the job:", *(f"  {line}" for line in by_length(found[0])))
    return 0


def by_length(found: Recommendation) -> list[str]:
    """Returns a line per range of job lengths, with the setting that is the fastest in it."""
    lines = []
    for reign in found.reigns:
        price, gpus = found.job.price_per_gpu_hour, found.job.gpus(int(reign.trial["num_workers"]))
        cost = "" if price is None else f", {figure(reign.from_s * gpus * price / 3600)}"
        lines.append(f"{lengths_of(reign, cost)}: “{reign.trial['setting_name']}”")
    return lines


def lengths_of(reign: Reign, cost: str = "") -> str:
    """Describes the range of job lengths in which a setting is the fastest."""
    until = "" if reign.to_steps is None else f" to {whole(reign.to_steps)}"
    if reign.from_steps > 1:
        return f"from {whole(reign.from_steps)} steps ({duration(reign.from_s)}{cost}){until}"
    return "at any length" if reign.to_steps is None else f"up to {whole(reign.to_steps)} steps"


def _within(table: pd.DataFrame, constraints: Sequence[Constraint]) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
    """Tells which rows meet every constraint, and how many break each; a missing figure breaks it."""
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
            raise ConfigError(f"no usable setting meets the constraint {constraint}; {nearest}")
        excluded[str(constraint)] = int((~keeps).sum())
        kept &= keeps
    if not kept.any():
        raise ConfigError(f"no usable setting meets all constraints at once ({', '.join(excluded)}); relax one of them")
    return kept, excluded


def _equals(found: Recommendation) -> list[str]:
    if found.equals.empty or found.decision.outcome is Outcome.STAY:
        return []
    names = [f"“{label}”" for label in found.equals["setting_name"]]
    return [f"It cannot be told apart from {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}."]


def recommendation_markdown(found: Sequence[Recommendation]) -> str:
    """Returns a table row per job, of jobs that differ in length only, then a line per range with its fastest setting."""
    has_price = any(number(one.trial["cost"]) is not None for one in found)
    headings = ["steps", "verdict", "setting", "total (95%)", "starting and compiling", "saves (95%)", "probability of a gain"]
    headings += ["costs"] if has_price else []
    lines = [headings, ["--:", "---", "---", *["--:"] * (len(headings) - 3)]]
    for one in found:
        row, saving = one.about, one.decision.saving
        total = _with_range(row["total_s"], row["total_s_low"], row["total_s_high"])
        nearest = "nearest: " if one.decision.outcome is Outcome.STAY and one.decision.setting is not None else ""
        setting = f"{nearest}{cell(str(row['setting_name']))}"
        words = [whole(one.job.steps), VERDICTS[one.decision.outcome], setting, total]
        words.append(duration(row["fixed_s"]))
        words.append(MISSING if saving is None else _with_range(saving.saved_s, saving.low_s, saving.high_s))
        words.append(MISSING if saving is None else chance(saving.probability))
        lines.append([*words, *([figure(row["cost"])] if has_price else [])])
    flips = [f"- {cell(line)}" for line in by_length(found[0])]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in lines), "", *flips]) + "\n"


def _with_range(seconds: float, low_s: float, high_s: float) -> str:
    return "{} ({} to {})".format(*durations(seconds, low_s, high_s))


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
