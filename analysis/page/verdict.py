"""What a sweep found, in sentences a person can act on, and what speaks against trusting it.

What a reader should know of one trial's figures before trusting them, in a word or two each.

The verdict's figures at a glance: what is gained, what it costs, and how far that can be trusted.

The front as the report lists it: each member's figures, how probable it is, and what cannot be told apart from it.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.choose.pareto import (
    Choice,
    Summary,
    assured,
    break_even_s,
    choice_of,
    expected_compile_s,
    is_noisy,
    is_noisy_trial,
    pareto_front,
    speedup_over_eager,
    speedup_over_plain_eager,
    standing,
    usable,
)
from analysis.choose.uncertainty import chance
from analysis.formatting import duration, figure, gib, interval, number, or_estimate, percent, span, text, times, upper_end
from analysis.load import SweepInfo
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import Scope

CLOCK_DRIFT_LIMIT = 0.02
"""Share by which the clock may change within a trial before that is worth saying: several times a good interval's width."""

UNMOVED_WIDTH = 0.01
"""Width of a step's interval over the step below which the trial itself did not drift, whatever its eager reference did: eager
steps wait for a host that CUDA graphs need not wait for."""

DISAGREEMENT_LIMIT = 0.05
"""Share by which a speed-up over eager in another trial may differ from the one over eager in the same trial, likewise."""

REAL_PIPELINE = "real"


class Remark(NamedTuple):
    """A remark, and what it means."""

    text: str
    meaning: str


def remarks(trial: pd.Series) -> list[Remark]:
    """What is unusual about how the trial was measured; none if nothing is.

    Args:
        trial: a row of the frame `load` returns.
    """
    found = []
    if is_noisy_trial(trial):
        median, low, high = (number(trial[f"step_ms_median{end}"]) for end in ("", "_low", "_high"))
        width = "" if not median or low is None or high is None else f" ± {percent((high - low) / 2 / median)}"
        found.append(
            Remark(f"noisy{width}", "the interval of its step time never became narrow enough; fronts go by its worse end")
        )
    if outliers := int(number(trial["outliers"]) or 0):
        words = f"{outliers} outlier{'s' if outliers > 1 else ''}"
        found.append(Remark(words, "timed steps over 1.5 times their batch's median; they are kept in every figure"))
    if number(trial["contended"]):
        pressure = (
            "" if number(trial["cpu_pressure"]) is None else f" ({percent(trial['cpu_pressure'])} of it waiting for a core)"
        )
        found.append(Remark("contended", f"other trials held up its compile{pressure}: compile times are too long"))
    if has_drifted(trial):
        found.append(
            Remark(
                f"drift {percent(trial['clock_drift'])}", "the same eager steps took that much longer at one time than at another"
            )
        )
    if trial["pipeline"] is not pd.NA and trial["pipeline"] == REAL_PIPELINE:
        waits = "" if number(trial["data_wait_share"]) is None else f", {percent(trial['data_wait_share'])} waiting"
        found.append(
            Remark(
                f"real pipeline{waits}",
                "throughput is with batches from the workload's loader, step times are with prepared ones",
            )
        )
    return found


def has_drifted(trial: pd.Series) -> bool:
    """Whether the machine's speed changed under the trial by more than is worth saying."""
    drift = number(trial["clock_drift"])
    median, low, high = (number(trial[f"step_ms_median{end}"]) for end in ("", "_low", "_high"))
    moved = median is None or low is None or high is None or (high - low) / median > UNMOVED_WIDTH
    return drift is not None and drift > CLOCK_DRIFT_LIMIT and moved


_OF_THE_SAME = " of the same environment, workers and pipeline"


def verdict(df: pd.DataFrame, found: Summary) -> list[str]:
    """The findings, the most important sentence first.

    Args:
        df: trials as `load` returns them.
        found: their `summary`.
    """
    if df.empty:
        return ["No trial has finished yet, so there is nothing to choose from."]
    return [*_findings(df, found), *_refuted(df)]


def cautions(df: pd.DataFrame, sweep: SweepInfo) -> list[str]:
    """What a reader must know before trusting the figures; none if there is nothing."""
    return [*_on_the_sweep(df, sweep), *_on_the_measuring(df)]


