"""What a sweep found, in sentences a person can act on, and what speaks against trusting it."""

from __future__ import annotations

import pandas as pd

from analysis.formatting import duration, figure, interval, number, percent, span, text, times, upper_end
from analysis.load import SweepInfo
from analysis.pareto import (
    Choice,
    Summary,
    assured,
    break_even_s,
    choice_of,
    is_noisy,
    pareto_front,
    speedup_over_eager,
    speedup_over_plain_eager,
    standing,
    usable,
)
from analysis.remarks import CLOCK_DRIFT_LIMIT, DISAGREEMENT_LIMIT, REAL_PIPELINE, has_drifted
from orchestrator.records import Status
from workloads.settings import Scope

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
