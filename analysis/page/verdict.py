"""Reasons not to trust a sweep's figures, in sentences, and a single trial's, in a word or two each.

Also lists the front for the report: each member's figures, its probability, and what cannot be told apart from it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.choose.pareto import (
    Summary,
    assured,
    is_noisy,
    is_noisy_trial,
    pareto_front,
    speedup_over_eager,
    speedup_over_plain_eager,
    standing,
    usable,
)
from analysis.choose.uncertainty import chance
from analysis.formatting import duration, figure, number, percent, span, text, times
from analysis.load import SweepInfo
from compile_sweep.schema.outcome import RIGHT_BUT_UNUSABLE, SCRIPT_PIPELINE, Status
from compile_sweep.schema.settings import Scope
from compile_sweep.schema.visible_text import counted

CLOCK_DRIFT_LIMIT = 0.02
"""Relative change of the clock within a trial from which it is worth mentioning: several times a good interval's width."""

UNMOVED_WIDTH = 0.01
"""Relative width of a step's interval below which the trial itself did not drift, whatever its eager reference did: eager
steps wait for a host that CUDA graphs need not wait for.
"""

DISAGREEMENT_LIMIT = 0.05
"""Relative difference, from which it is worth mentioning, between speedups over eager in another trial and in the same trial."""

UNUSED_GAIN = 1.05
"""Ratio over the fastest setting that counts from which one that does not is worth mentioning."""

REAL_PIPELINE = "real"

_ABOUT_LOG = "log "  # prefix of a finding about a trial's log; others are about what it computes


EAGER_WARM_UP_LIMIT_S = 20.0
"""Seconds of an eager warm-up beyond its steps that only a disturbed machine takes: loading kernels takes a few."""


class Remark(NamedTuple):
    """A remark and its meaning."""

    text: str
    meaning: str


def remarks(trial: pd.Series) -> list[Remark]:
    """Returns what is unusual about the trial's measurement; empty if nothing is."""
    return list(_remarks(trial))


def _remarks(trial: pd.Series) -> Iterator[Remark]:
    if is_noisy_trial(trial):
        width = _relative_width(trial)
        words = "noisy" if width is None else f"noisy ± {percent(width / 2)}"
        yield Remark(words, "the interval of its step time never became narrow enough; fronts use its worse end")
    if outliers := int(number(trial["outliers"]) or 0):
        words = counted(outliers, "outlier")
        yield Remark(words, "timed steps over 1.5 times their batch's median; they are kept in every figure")
    cut_logs = [one for one in trial["findings"] if one.startswith(_ABOUT_LOG)]
    changes = [one for one in trial["findings"] if one not in cut_logs]
    if changes and trial["pipeline"] != SCRIPT_PIPELINE:
        yield Remark("changes with the step", "; ".join(changes))
    if cut_logs:
        yield Remark("long log", "; ".join(cut_logs))
    slow_start = number(trial["compile_s"])
    if number(trial["graphs"]) == 0 and slow_start is not None and slow_start > EAGER_WARM_UP_LIMIT_S:
        took = f"yet the warm-up took {duration(slow_start)} longer than its steps: something slowed it down"
        yield Remark("machine disturbed", f"nothing was compiled, {took}")
    if number(trial["contended"]):
        pressure = number(trial["cpu_pressure"])
        waited = "" if pressure is None else f" ({percent(pressure)} of it waiting for a core)"
        yield Remark("contended", f"other trials slowed its compile{waited}: compile times are too long")
    if has_drifted(trial):
        words = f"drift {percent(trial['clock_drift'])}"
        yield Remark(words, "the same eager steps took that much longer at one time than at another")
    if text(trial["pipeline"]) == REAL_PIPELINE:
        waits = "" if number(trial["data_wait_share"]) is None else f", {percent(trial['data_wait_share'])} waiting"
        meaning = "throughput is with batches from the workload's loader, step times are with prepared ones"
        yield Remark(f"real pipeline{waits}", meaning)


def _relative_width(trial: pd.Series) -> float | None:
    """Returns the width of the interval of a trial's step time as a fraction of it; None if it is not known or bounded."""
    median, low, high = (number(trial[f"step_ms_median{end}"]) for end in ("", "_low", "_high"))
    return None if not median or low is None or high is None else (high - low) / median