def _findings(df: pd.DataFrame, found: Summary) -> list[str]:
    """What there is to choose from, the best first."""
    if found.best is None:
        return [_none_usable(df, found)]
    best = found.best.trial
    if found.counts[Status.OK] == 1:
        return [
            f"Only one setting is usable, {_name(best)}, at {_rate(best)}: there is nothing to compare it with.",
            *_cost(best),
        ]
    if found.best_eager is None:
        return [
            f"The fastest setting is {_name(best)}, at {_rate(best)}. How much it gains over eager is not known: "
            "no eager trial is usable.",
            *_cost(best),
            *_others(found, best),
        ]
    if best["scope"] == Scope.EAGER:
        return [_eager_wins(df, best)]
    return [*_compiled_wins(found.best, found.best_eager), *_others(found, best)]


def _refuted(df: pd.DataFrame) -> list[str]:
    """On settings faster with warm caches than any compiled one that counts, and not usable when measured cold."""
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
                f"{_name(trial)} reached {_rate(trial)} when it began with warm caches, but does not count: measured cold it is "
                f"{outcome}."
            )
    return sentences


def _compiled(df: pd.DataFrame) -> pd.DataFrame:
    """The usable compiled trials among these."""
    measured = usable(df, "samples_per_s")
    return measured[(measured["scope"] != Scope.EAGER).to_numpy(dtype=bool)]


def noisy_steps(df: pd.DataFrame) -> list[str]:
    """Sentences on the settings with noisy steps that are on the front, or would be by their figures; none if there are none."""
    front, by_figures = pareto_front(df), pareto_front(df.assign(stable=True))
    on_it = front[is_noisy(front)]
    missed = df.loc[by_figures.index.difference(front.index)]
    missed = missed[is_noisy(missed)]
    notes = []
    if not on_it.empty:
        are = "is" if len(on_it) == 1 else "are"
        notes.append(f"{_intervals(on_it)} {are} on the front though noisy, by the low end of the interval.")
    if not missed.empty:
        notes.append(f"{_intervals(missed)} would be on the front by the figure, not by the low end of the interval.")
    return [f"{' '.join(notes)} Measure again on a machine that does nothing else to know better."] if notes else []


def cache_faults(df: pd.DataFrame) -> list[str]:
    """Sentences on trials that could not restore or publish compile artifacts, or refused some; none if there are none."""
    notes = []
    if not (faulty := df[df["cache_faults"].map(len) > 0]).empty:
        last = faulty["cache_faults"].iloc[-1]
        notes.append(f"{len(faulty)} of {len(df)} trials could not use the store of compile artifacts: {last[0].rstrip('.')}.")
    if not (refusing := df[df["cache_refused"].fillna(0) > 0]).empty:
        notes.append(
            f"{len(refusing)} of {len(df)} trials refused {int(refusing['cache_refused'].sum())} artifacts and manifests of the "
            "store: not signed with this key, damaged or gone. Their logs say which; `python -m orchestrator.cache verify` too."
        )
    return notes


def _intervals(trials: pd.DataFrame) -> str:
    """Up to three by name, the fastest first, each with its interval of throughput."""
    rates = [
        f"{_name(trial)} ({span(trial['samples_per_s_low'], trial['samples_per_s_high'], 'samples/s')})"
        for _, trial in trials.sort_values("samples_per_s", ascending=False, kind="stable").iterrows()
    ]
    return ", ".join(rates[:3]) + (f" and {len(rates) - 3} more" if len(rates) > 3 else "")


def _on_the_sweep(df: pd.DataFrame, sweep: SweepInfo) -> list[str]:
    """Trials that are missing, and trials that cannot be compared with each other."""
    notes = []
    missing = len(set(sweep.planned) - set(df["settings_key"]))
    if missing:
        notes.append(f"{missing} of {len(sweep.planned)} planned settings have no record yet.")
    if (environments := df["environment_key"].nunique()) > 1:
        notes.append(
            f"These trials ran in {environments} different environments, between which times cannot be compared; "
            "speed-ups are taken within each, the front is not."
        )
    if df["num_workers"].nunique() > 1:
        notes.append("These trials had different numbers of workers; speed-ups are taken within each number, the front is not.")
    if not df.empty and "gpu" in sweep.environment and not sweep.environment["gpu"]:
        notes.append("Measured on a processor: only the ratios within this sweep mean something, not the times.")
    concurrent = sweep.config.get("max_concurrent")
    if isinstance(concurrent, int) and concurrent > 1:
        notes.append(f"Up to {concurrent} trials ran at a time; one whose compile the others held up is marked contended.")
    if (df["caches"] == "warm").any():
        notes.append(
            "Trials that began with warm caches are in the table, not in the chart, which shows cold ones; what they would have "
            "taken cold is an estimate there. --caches auto measures cold those of them that would be on the front."
        )
    return [*notes, *cache_faults(df)]


