"""Which trials are worth choosing between: the Pareto front, its knee, speed-ups over eager. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.formatting import number
from compile_sweep.schema import pareto
from compile_sweep.schema.objectives import INTERVALS, Goal
from compile_sweep.schema.outcome import LOST_TO_MACHINES, Status
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import OptimizerKind, Padding, Scope

_ALIKE = ("group_window", "autocast", "matmul_precision", "workload_options")
"""Settings beside padding and attention that eager obeys as well: with another value it computes something else."""

_COMPARABLE = ("environment_key", "num_workers", "pipeline")
"""See `comparable`."""

DEFAULT_OBJECTIVES: Mapping[str, Goal] = MappingProxyType({"samples_per_s": Goal.MAX, "compile_s": Goal.MIN})


class Choice(NamedTuple):
    """One trial worth naming."""

    trial: pd.Series
    """Its row of the frame."""
    speedup: float | None
    """Its samples per second over those of `eager`; None without one."""
    eager: pd.Series | None
    """The best usable eager trial of its environment, number of workers and input pipeline."""


class Summary(NamedTuple):
    """What a sweep found, in the few trials a person asks for first. None where there is no such trial."""

    best: Choice | None
    """The most samples per second, as `assured`; of equals the one that compiles faster."""
    quickest: Choice | None
    """The least cold compile time among compiled settings."""
    knee: Choice | None
    """The knee of the front; see `knee`."""
    best_eager: Choice | None
    """The eager trial with the most samples per second, likewise."""
    counts: Mapping[Status, int]
    """Settings of each status, by the trials that count; see `standing`."""


def pareto_front(df: pd.DataFrame, objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES) -> pd.DataFrame:
    """The trials that no other trial beats in one objective without losing in another.

    Only trials whose status is ok and whose objectives are all finite take part. One whose steps were noisy takes part with the
    worse ends of its intervals (`assured`), or not at all where they are infinite. Trials equal in every objective do not
    dominate each other: all of them stay.

    Args:
        df: trials as `load` returns them.
        objectives: column → "max" or "min". The default takes cold compile times; a warm trial has none.

    Returns:
        The front's rows with their index in `df`, ascending in the last objective (by default `compile_s`).

    Raises:
        ValueError: no objective, one that is not a column of `df`, or a goal other than "max" and "min".
    """
    signs = signs_of(df, objectives)
    candidates = usable(df, *signs)
    front = candidates[on_front(assured_costs(candidates, signs))]
    last, *others = reversed(signs)
    return front.sort_values([last, *others], kind="stable")


def expected_front(df: pd.DataFrame) -> pd.DataFrame:
    """The front there would be if every warm trial's estimate of its cold compile time were true.

    It says which settings are worth a cold measurement; `pareto_front` says what is known.

    Returns:
        Rows as `pareto_front` gives them, with a column more, `expected_compile_s`.
    """
    counted = standing(df)
    expected = counted.assign(expected_compile_s=expected_compile_s(counted))
    return pareto_front(expected, {"samples_per_s": Goal.MAX, "expected_compile_s": Goal.MIN})


def expected_compile_s(df: pd.DataFrame) -> pd.Series:
    """Seconds of cold compiling of each trial; of a warm one its estimate, NA if there is none."""
    return df["compile_s"].fillna(df["cold_equivalent_s"])


def standing(df: pd.DataFrame) -> pd.DataFrame:
    """One row a setting and number of workers: the cold one, or where there is none the warm one.

    One that the machines ended counts only where there is no other.
    """
    rank = 2 * df["label"].isin(LOST_TO_MACHINES) + (df["caches"] != Caches.COLD)
    return df[rank == rank.groupby(_joined(df, "settings_key", "num_workers")).transform("min")]


def knee(front: pd.DataFrame) -> pd.Series | None:
    """The front's trial after which more compile time buys the least more throughput.

    It is the point farthest above the chord between the front's two ends, with both axes scaled to [0, 1] (Kneedle:
    Satopää et al., "Finding a 'Kneedle' in a Haystack", ICDCSW 2011). Compile time stays in plain seconds, though charts
    show its logarithm: seconds are what is paid, and on a logarithmic axis the step from eager's 0.01 s to 1 s would weigh
    as much as that from 1 s to 100 s, so that the knee would hang on how near to zero eager came.

    Args:
        front: what `pareto_front` returns for its default objectives.

    Returns:
        The knee's row; None if the front has no trial strictly above the chord (fewer than three different ones, say).
    """
    if len(front) < 3:
        return None
    cost = floats(front["compile_s"])
    gain = assured(front, "samples_per_s", at_most=False)
    if np.ptp(cost) == 0 or np.ptp(gain) == 0:
        return None
    above = (gain - gain.min()) / np.ptp(gain) - (cost - cost.min()) / np.ptp(cost)
    at = int(np.argmax(above))
    return front.iloc[at] if above[at] > 1e-9 else None


def speedup_over_eager(df: pd.DataFrame) -> pd.DataFrame:
    """The frame with two columns more: throughput as a multiple of eager's, 1.5 being half as fast again.

    `speedup_best_eager` compares with the fastest usable eager trial: what a person gains who already chose the best
    padding. `speedup_same_padding` compares with the fastest usable eager trial that computes alike: the same padded
    batches, in the same precision, by the same attention and with the same options of the workload (`_ALIKE`), so that it is
    what the compiler alone gains. Buckets of n tokens pad alike with eager's longest in multiples of n; a list of buckets has
    no eager peer, nor has a dynamic_min that pads short batches further, because eager knows neither. Both compare only trials
    of the same environment, number of workers and input pipeline; where there is no such eager trial, or no throughput, they
    are NA. `speedup_eager`, measured within the trial itself, fills that gap. Which eager trial is the fastest goes by what is
    `assured`, as everywhere; rates are compared as measured.
    """
    eager = _eager_fastest_first(df)
    alike = _alike(df) + _joined(df, "attention")
    return df.assign(speedup_best_eager=_multiple(df, eager, comparable(df)), speedup_same_padding=_multiple(df, eager, alike))


def speedup_over_plain_eager(df: pd.DataFrame) -> pd.Series:
    """Throughput as a multiple of that of the eager trial whose steps are those that `speedup_eager` compares with.

    Whatever the setting, those have the workload's own attention and a foreach optimizer. So it is the same multiple, if the
    machine was equally fast for both trials. NA as in `speedup_over_eager`, and where gradients are reduced in another way.
    """
    eager = _eager_fastest_first(df)
    is_plain = (eager["optimizer"] == OptimizerKind.FOREACH).fillna(False) & eager["attention"].isna()
    plain = eager[is_plain.to_numpy(dtype=bool)]
    return _multiple(df, plain, _alike(df) + _joined(df, "ddp"))


def _alike(df: pd.DataFrame) -> pd.Series:
    """What trials share whose batches are the same, padded alike, and computed on in the same precision."""
    padding = df["padding"].astype("string").where(df["padding"] != Padding.BUCKETS, str(Padding.LONGEST))
    multiple = df["pad_multiple"].fillna(df["bucket_size"]).astype("string").fillna("")
    shortest = df["dynamic_min"].where((df["dynamic_min"] > df["pad_multiple"]).fillna(False)).astype("string").fillna("")
    buckets = df["buckets"].map(lambda lengths: "" if lengths is None else f"buckets {lengths}").astype("string")
    return comparable(df) + _joined(df, *_ALIKE) + " " + padding + " " + multiple + " " + shortest + " " + buckets


def _multiple(df: pd.DataFrame, baselines: pd.DataFrame, group: pd.Series) -> pd.Series:
    """Throughput over that of the first baseline of the same group; NA without one."""
    rates = baselines["samples_per_s"].groupby(group[baselines.index]).first()
    return (df["samples_per_s"] / group.map(rates).astype("Float64")).astype("Float64")


def comparable(df: pd.DataFrame) -> pd.Series:
    """What trials must share for the rate of one to be a multiple of the other's, as one text a row."""
    return _joined(df, *_COMPARABLE)


