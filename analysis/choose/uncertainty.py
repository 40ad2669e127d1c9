"""How far a trial's figures may be off, and draws of what they may truly be.

A figure errs in two ways. *Within a run* it scatters as its record's 95 % interval says, which is a bootstrap over the run's
timed steps. *Between runs* the same setting comes out differently, which no single run can show: that is taken from settings
measured more than once in one sweep, or, where there are too few of them, from what this project's benchmarks saw (`USUAL`). A
draw moves each figure by both, as a normal deviation of its logarithm, so that no draw is negative.

The Pareto front as certain as it is: how probable each trial is on it, and which cannot be told apart. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.choose.pareto import DEFAULT_OBJECTIVES, assured_costs, costs_of, dominated, floats, on_front, signs_of, usable
from analysis.formatting import percent
from compile_sweep.schema.objectives import INTERVALS, Goal
from compile_sweep.schema.record import Caches

DRAWS = 1000
"""Makes a share of 5 % certain to 1.4 percentage points."""

Z95 = 1.96
"""A 95 % interval of a normal distribution reaches so many standard deviations to either side."""

_MEMORY, _CPU = "peak_memory_bytes", "cpu"
"""The figure that is something else on a CPU, and what a record's `device` says there."""

ENOUGH_REPEATS = 5
"""Measurements beyond each setting's first, all settings together, from which on their scatter is trusted."""


class Noise(NamedTuple):
    """Standard deviation of a figure between runs of one setting."""

    relative: float
    """Of its logarithm."""
    floor: float
    """In the figure's own unit: what it scatters by however small it is."""
    repeats: int
    """Repeated measurements it was found from; 0 where it is the usual one."""
    of: str = "on an H200"
    """What the usual one was seen on."""

    @property
    def near_floor(self) -> float:
        """A figure under this is mostly noise, and a logarithm's would reach across decades: there it adds up instead."""
        return self.floor / _LOGARITHMIC_UP_TO

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""
        if self.repeats:
            return f"from {self.repeats} repeated measurements of the same code"
        return f"as usual {self.of}, for too few settings were repeated with the same code" if self.relative else "none is known"


_LOGARITHMIC_UP_TO = 0.5
"""Relative deviation by the floor alone above which draws are normal in the figure itself, cut off at zero."""

_UNBOUNDED = float(np.log(10))
"""Deviation of the logarithm of a figure whose interval is all that is not negative."""

EXACT = Noise(relative=0.0, floor=0.0, repeats=0)

_COMPILE = Noise(relative=0.05, floor=0.5, repeats=0)
_RATE = Noise(relative=0.005, floor=0.0, repeats=0)

USUAL: Mapping[str, Noise] = MappingProxyType(
    {
        "compile_s": _COMPILE,
        "first_step_s": _COMPILE,
        "warmup_s": _COMPILE,
        "warm_compile_s": _COMPILE,
        "warm_start_s": _COMPILE,
        "samples_per_s": _RATE,
        "samples_per_s_per_worker": _RATE,
        "tokens_per_s": _RATE,
        "step_ms_median": _RATE,
    }
)
"""Of H200 records. Four cold compiles of one setting at a time scattered by 4 to 5 % (`benchmarks/contention.py`); eager's, which
compiles nothing, lay between 0.5 and 1.7 s. Rates of two trials of one run differed by 0.04 %, of two sweeps by 0.9 %. Memory is
not in it: peaks of torch's allocator on a GPU come out alike to the byte."""

RESIDENT = Noise(relative=0.005, floor=0.0, repeats=0, of="on CPUs")
"""Of `peak_memory_bytes` on a CPU, which is the process's largest resident set, and no two runs' is alike. Twelve settings of the
captioning workload that two or all of three committed CPU sweeps measured scatter by 0.47 %, by 14 repeats, and by 1.4 % at most
(`docs/results/search/live-captioning-tiny-cpu/{gain,random}` and `benchmarks/tables/captioning-tiny-cpu`, of two machines)."""


