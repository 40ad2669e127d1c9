"""Which trials are worth choosing between: the Pareto front, its knee, speedups over eager. Pure functions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.formatting import number, text
from compile_sweep.schema import pareto
from compile_sweep.schema.objectives import INTERVALS, Goal
from compile_sweep.schema.outcome import LOST_TO_MACHINES, Status
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import OptimizerKind, Padding, Scope

_ALIKE = ("group_window", "autocast", "matmul_precision", "workload_options")
"""Settings besides padding and attention that also change what eager computes."""

_COMPARABLE = ("environment_key", "num_workers", "pipeline")  # see `comparable`

DEFAULT_OBJECTIVES: Mapping[str, Goal] = MappingProxyType({"samples_per_s": Goal.MAX, "compile_s": Goal.MIN})


class Summary(NamedTuple):
    """The few trials of a sweep that a person asks for first; None for those that do not exist."""

    best: pd.Series | None
    """The trial with the most samples per second, as `assured`; of equals the one that compiles faster."""
    knee: pd.Series | None
    counts: Mapping[Status, int]
    """Number of settings with each status, by the trials that count; see `standing`."""


def pareto_front(df: pd.DataFrame, objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES) -> pd.DataFrame:
    """Returns the trials that no other trial beats in one objective without losing in another.

    Only trials whose status is ok and whose objectives are all finite take part. A trial with noisy steps takes part with the
    worse ends of its intervals (`assured`), or not at all if they are infinite. Trials equal in every objective do not
    dominate each other: all of them stay.

    Args:
        df: Trials as `load` returns them.
        objectives: "max" or "min", by column. The default uses cold compile times, which a warm trial lacks.

    Returns:
        The front's rows with their index in `df`, ascending in the last objective (by default `compile_s`).

    Raises:
        ValueError: There is no objective, one is not a column of `df`, or a goal is neither "max" nor "min".
    """
    signs = signs_of(df, objectives)
    candidates = usable(df, *signs)
    front = candidates[on_front(assured_costs(candidates, signs))]
    last, *others = reversed(signs)
    return front.sort_values([last, *others], kind="stable")


def expected_front(df: pd.DataFrame) -> pd.DataFrame:
    """Returns the front under the assumption that every warm trial's estimate of its cold compile time is right.

    It says which settings are worth a cold measurement; `pareto_front` says what is known.

    Returns:
        Rows as in `pareto_front`, with an additional column `expected_compile_s`.
    """
    counted = standing(df)
    expected = counted.assign(expected_compile_s=expected_compile_s(counted))
    return pareto_front(expected, {"samples_per_s": Goal.MAX, "expected_compile_s": Goal.MIN})


def expected_compile_s(df: pd.DataFrame) -> pd.Series:
    """Returns the cold compile seconds of each trial; for a warm one its estimate, NA if there is none."""
    return df["compile_s"].fillna(df["cold_equivalent_s"])


def standing(df: pd.DataFrame) -> pd.DataFrame:
    """Returns one row per setting and number of workers: the cold one, or the warm one if there is no cold one.

    A trial that the machines ended counts only if there is no other.
    """
    measured = _joined(df, "settings_key", "num_workers")
    if measured.is_unique:
        return df
    rank = 2 * df["label"].isin(LOST_TO_MACHINES) + (df["caches"] != Caches.COLD)
    return df[rank == rank.groupby(measured).transform("min")]


def knee(front: pd.DataFrame) -> pd.Series | None:
    """Returns the trial of the front after which more compile time gains the least additional throughput.

    It is the point farthest above the chord between the front's two ends, with both axes scaled to [0, 1] (Kneedle:
    Satopää et al., "Finding a 'Kneedle' in a Haystack", ICDCSW 2011). Compile time stays in plain seconds, though charts
    show its logarithm: seconds are what is paid, and on a logarithmic axis the step from eager's 0.01 s to 1 s would weigh
    as much as that from 1 s to 100 s, so that the knee would depend on how close to zero eager is.

    Args:
        front: Result of `pareto_front` for its default objectives.

    Returns:
        The knee's row; None if the front has no trial strictly above the chord (for example, with fewer than three different
        ones).
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
    """Returns the frame with two more columns: throughput as a multiple of eager's, where 1.5 means 50% faster.

    `speedup_best_eager` compares with the fastest usable eager trial, which is what a person gains who already chose the best
    padding. `speedup_same_padding` compares with the fastest usable eager trial that computes the same: the same padded batches,
    precision, attention and workload options (`_ALIKE`), which is the gain of the compiler alone. Buckets of n tokens pad like
    eager's longest in multiples of n. A list of buckets has no eager peer, nor has a dynamic_min that pads short batches further,
    because eager supports neither. Both compare only trials of the same environment, number of workers and input pipeline;
    without such an eager trial, or without throughput, they are NA. `speedup_eager`, measured within the trial itself, fills that
    gap. The fastest eager trial is chosen by `assured` figures, as everywhere; rates are compared as measured.
    """
    eager = _eager_fastest_first(df)
    alike = _alike(df) + _joined(df, "attention")
    return df.assign(speedup_best_eager=_multiple(df, eager, comparable(df)), speedup_same_padding=_multiple(df, eager, alike))