def has_drifted(trial: pd.Series) -> bool:
    """Tells whether the machine's speed changed during the trial by enough to mention it."""
    drift, width = number(trial["clock_drift"]), _relative_width(trial)
    return drift is not None and drift > CLOCK_DRIFT_LIMIT and (width is None or width > UNMOVED_WIDTH)


def none_usable(df: pd.DataFrame, found: Summary) -> str:
    """Returns the text in place of a verdict if no trial is usable."""
    if df.empty:
        return "No trial has finished yet, so there is nothing to choose from."
    failed, infeasible, stopped = (found.counts[status] for status in (Status.FAILED, Status.INFEASIBLE, Status.STOPPED))
    outcomes = f"{infeasible} infeasible and {failed} failed"
    if stopped:
        outcomes = f"{infeasible} infeasible, {failed} failed and {stopped} stopped early"
    sentence = f"No trial is usable: of {sum(found.counts.values())}, {outcomes}."
    labels = standing(df)["label"].value_counts()
    why = ", ".join(f"{label} ({count} times)" if count > 1 else str(label) for label, count in labels.items())
    return f"{sentence} Why: {why}." if why else sentence


def cautions(df: pd.DataFrame, sweep: SweepInfo) -> list[str]:
    """Returns what a reader must know before trusting the figures; empty if there is nothing."""
    return [*_on_the_sweep(df, sweep), *unused_gains(df, "see the unusable trials"), *_on_the_measuring(df), *_refuted(df)]


def unused_gains(df: pd.DataFrame, reason: str | None = None) -> list[str]:
    """Names the fastest setting that does not count although its numbers are right, if it is faster than all that do.

    Args:
        df: The trials.
        reason: Text in place of the reason in its record.
    """
    counted = standing(df)
    usable_rates = assured(usable(counted, "samples_per_s"), "samples_per_s", at_most=True)
    unused = counted[counted["label"].isin(RIGHT_BUT_UNUSABLE) & counted["samples_per_s"].notna()]
    if not len(usable_rates) or unused.empty:
        return []
    ratios = assured(unused, "samples_per_s", at_most=False) / usable_rates.max()
    fastest = ratios.argmax()
    if ratios[fastest] < UNUSED_GAIN:
        return []
    trial = unused.iloc[fastest]
    gain = f"at least {ratios[fastest]:.2g} times as fast as any that counts, with numbers like eager's"
    return [f"{_name(trial)} ({_rate(trial)}) is {gain}, but is {trial['label']}: {reason or trial['reason']}"]


def _refuted(df: pd.DataFrame) -> list[str]:
    """Lists settings faster with warm caches than any compiled one that counts, and not usable when measured cold."""
    counted = standing(df)
    warm = usable(df.drop(index=counted.index), "samples_per_s")
    rates = assured(warm, "samples_per_s", at_most=False)
    faster = warm[rates > assured(_compiled(counted), "samples_per_s", at_most=False).max(initial=0.0)]
    sentences = []
    for _, trial in faster.iterrows():
        same = (counted["settings_key"] == trial["settings_key"]) & (counted["num_workers"] == trial["num_workers"])
        cold = counted[same.to_numpy(dtype=bool)].iloc[0]
        if cold["status"] != Status.OK:
            outcome = " ".join(filter(None, (str(cold["status"]), f"({label})" if (label := text(cold["label"])) else "")))
            sentences.append(
                f"{_name(trial)} reached {_rate(trial)} with warm caches, but does not count: measured cold, it is {outcome}."
            )
    return sentences


def _compiled(df: pd.DataFrame) -> pd.DataFrame:
    measured = usable(df, "samples_per_s")
    return measured[(measured["scope"] != Scope.EAGER).to_numpy(dtype=bool)]


def noisy_steps(df: pd.DataFrame) -> list[str]:
    """Returns sentences about settings with noisy steps that are on the front, or would be by their figures."""
    front, by_figures = pareto_front(df), pareto_front(df.assign(stable=True))
    on_it = front[is_noisy(front)]
    missed = df.loc[by_figures.index.difference(front.index)]
    missed = missed[is_noisy(missed)]
    notes = []
    if not on_it.empty:
        are = "is" if len(on_it) == 1 else "are"
        notes.append(f"{_intervals(on_it)} {are} on the front although noisy, judged by the low end of the interval.")
    if not missed.empty:
        notes.append(
            f"{_intervals(missed)} would be on the front by the measured figure, but not by the low end of the interval."
        )
    return [f"{' '.join(notes)} Measure again on an otherwise idle machine to know for sure."] if notes else []