def _on_the_measuring(df: pd.DataFrame) -> list[str]:
    """What happened while the trials of the front were measured, and what all of them share."""
    notes = []
    front = pareto_front(speedup_over_eager(df))
    if not (contended := front[front["contended"].fillna(False)]).empty:
        notes.append(
            f"On the front, other trials held up the compile of {_names(contended)}, not measured again alone since: "
            "compile times are too long there."
        )
    if not (slow := front[front["outliers"].fillna(0) > 0]).empty:
        notes.append(
            f"Outliers on the front: {int(slow['outliers'].sum())} in {_names(slow)}. "
            "They are timed steps over 1.5 times their batch's median, and are kept in the figures."
        )
    notes += noisy_steps(df)
    drifts = df[df["clock_drift"].notna()]
    if not (drifting := drifts[drifts.apply(has_drifted, axis=1).astype(bool)]).empty:
        notes.append(
            f"The machine's speed changed by up to {percent(drifting['clock_drift'].max())} while a trial was measured "
            f"(more than {percent(CLOCK_DRIFT_LIMIT)} in {len(drifting)} of {len(drifts)}): "
            "compare by “vs eager interleaved”, where that cancels."
        )
    resident = front[front["pipeline"] != REAL_PIPELINE]  # where it is real, only what is taken across trials holds the waits
    elsewhere = speedup_over_plain_eager(df)[resident.index]
    is_apart = (elsewhere / resident["speedup_eager"] - 1).abs() > DISAGREEMENT_LIMIT
    is_apart &= ((elsewhere < resident["speedup_eager_low"]) | (elsewhere > resident["speedup_eager_high"])).fillna(True)
    if not (apart := resident[is_apart.fillna(False)]).empty:
        notes.append(
            f"The machine was not equally fast for all trials: what {_names(apart)} gained over the same eager steps in another "
            f"trial and in the same one (“vs eager interleaved”) differs by more than {percent(DISAGREEMENT_LIMIT)}, "
            "and by more than its interval. Trust the latter."
        )
    real = (df["pipeline"] == REAL_PIPELINE).fillna(False)
    if real.any():
        which = "All trials" if real.all() else f"{int(real.sum())} of {len(df)} trials, not to be compared with the others,"
        notes.append(
            f"{which} took batches from the workload's own loader (real pipeline): throughput holds its waits for data, "
            "step times and “vs eager interleaved” do not."
        )
    return notes


def _none_usable(df: pd.DataFrame, found: Summary) -> str:
    failed, infeasible, stopped = (found.counts[status] for status in (Status.FAILED, Status.INFEASIBLE, Status.STOPPED))
    outcomes = f"{infeasible} infeasible and {failed} failed"
    if stopped:
        outcomes = f"{infeasible} infeasible, {failed} failed and {stopped} stopped early"
    sentence = f"No trial is usable: of {sum(found.counts.values())}, {outcomes}."
    labels = standing(df)["label"].value_counts()
    return sentence if labels.empty else f"{sentence} The most frequent label is {labels.index[0]}."


def _compiled_wins(best: Choice, best_eager: Choice) -> list[str]:
    trial, base = best.trial, best.eager
    if base is None:
        return [
            f"The fastest setting is {_name(trial)}, at {_rate(trial)}; no eager trial is comparable with it.",
            *_cost(trial),
        ]
    if base["samples_per_s"] > trial["samples_per_s"]:
        first = f"The fastest setting is {_name(trial)}, at {_rate(trial)}. The best eager one, {_reaches(base, trial)}."
        return [first, *_cost(trial), *_interleaved(trial)]
    among = "" if base.name == best_eager.trial.name else _OF_THE_SAME
    first = (
        f"The fastest setting is {_name(trial)}, at {_rate(trial)}: {times(best.speedup)} the best eager setting{among} "
        f"({_name(base)}, {_rate(base)})."
    )
    sentences = [first, *_cost(trial)]
    if (ahead := break_even_s(trial, base)) is not None and sentences[1:]:
        sentences[1] = sentences[1].rstrip(".") + f"; that is paid back after about {duration(ahead)} of training."
    if _intervals_overlap(trial, base):
        sentences.append("Their 95 % intervals overlap, so the gain may be noise.")
    return [*sentences, *_interleaved(trial)]


def _interleaved(trial: pd.Series) -> list[str]:
    """The speed-up that no drift of the clock is in, where it was measured."""
    if (speedup := number(trial["speedup_eager"])) is None:
        return []
    ends = interval(trial["speedup_eager_low"], trial["speedup_eager_high"])
    between = f" (95 %: {ends})" if ends else ""
    return [f"In turn with eager steps on the same batches it is {times(speedup)} as fast{between}."]