def speedup_over_plain_eager(df: pd.DataFrame) -> pd.Series:
    """Returns throughput as a multiple of that of the eager trial with the steps that `speedup_eager` compares with.

    Those always use the workload's own attention and a foreach optimizer. So it is the same multiple if the machine was equally
    fast for both trials. NA as in `speedup_over_eager`, and if gradients are reduced in another way.
    """
    eager = _eager_fastest_first(df)
    is_plain = (eager["optimizer"] == OptimizerKind.FOREACH).fillna(False) & eager["attention"].isna()
    plain = eager[is_plain.to_numpy(dtype=bool)]
    return _multiple(df, plain, _alike(df) + _joined(df, "ddp"))


def _alike(df: pd.DataFrame) -> pd.Series:
    """Returns a text per trial that is equal for trials with the same batches, padding and precision."""
    padding = df["padding"].astype("string").where(df["padding"] != Padding.BUCKETS, str(Padding.LONGEST))
    multiple = df["pad_multiple"].fillna(df["bucket_size"]).astype("string").fillna("")
    shortest = df["dynamic_min"].where((df["dynamic_min"] > df["pad_multiple"]).fillna(False)).astype("string").fillna("")
    buckets = df["buckets"].map(lambda lengths: "" if lengths is None else f"buckets {lengths}").astype("string")
    return comparable(df) + _joined(df, *_ALIKE) + " " + padding + " " + multiple + " " + shortest + " " + buckets


def _multiple(df: pd.DataFrame, baselines: pd.DataFrame, group: pd.Series) -> pd.Series:
    """Returns throughput divided by that of the first baseline in the same group; NA without one."""
    rates = baselines["samples_per_s"].groupby(group[baselines.index]).first()
    return (df["samples_per_s"] / group.map(rates).astype("Float64")).astype("Float64")


def comparable(df: pd.DataFrame) -> pd.Series:
    """Returns a text per row that must be equal for one trial's rate to be a multiple of another's."""
    return _joined(df, *_COMPARABLE)


def summary(df: pd.DataFrame) -> Summary:
    """Returns the trials a person asks for first; missing ones are None, so it works for any sweep, even an empty one."""
    counted = standing(df)
    fastest = _fastest_first(usable(counted, "samples_per_s"))
    counts = counted["status"].value_counts()
    return Summary(
        best=None if fastest.empty else fastest.iloc[0],
        knee=knee(pareto_front(counted)),
        counts={status: int(counts.get(str(status), 0)) for status in Status},
    )


def _fastest_first(measured: pd.DataFrame) -> pd.DataFrame:
    """Sorts the trials by throughput, as `assured`; of equals, the one that compiles faster comes first."""
    return measured.iloc[np.lexsort((floats(measured["compile_s"]), -assured(measured, "samples_per_s", at_most=False)))]