def cache_faults(df: pd.DataFrame) -> list[str]:
    """Returns sentences about trials that could not restore or publish artifacts, or refused some; empty if there are none."""
    notes = []
    if not (faulty := df[df["cache_faults"].map(len) > 0]).empty:
        last = faulty["cache_faults"].iloc[-1]
        notes.append(f"{len(faulty)} of {len(df)} trials could not use the store of compile artifacts: {last[0].rstrip('.')}.")
    if not (refusing := df[df["cache_refused"].fillna(0) > 0]).empty:
        notes.append(
            f"{len(refusing)} of {len(df)} trials refused {int(refusing['cache_refused'].sum())} artifacts and manifests of the "
            "store: not signed with this key, damaged or missing. Their logs and `compile-sweep cache verify` say which."
        )
    return notes


def _intervals(trials: pd.DataFrame) -> str:
    """Names up to three, the fastest first, each with its interval of throughput."""
    rates = [
        f"{_name(trial)} ({span(trial['samples_per_s_low'], trial['samples_per_s_high'], 'samples/s')})"
        for _, trial in trials.sort_values("samples_per_s", ascending=False, kind="stable").iterrows()
    ]
    return _listed(rates if len(rates) <= 3 else [*rates[:3], f"{len(rates) - 3} more"])


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _on_the_sweep(df: pd.DataFrame, sweep: SweepInfo) -> Iterator[str]:
    """Yields remarks on missing trials, and on trials that are not comparable."""
    missing = len(set(sweep.planned) - set(df["settings_key"]))
    if missing:
        yield f"{missing} of {len(sweep.planned)} planned settings have no record yet."
    if (environments := df["environment_key"].nunique()) > 1:
        yield (
            f"These trials ran in {environments} different environments, whose times cannot be compared: "
            "speedups are computed within each, but the front mixes them."
        )
    if df["num_workers"].nunique() > 1:
        yield "These trials had different numbers of workers: speedups are computed for each number, but the front mixes them."
    if not df.empty and "gpu" in sweep.environment and not sweep.environment["gpu"]:
        yield "Measured on a CPU: only ratios within this sweep are meaningful, not the times."
    concurrent = sweep.config.get("max_concurrent")
    if isinstance(concurrent, int) and concurrent > 1:
        yield f"Up to {concurrent} trials ran at once; a trial whose compile the others slowed is marked contended."
    if (df["caches"] == "warm").any():
        yield (
            "Trials that began with warm caches are in the table, where their cold compile time is estimated, but not in the "
            "chart, which shows cold ones. --starts auto measures those that would be on the front again, cold."
        )
    yield from cache_faults(df)


def _on_the_measuring(df: pd.DataFrame) -> Iterator[str]:
    """Yields remarks on the measurements of the front's trials, and on what all of them have in common."""
    front = pareto_front(speedup_over_eager(df))
    if not (contended := front[front["contended"].fillna(False)]).empty:
        yield (
            f"Other trials slowed the compile of {_names(contended)} on the front, and it was not measured again alone: "
            "compile times are too long there."
        )
    if not (slow := front[front["outliers"].fillna(0) > 0]).empty:
        yield (
            f"Outliers on the front: {int(slow['outliers'].sum())} in {_names(slow)}. "
            "They are timed steps over 1.5 times their batch's median, and are kept in the figures."
        )
    yield from noisy_steps(df)
    drifts = df[df["clock_drift"].notna()]
    if not (drifting := drifts[drifts.apply(has_drifted, axis=1).astype(bool)]).empty:
        yield (
            f"The machine's speed changed by up to {percent(drifting['clock_drift'].max())} while a trial was measured "
            f"(more than {percent(CLOCK_DRIFT_LIMIT)} in {len(drifting)} of {len(drifts)}): "
            "compare by “vs eager interleaved”, where that cancels out."
        )
    # With a real pipeline, only what is compared across trials includes the waits.
    resident = front[front["pipeline"] != REAL_PIPELINE]
    elsewhere = speedup_over_plain_eager(df)[resident.index]
    is_apart = (elsewhere / resident["speedup_eager"] - 1).abs() > DISAGREEMENT_LIMIT
    is_apart &= ((elsewhere < resident["speedup_eager_low"]) | (elsewhere > resident["speedup_eager_high"])).fillna(True)
    if not (apart := resident[is_apart.fillna(False)]).empty:
        yield (
            f"The machine was not equally fast for all trials: what {_names(apart)} gained over the same eager steps in another "
            f"trial and in the same one (“vs eager interleaved”) differs by more than {percent(DISAGREEMENT_LIMIT)}, "
            "and by more than its interval. Trust the latter."
        )
    real = (df["pipeline"] == REAL_PIPELINE).fillna(False)
    if real.any():
        which = "All trials" if real.all() else f"{int(real.sum())} of {len(df)} trials, not to be compared with the others,"
        yield (
            f"{which} took batches from the workload's own loader (real pipeline): throughput includes waiting for data, "
            "step times and “vs eager interleaved” do not."
        )