def break_even_s(trial: pd.Series, baseline: pd.Series) -> float | None:
    """Seconds of training after which `trial`, its compile included, has trained on as many samples as `baseline`.

    Both rates are taken as steady: r₁ (t - c₁) = r₀ (t - c₀), with r in samples per second and c in compile seconds.

    Returns:
        The seconds from the start of training; None if it never catches up or a figure is missing.
    """
    rate, compiling, base_rate, base_compiling = (
        number(row[name]) for row in (trial, baseline) for name in ("samples_per_s", "compile_s")
    )
    if rate is None or compiling is None or base_rate is None or base_compiling is None or rate <= base_rate:
        return None
    return max(0.0, (rate * compiling - base_rate * base_compiling) / (rate - base_rate))


def summary(df: pd.DataFrame) -> Summary:
    """The trials a person asks for first; what is missing is None, so it works for any sweep, also an empty one."""
    with_speedups = speedup_over_eager(standing(df))
    fastest = _fastest_first(usable(with_speedups, "samples_per_s"))
    compiled = usable(with_speedups, "samples_per_s", "compile_s")
    compiled = compiled[compiled["scope"] != Scope.EAGER]
    counts = with_speedups["status"].value_counts()
    return Summary(
        best=_first(with_speedups, fastest),
        quickest=_first(with_speedups, compiled.sort_values("compile_s", kind="stable")),
        knee=_choice(with_speedups, knee(pareto_front(with_speedups))),
        best_eager=_first(with_speedups, fastest[fastest["scope"] == Scope.EAGER]),
        counts={status: int(counts.get(str(status), 0)) for status in Status},
    )