def signs_of(df: pd.DataFrame, objectives: Mapping[str, Goal | str]) -> dict[str, float]:
    """Returns the factor that makes less of each objective better; raises ValueError if one is not a column or has no goal."""
    if not objectives:
        raise ValueError("no objective is given; give at least one, such as {'samples_per_s': 'max'}")
    for name, goal in objectives.items():
        if name not in df.columns:
            raise ValueError(f"the objective {name!r} is not a column; use one of analysis.COLUMNS")
        if goal not in tuple(Goal):
            raise ValueError(f"the goal of {name!r} is {goal!r}; use 'max' or 'min'")
    return {name: 1.0 if goal == Goal.MIN else -1.0 for name, goal in objectives.items()}


def usable(df: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Returns the trials whose status is ok and that have a finite figure in each of these columns."""
    return df[is_usable(df, *names)]


def is_usable(df: pd.DataFrame, *names: str) -> npt.NDArray[np.bool_]:
    """Tells for each trial whether its status is ok and it has a finite figure in each of these columns."""
    ok = (df["status"] == Status.OK).to_numpy(dtype=bool)
    finite = np.isfinite(np.column_stack([floats(df[name]) for name in names])).all(axis=1)
    return np.logical_and(ok, finite)


def costs_of(df: pd.DataFrame, signs: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Returns the objectives, of shape (trial, objective), with less being better in each."""
    return np.column_stack([sign * floats(df[name]) for name, sign in signs.items()])


def assured_costs(df: pd.DataFrame, signs: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """Returns the objectives by `assured` figures, which fronts use, of shape (trial, objective); less is better in each."""
    return np.column_stack([sign * assured(df, name, at_most=sign > 0) for name, sign in signs.items()])


def assured(df: pd.DataFrame, name: str, *, at_most: bool) -> npt.NDArray[np.float64]:
    """Returns the column's figures as `objectives.assured` returns a record's: for noisy trials, the worse end of the interval.

    That end is infinite if it is an unbounded upper one.
    """
    values = floats(df[name])
    of, _ = INTERVALS.get(name, (name, ""))
    if (end := f"{of}_{'high' if at_most else 'low'}") not in df.columns or "stable" not in df.columns:
        return values
    with np.errstate(divide="ignore", invalid="ignore"):
        worse: npt.NDArray[np.float64] = values * floats(df[end]) / floats(df[of])
    return np.where(is_noisy(df) & ~np.isnan(worse), worse, values)


def is_noisy(df: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tells which trials' step times never had a narrow enough interval."""
    return (~df["stable"].astype("boolean")).fillna(False).to_numpy(dtype=bool)


def is_noisy_trial(trial: pd.Series) -> bool:
    """Tells whether a trial's step times never had a narrow enough interval."""
    return number(trial["stable"]) == 0


def on_front(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Tells which rows are finite and not dominated; rows that may be infinitely bad are on no front."""
    return np.asarray(~dominated(costs) & np.isfinite(costs).all(axis=1), dtype=np.bool_)


def dominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Tells which rows are dominated: another row is no worse in every column, and better in one. Less is better."""
    return np.array(pareto.dominated([tuple(row) for row in costs.tolist()]), dtype=np.bool_)


def _joined(df: pd.DataFrame, *names: str) -> pd.Series:
    """Joins the columns to one text per row, for grouping; a missing value is a value like any other."""
    rows = zip(*(df[name] for name in names), strict=True)
    return pd.Series(["".join(f" {text(value) or ''}" for value in row) for row in rows], index=df.index, dtype="string")


def floats(column: pd.Series) -> npt.NDArray[np.float64]:
    """Returns the column's figures, with NaN for missing ones."""
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _eager_fastest_first(df: pd.DataFrame) -> pd.DataFrame:
    measured = usable(df, "samples_per_s")
    return _fastest_first(measured[runs_eagerly(measured)])


def runs_eagerly(df: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tells of each trial whether nothing was compiled, also not by the script itself."""
    is_eager: npt.NDArray[np.bool_] = (df["scope"] == Scope.EAGER).fillna(False).to_numpy(dtype=bool)
    return is_eager & ~(floats(df["graphs"]) > 0)