def _names(trials: pd.DataFrame) -> str:
    """Names up to three; for more, says only how many."""
    names = [_name(trial) for _, trial in trials.iterrows()]
    return _listed(names) if len(names) <= 3 else f"{len(names)} settings"


def _name(trial: pd.Series) -> str:
    return f"“{text(trial['setting_name'])}”"


def _rate(trial: pd.Series) -> str:
    return figure(trial["samples_per_s"], "samples/s")


MOST_EQUALS = 4  # maximum number of trials named as not distinguishable from one


class FrontEntry(NamedTuple):
    """One point of the front. Text is unescaped, as in the record."""

    setting_name: str
    figures: list[str]
    remarks: list[Remark]
    is_knee: bool
    equals: list[str]  # trials that cannot be told apart from it, each with its probability of being on the front
    num_more_equals: int


class FrontList(NamedTuple):
    """The front, and other trials that may be on it."""

    entries: list[FrontEntry]
    others: list[str]  # trials that may be on it, apart from all entries


def front_list(df: pd.DataFrame, found: Summary, uncertain: pd.DataFrame) -> FrontList:
    """Returns the front over throughput and cold compile time, ascending in the latter."""
    knee = None if found.knee is None else found.knee.name
    rows = pareto_front(speedup_over_eager(df))
    named: set[object] = set()
    entries = []
    for index, row in rows.iterrows():
        equals = _equals(uncertain, index)
        named.update(equals.index)
        entries.append(
            FrontEntry(
                setting_name=str(row["setting_name"]),
                figures=[*_figures(row), *_certainty(uncertain, index)],
                remarks=remarks(row),
                is_knee=index == knee,
                equals=[_named(one) for _, one in equals.head(MOST_EQUALS).iterrows()],
                num_more_equals=max(0, len(equals) - MOST_EQUALS),
            )
        )
    others = uncertain[~uncertain.index.isin([*rows.index, *named])]
    return FrontList(entries, [_named(one) for _, one in others.sort_values("front_probability", ascending=False).iterrows()])


def _equals(uncertain: pd.DataFrame, index: object) -> pd.DataFrame:
    itself = uncertain.index == index
    group = uncertain[uncertain["equal_to"].isin(uncertain[itself]["equal_to"]) & ~itself]
    return group.sort_values("front_probability", ascending=False, kind="stable")


def _named(row: pd.Series) -> str:
    where = "on the front" if row["on_front"] else "may be on the front"
    return f"{row['setting_name']} ({where}: {chance(float(row['front_probability']))} probable)"


def _figures(trial: pd.Series) -> list[str]:
    interleaved = [] if text(trial["speedup_eager"]) is None else [f"{times(trial['speedup_eager'])} eager interleaved"]
    best = f"{times(trial['speedup_best_eager'])} best eager"
    return [figure(trial["samples_per_s"], "samples/s"), f"{figure(trial['compile_s'], 's')} compile", *interleaved, best]


def _certainty(uncertain: pd.DataFrame, index: object) -> list[str]:
    rows = uncertain[uncertain.index == index]
    return [f"{chance(float(row['front_probability']))} probable" for _, row in rows.iterrows()]