def _eager_wins(df: pd.DataFrame, best: pd.Series) -> str:
    sentence = f"No compiled setting beats eager: the fastest is {_name(best)}, at {_rate(best)}."
    compiled = _compiled(standing(df))
    if compiled.empty:
        return f"{sentence} None of the compiled settings is usable."
    runner_up = compiled.iloc[int(assured(compiled, "samples_per_s", at_most=False).argmax())]
    gain = choice_of(df, runner_up)
    if gain.eager is None or gain.eager.name == best.name:
        return f"{sentence} The best compiled one, {_reaches(runner_up, best)}."
    return (
        f"The fastest setting is an eager one, {_name(best)}, at {_rate(best)}. The best compiled one, "
        f"{_reaches(runner_up, best)}: {times(gain.speedup)} the best eager setting{_OF_THE_SAME} "
        f"({_name(gain.eager)}, {_rate(gain.eager)})."
    )


def _reaches(runner_up: pd.Series, best: pd.Series) -> str:
    """What the runner-up has; if that is more than the best, which is so by what is sure, why it is behind."""
    words = f"{_name(runner_up)}, reaches {_rate(runner_up)}"
    if runner_up["samples_per_s"] <= best["samples_per_s"]:
        return words
    return f"{words}, but by the low end of its interval {figure(runner_up['samples_per_s_low'], 'samples/s')}"


def _others(found: Summary, best: pd.Series) -> list[str]:
    """The knee and the quickest compile, where they are not the best setting itself."""
    said = {best.name}
    sentences = []
    for choice, wording in ((found.knee, "The knee of the front is"), (found.quickest, "The quickest to compile is")):
        if choice is None or choice.trial.name in said:
            continue
        said.add(choice.trial.name)
        gain = "" if choice.speedup is None else f", {times(choice.speedup)} the best eager"
        compile_s = figure(choice.trial["compile_s"], "s")
        sentences.append(f"{wording} {_name(choice.trial)}: {_rate(choice.trial)}{gain}, for {compile_s} of compiling.")
    return sentences


def _cost(trial: pd.Series) -> list[str]:
    compile_s = number(trial["compile_s"])
    if trial["scope"] == Scope.EAGER or compile_s is None:
        return []
    return [f"It costs {figure(compile_s, 's')} of cold compiling."]


def _intervals_overlap(one: pd.Series, other: pd.Series) -> bool:
    low, high = number(one["samples_per_s_low"]), upper_end(other["samples_per_s_high"])
    return low is not None and high is not None and low <= high


def _names(trials: pd.DataFrame) -> str:
    """Up to three by name, of more only how many."""
    names = [_name(trial) for _, trial in trials.iterrows()]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} settings"


def _name(trial: pd.Series) -> str:
    return f"“{text(trial['settings_label'])}”"


def _rate(trial: pd.Series) -> str:
    return figure(trial["samples_per_s"], "samples/s")


_SURE, _LIKELY = 0.95, 0.75
"""Probability of being on the front from which on confidence is high, or fair."""


class Tile(NamedTuple):
    """A figure, what it is, and what stands behind it."""

    caption: str
    figure: str
    under: str


def tiles(named: Choice | None, uncertain: pd.DataFrame) -> list[Tile]:
    """Gain, cost, memory and confidence of the setting that the verdict names first; none where it is eager or there is none.

    Args:
        named: that setting.
        uncertain: the `trials` of its `uncertain_front`.
    """
    if named is None or named.trial["scope"] == Scope.EAGER:
        return []
    trial, eager = named.trial, named.eager
    return [*_gain(trial, named.speedup), _cost_tile(trial, eager), *_memory(trial, eager), _confidence(trial, uncertain)]


def _gain(trial: pd.Series, speedup: float | None) -> list[Tile]:
    in_turn = number(trial["speedup_eager"])
    between = interval(trial["speedup_eager_low"], trial["speedup_eager_high"])
    if speedup is not None:
        under = "the best eager setting's throughput"
        if in_turn is not None:
            under += f"; {times(in_turn)} eager on the same batches in turn" + (f" ({between})" if between else "")
        return [Tile("Gain", times(speedup), under)]
    if in_turn is not None:
        return [Tile("Gain", times(in_turn), "eager on the same batches in turn" + (f" (95 %: {between})" if between else ""))]
    return []