def _fastest_first(measured: pd.DataFrame) -> pd.DataFrame:
    """The trials by throughput, as `assured`; of equals the one that compiles faster comes first."""
    return measured.iloc[np.lexsort((floats(measured["compile_s"]), -assured(measured, "samples_per_s", at_most=False)))]


def signs_of(df: pd.DataFrame, objectives: Mapping[str, Goal | str]) -> dict[str, float]:
    """Each objective with the factor that makes less of it better.

    Raises:
        ValueError: no objective, one that is not a column of `df`, or a goal other than "max" and "min".
    """
    if not objectives:
        raise ValueError("no objective is given; give at least one, such as {'samples_per_s': 'max'}")
    for name, goal in objectives.items():
        if name not in df.columns:
            raise ValueError(f"the objective {name!r} is not a column; use one of analysis.COLUMNS")
        if goal not in tuple(Goal):
            raise ValueError(f"the goal of {name!r} is {goal!r}; use 'max' or 'min'")
    return {name: 1.0 if goal == Goal.MIN else -1.0 for name, goal in objectives.items()}


def usable(df: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The trials whose status is ok and that have a finite figure in each of these columns."""
    ok = (df["status"] == Status.OK).to_numpy(dtype=bool)
    finite = np.isfinite(np.column_stack([floats(df[name]) for name in names])).all(axis=1)
    return df[ok & finite]


def costs_of(df: pd.DataFrame, signs: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """The objectives of shape (trial, objective), less being better in each."""
    return np.column_stack([sign * floats(df[name]) for name, sign in signs.items()])


def assured_costs(df: pd.DataFrame, signs: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """The same by figures as `assured`: what fronts go by."""
    return np.column_stack([sign * assured(df, name, at_most=sign > 0) for name, sign in signs.items()])


def assured(df: pd.DataFrame, name: str, *, at_most: bool) -> npt.NDArray[np.float64]:
    """The column's figures as `objectives.assured` gives a record's: of noisy trials the interval's worse end.

    That end is infinite where it is an upper one that nothing bounds.
    """
    values = floats(df[name])
    of, _ = INTERVALS.get(name, (name, ""))
    if (end := f"{of}_{'high' if at_most else 'low'}") not in df.columns or "stable" not in df.columns:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        worse: npt.NDArray[np.float64] = values * floats(df[end]) / floats(df[of])
    return np.where(is_noisy(df) & ~np.isnan(worse), worse, values)


def is_noisy(df: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which trials' step times never had an interval that was narrow enough."""
    return (~df["stable"].astype("boolean")).fillna(False).to_numpy(dtype=bool)


def is_noisy_trial(trial: pd.Series) -> bool:
    """The same of one row."""
    return number(trial["stable"]) == 0


def on_front(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows no other dominates, and are finite: what may be infinitely bad is on no front."""
    return np.asarray(~dominated(costs) & np.isfinite(costs).all(axis=1), dtype=np.bool_)


def dominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which rows another row dominates: no worse in every column, and better in one. Less is better."""
    return np.array(pareto.dominated([tuple(row) for row in costs.tolist()]), dtype=np.bool_)


def _joined(df: pd.DataFrame, *names: str) -> pd.Series:
    """The columns as one text a row, by which to group; what is missing is a value like any other."""
    joined = pd.Series("", index=df.index, dtype="string")
    for name in names:
        joined = joined + " " + df[name].astype("string").fillna("")
    return joined


def floats(column: pd.Series) -> npt.NDArray[np.float64]:
    """The column's figures; NaN for what is missing."""
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _eager_fastest_first(df: pd.DataFrame) -> pd.DataFrame:
    measured = usable(df, "samples_per_s")
    return _fastest_first(measured[measured["scope"] == Scope.EAGER])


def _eager_peer(df: pd.DataFrame, trial: pd.Series) -> pd.Series | None:
    """The eager trial that a trial's `speedup_best_eager` is over."""
    eager, kind = _eager_fastest_first(df), comparable(df)
    peers = eager[kind[eager.index] == kind.at[trial.name]]
    return None if peers.empty else peers.iloc[0]


def _first(df: pd.DataFrame, ranked: pd.DataFrame) -> Choice | None:
    return None if ranked.empty else _choice(df, ranked.iloc[0])


def _choice(df: pd.DataFrame, trial: pd.Series | None) -> Choice | None:
    return None if trial is None else Choice(trial, number(trial["speedup_best_eager"]), _eager_peer(df, trial))