def noise(attempts: pd.DataFrame | Sequence[pd.DataFrame], name: str) -> Noise:
    """How much the figure differs between runs of the same setting.

    Args:
        attempts: what `load` returns with `all_attempts`; of one attempt each, the usual noise comes back. Of several sweeps,
            one frame each: runs of a setting in different sweeps are not repeats, for what lies between the sweeps may be a
            change.
        name: a column of figures; one that is not in `USUAL` counts as exact where nothing was repeated, but for memory on a CPU.
    """
    sweeps = [attempts] if isinstance(attempts, pd.DataFrame) else attempts
    usual = RESIDENT if name == _MEMORY and any(map(_is_on_cpu, sweeps)) else USUAL.get(name, EXACT)
    groups = [values for sweep in sweeps for values in _repeated(sweep, name)]
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < ENOUGH_REPEATS:
        return usual
    # from the first on, so that values which are alike scatter by nothing at all
    logarithms = [np.log(values) - np.log(values[0]) for values in groups]
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logarithms)
    return Noise(relative=float(np.sqrt(squares / freedom)), floor=usual.floor, repeats=freedom)


def deviations(trials: pd.DataFrame, name: str, between: Noise) -> npt.NDArray[np.float64]:
    """Standard deviation of each trial's figure, relative to it: its interval's and the noise between runs, together.

    A figure without an interval of its own has that of the one it is a multiple of (`INTERVALS`), as useful tokens a second have
    that of samples a second.
    """
    values = floats(trials[name])
    within = np.zeros(len(trials))
    of = INTERVALS.get(name, (name,))[0]
    if {of, f"{of}_low", f"{of}_high"} <= set(trials.columns):
        centre, low, high = (floats(trials[column]) for column in (of, f"{of}_low", f"{of}_high"))
        with np.errstate(divide="ignore", invalid="ignore"):
            below = np.where(low > 0, np.log(centre) - np.log(low), np.nan)
            above = np.where(np.isfinite(high), np.log(high) - np.log(centre), np.nan)
        # Of an interval that reaches down to 0, or has no upper end, the other end stands for both.
        width = np.where(np.isnan(below), above, below) + np.where(np.isnan(above), below, above)
        is_unbounded = np.isnan(width) & (low <= 0) & (high == np.inf)
        within = np.where(is_unbounded, _UNBOUNDED, np.where(np.isfinite(width), np.maximum(width, 0.0) / (2 * Z95), 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        floor = np.where(values > 0, between.floor / values, 0.0)
    relative: npt.NDArray[np.float64] = np.sqrt(within**2 + between.relative**2 + floor**2)
    return relative


def drawn(
    trials: pd.DataFrame,
    names: tuple[str, ...],
    *,
    attempts: pd.DataFrame | None = None,
    like: Mapping[str, str] = MappingProxyType({}),
    count: int = DRAWS,
    seed: int = 0,
) -> npt.NDArray[np.float64]:
    """What the trials' figures may truly be, of shape (draw, trial, figure); the same in every call.

    Args:
        trials: rows whose figures in `names` are all finite.
        names: the columns.
        attempts: every attempt of the sweep, to see how settings scatter between runs.
        like: column → the column whose noise between runs it has, where it is none of `load`'s.
        count: how many draws.
        seed: of the draws.
    """
    chance = np.random.default_rng(seed)
    found = np.empty((count, len(trials), len(names)))
    for at, name in enumerate(names):
        between = noise(trials if attempts is None else attempts, like.get(name, name))
        values, relative = floats(trials[name]), deviations(trials, name, between)
        unit = chance.standard_normal((count, len(trials)))
        near_floor = values < between.near_floor
        added = np.maximum(values + unit * np.hypot(between.floor, between.relative * values), 0.0)
        found[:, :, at] = np.where(near_floor, added, values * np.exp(unit * np.where(near_floor, 0.0, relative)))
    return found


def _is_on_cpu(attempts: pd.DataFrame) -> bool:
    return "device" in attempts and bool((attempts["device"] == _CPU).fillna(False).any())


def _repeated(attempts: pd.DataFrame, name: str) -> list[npt.NDArray[np.float64]]:
    """The figures of each setting that has several by which it may be judged: usable, alone, in one environment."""
    if name not in attempts or "settings_key" not in attempts:
        return []
    alike = ["settings_key", "num_workers", "environment_key"]
    looked_at = {*alike, "status", "caches", "contended", name}  # of about a hundred columns, each of which is copied by rows
    trials = usable(attempts[sorted(looked_at)], name)
    floor = USUAL.get(name, EXACT).floor
    fit = (trials["caches"] == Caches.COLD) & ~trials["contended"].fillna(False) & (floats(trials[name]) > 2 * floor)
    trials = trials[fit.to_numpy(dtype=bool)]
    several = trials[trials.duplicated(alike, keep=False)]
    return [floats(group[name]) for _, group in several.groupby(alike, dropna=False)]


def chance(share: float) -> str:
    """A share of draws, of which there are too few to say that something is certain, or cannot be."""
    least = 2 / DRAWS
    if share > 1 - least:
        return f"over {percent(1 - least)}"
    return f"under {percent(least)}" if share < least else percent(share)


POSSIBLE = 0.05
"""Probability from which on a trial that is not on the front might be."""

_FAR = 3.0
"""Standard deviations by which both of two trials must be off at once for their order to turn, which one draw in 30,000 has: a
trial so far behind another has probability 0 without drawing."""

_DRAWN_AT_ONCE = 20_000_000
"""Comparisons; bounds the memory of a sweep of thousands of trials."""


class UncertainFront(NamedTuple):
    """A front, what might be on it, and what that rests on."""

    trials: pd.DataFrame
    """The front and the trials that might be on it, ascending in the last objective, with four columns more: `on_front`, as
    `pareto_front` has it; `front_probability`; `equal_to`, the settings_key of the trial it cannot be told apart from, its own
    if there is none before it; `ties`, how many trials share that."""
    noise: Mapping[str, Noise]
    """Of each objective between runs."""


def uncertain_front(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    attempts: pd.DataFrame | None = None,
    count: int = DRAWS,
    seed: int = 0,
) -> UncertainFront:
    """The Pareto front with each trial's probability of being on it.

    Every draw moves all trials' figures by what they may be off (`uncertainty.py`), and the share of draws in which a trial is
    dominated by none is its probability. Two trials are equal when in no objective their difference is beyond a 95 % interval.
    Equality goes by leaders: the most probable trial takes all that equal it, then the next of the rest, so that no chain of
    small steps makes one group of very different trials.

    Args:
        df: trials as `load` returns them.
        objectives: column → "max" or "min"; two or three, as a rule.
        attempts: what `load` returns with `all_attempts`, to see how settings scatter between runs.
        count: draws.
        seed: of the draws.

    Raises:
        ValueError: as `pareto_front`.
    """
    signs = signs_of(df, objectives)
    candidates, between, chances = _chances(df, signs, attempts, count, seed)
    is_on_front = on_front(assured_costs(candidates, signs))
    kept = is_on_front | (chances >= POSSIBLE)
    last, *others = reversed(signs)
    trials = candidates.assign(on_front=is_on_front, front_probability=chances)[kept].sort_values([last, *others], kind="stable")
    leaders = _leaders(trials, signs, between)
    keys = trials["settings_key"].to_numpy() if "settings_key" in trials else trials.index.to_numpy()
    sizes = np.bincount(leaders, minlength=len(trials)) if len(trials) else np.zeros(0, dtype=np.int64)
    return UncertainFront(trials.assign(equal_to=keys[leaders], ties=sizes[leaders]), between)


def front_probability(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    attempts: pd.DataFrame | None = None,
    count: int = DRAWS,
    seed: int = 0,
) -> pd.Series:
    """The probability of each of the frame's trials of being on the front; NA for those that cannot be, as not ok.

    Args:
        df: trials as `load` returns them.
        objectives: as in `uncertain_front`.
        attempts: likewise.
        count: draws.
        seed: of the draws.

    Raises:
        ValueError: as `pareto_front`.
    """
    candidates, _, chances = _chances(df, signs_of(df, objectives), attempts, count, seed)
    return pd.Series(chances, index=candidates.index, dtype="Float64").reindex(df.index)


def _chances(
    df: pd.DataFrame, signs: Mapping[str, float], attempts: pd.DataFrame | None, count: int, seed: int
) -> tuple[pd.DataFrame, dict[str, Noise], npt.NDArray[np.float64]]:
    """Which trials can be on the front, the noise between runs, and in what share of draws each is dominated by none."""
    between = {name: noise(df if attempts is None else attempts, name) for name in signs}
    candidates = usable(df, *signs)
    chances = np.zeros(len(candidates))
    near = _near(candidates, signs, between)
    if not len(near):
        return candidates, between, chances
    factors = np.array(list(signs.values()))
    costs = factors * drawn(candidates.iloc[near], tuple(signs), attempts=attempts, count=count, seed=seed)
    chances[near] = (_undominated_in_two(costs) if len(signs) == 2 else _undominated(costs)) / count
    return candidates, between, chances


def _undominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For costs of shape (draw, trial, objective), in how many draws each trial is dominated by none: every pair compared."""
    count, trials, objectives = costs.shape
    at_once = max(1, _DRAWN_AT_ONCE // (trials**2 * objectives))
    found = np.zeros(trials)
    for begin in range(0, count, at_once):
        some = costs[begin : begin + at_once]
        no_worse = np.asarray((some[:, :, None, :] <= some[:, None, :, :]).all(axis=3))
        better = np.asarray((some[:, :, None, :] < some[:, None, :, :]).any(axis=3))
        found += (~(no_worse & better).any(axis=1)).sum(axis=0)
    return found


def _undominated_in_two(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same of two objectives, by sorting: each trial must be below all before it in the second, or equal to the lowest."""
    count, trials, _ = costs.shape
    order = np.lexsort((costs[:, :, 1], costs[:, :, 0]), axis=-1)
    first, second = (np.take_along_axis(costs[:, :, at], order, axis=1) for at in (0, 1))
    lowest_before = np.minimum.accumulate(np.column_stack([np.full(count, np.inf), second[:, :-1]]), axis=1)
    is_new = second < lowest_before
    lowest_at = np.maximum.accumulate(np.where(is_new, np.arange(trials), 0), axis=1)
    equal = (second == np.take_along_axis(second, lowest_at, axis=1)) & (first == np.take_along_axis(first, lowest_at, axis=1))
    return np.bincount(order[is_new | equal], minlength=trials).astype(np.float64)


def _near(candidates: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """Positions of the candidates that are not behind another one by far more than both may be off."""
    margins = np.column_stack([_FAR * absolute_deviations(candidates, name, between[name]) for name in signs])
    costs = costs_of(candidates, signs)
    at_worst: npt.NDArray[np.float64] = costs + margins
    at_worst = at_worst[~dominated(at_worst)]
    worse_everywhere = np.asarray((at_worst[None, :, :] < (costs - margins)[:, None, :]).all(axis=2))
    return np.flatnonzero(~worse_everywhere.any(axis=1))


def _leaders(trials: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """For each trial the position of the one that leads its group."""
    costs = costs_of(trials, signs)
    off = np.column_stack([absolute_deviations(trials, name, between[name]) for name in signs]) if len(trials) else costs
    leaders = np.full(len(trials), -1, dtype=np.intp)
    certain_first = np.argsort(-trials["front_probability"].to_numpy(dtype=np.float64), kind="stable")
    for leader in certain_first:
        if leaders[leader] == -1:
            apart = np.abs(costs - costs[leader])
            equal = (apart <= Z95 * np.sqrt(off**2 + off[leader] ** 2)).all(axis=1)
            leaders[(leaders == -1) & equal] = leader
    return leaders


def absolute_deviations(trials: pd.DataFrame, name: str, between: Noise) -> npt.NDArray[np.float64]:
    """Standard deviation of each trial's figure, in the figure's own unit."""
    values = trials[name].to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(values > 0, deviations(trials, name, between) * values, between.floor)