def _cost_tile(trial: pd.Series, eager: pd.Series | None) -> Tile:
    expected = trial.copy()
    expected["compile_s"] = expected_compile_s(trial.to_frame().T).iloc[0]
    paid_back = None if eager is None else break_even_s(expected, eager)
    under = ["of cold compiling"]
    if paid_back is not None:
        under.append(f"paid back after about {duration(paid_back)}")
    if (warm := number(trial["warm_start_s"])) is not None:
        under.append(f"{figure(warm, 's')} for a whole warm start")
    cost = or_estimate(trial["compile_s"], trial["cold_equivalent_s"], lambda value: figure(value, "s"))
    return Tile("Cost", cost, ", ".join(under))


def _memory(trial: pd.Series, eager: pd.Series | None) -> list[Tile]:
    peak = number(trial["peak_memory_bytes"])
    if peak is None:
        return []
    base = None if eager is None else number(eager["peak_memory_bytes"])
    if base is None:
        return [Tile("Memory", gib(peak), "")]
    more = round((peak - base) / 2**30, 1) + 0.0  # which makes no −0.0
    return [Tile("Memory", gib(peak), f"{more:+.1f} GiB against the best eager setting".replace("-", "−"))]


def _confidence(trial: pd.Series, uncertain: pd.DataFrame) -> Tile:
    rows = uncertain[uncertain.index == trial.name]
    row = None if rows.empty else rows.iloc[0]
    probability = None if row is None else number(row["front_probability"])
    ties = 0 if row is None else int(row["ties"]) - 1
    doubts = [remark.text for remark in remarks(trial)]
    level = "low"
    if probability is not None and probability >= _LIKELY:
        level = "high" if probability >= _SURE and not ties and not doubts else "fair"
    because = [] if probability is None else [f"on the front with a probability of {chance(probability)}"]
    if number(trial["compile_s"]) is None:
        because.append("measured with warm caches only, so that what it costs is an estimate")
    if ties:
        because.append(f"{ties} other{'s' if ties > 1 else ''} cannot be told apart from it")
    if (used := number(trial["numerics_worst_ratio"])) is not None:
        because.append(f"numerics use {100 * used:.0f} % of what is allowed")
    return Tile("Confidence", level, "; ".join([*because, *doubts]))


MOST_EQUALS = 4
"""Trials that are named as not to be told apart from one."""


class FrontEntry(NamedTuple):
    """One point of the front. Text is as it stands in the record, not escaped."""

    settings_label: str
    figures: list[str]
    remarks: list[Remark]
    is_knee: bool
    equals: list[str]
    """Trials that cannot be told apart from it, each with its probability of being on the front."""
    num_more_equals: int


class FrontList(NamedTuple):
    """The front, and what is not on it by the figures as they are but may be."""

    entries: list[FrontEntry]
    others: list[str]
    """Trials apart from all entries that may be on it."""


def front_list(df: pd.DataFrame, found: Summary, uncertain: pd.DataFrame) -> FrontList:
    """The front over throughput and cold compile time, ascending in the latter.

    Args:
        df: trials as `load` returns them.
        found: their `summary`.
        uncertain: the `trials` of their `uncertain_front`.
    """
    knee = None if found.knee is None else found.knee.trial.name
    rows = pareto_front(speedup_over_eager(df))
    named: set[object] = set()
    entries = []
    for index, row in rows.iterrows():
        equals = _equals(uncertain, index)
        named.update(equals.index)
        entries.append(
            FrontEntry(
                settings_label=str(row["settings_label"]),
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
    """The others of a trial's group, the most probable first."""
    itself = uncertain.index == index
    group = uncertain[uncertain["equal_to"].isin(uncertain[itself]["equal_to"]) & ~itself]
    return group.sort_values("front_probability", ascending=False, kind="stable")


def _named(row: pd.Series) -> str:
    where = "on the front" if row["on_front"] else "may be on the front"
    return f"{row['settings_label']} ({where}: {chance(float(row['front_probability']))} probable)"


def _figures(trial: pd.Series) -> list[str]:
    interleaved = [] if text(trial["speedup_eager"]) is None else [f"{times(trial['speedup_eager'])} eager interleaved"]
    best = f"{times(trial['speedup_best_eager'])} best eager"
    return [figure(trial["samples_per_s"], "samples/s"), f"{figure(trial['compile_s'], 's')} compile", *interleaved, best]


def _certainty(uncertain: pd.DataFrame, index: object) -> list[str]:
    rows = uncertain[uncertain.index == index]
    return [f"{chance(float(row['front_probability']))} probable" for _, row in rows.iterrows()]
