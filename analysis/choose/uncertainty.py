"""How far a trial's figures may be off, and draws of their possible true values.

A figure has two errors. *Within a run* it scatters as its record's 95% interval says, which is a bootstrap over the run's
timed steps. *Between runs* the same setting gives different results, which no single run can show: that scatter is estimated from
settings measured more than once in one sweep or, if there are too few, taken from this project's benchmarks (`USUAL`). A
draw moves each figure by both, as a normal deviation of its logarithm, so that no draw is negative.

Also computes the Pareto front with its uncertainty: each trial's probability of being on it, and which trials cannot be told
apart. Pure functions.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.choose.pareto import (
    DEFAULT_OBJECTIVES,
    assured_costs,
    costs_of,
    dominated,
    floats,
    is_usable,
    on_front,
    signs_of,
    usable,
)
from analysis.formatting import percent, text
from compile_sweep.schema.objectives import INTERVALS, Goal
from compile_sweep.schema.record import Caches

DRAWS = 1000  # gives a probability of 5% a standard error of 1.4 percentage points or less
Z95 = 1.96  # half-width of a normal distribution's 95% interval, in standard deviations

_MEMORY, _CPU = "peak_memory_bytes", "cpu"
"""The figure that means something else on a CPU, and the value of a record's `device` there."""

_SCRIPT = "script"  # the value of a record's `pipeline` for a person's script

ENOUGH_REPEATS = 5
"""Number of measurements beyond each setting's first, over all settings, from which on their scatter is trusted."""


class Noise(NamedTuple):
    """Standard deviation of a figure between runs of one setting."""

    relative: float  # standard deviation of the figure's logarithm
    floor: float  # minimum scatter, in the figure's own unit
    repeats: int  # number of repeated measurements it was estimated from; 0 for the usual noise
    of: str = "on an H200"  # what the usual noise was measured on

    @property
    def near_floor(self) -> float:
        """Value below which a figure is mostly noise; there, scatter is additive, since a logarithm's would span decades."""
        return self.floor / _LOGARITHMIC_UP_TO

    @property
    def origin(self) -> str:
        """Describes where the noise estimate comes from."""
        if self.repeats:
            measurements = "measurement" if self.repeats == 1 else "measurements"
            also = "" if self.repeats >= ENOUGH_REPEATS else f", and as usual {self.of}"
            return f"from {self.repeats} repeated {measurements} of the same code{also}"
        return (
            f"as usual {self.of}, because too few settings were repeated with the same code" if self.relative else "none is known"
        )


_LOGARITHMIC_UP_TO = 0.5
"""Relative deviation from the floor alone above which draws are normal in the figure itself, truncated at zero."""

_UNBOUNDED = float(np.log(10))  # standard deviation of the logarithm for a figure whose interval is unbounded
_LARGEST = 1e150  # largest relative deviation, whose square still is a finite float

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
"""Noise in H200 records. Four cold compiles of one setting at a time scattered by 4 to 5% (`benchmarks/trials/contention.py`);
eager, which compiles nothing, took between 0.5 and 1.7 s. Rates of two trials of one run differed by 0.04%, of two sweeps by 0.9
%. Memory is left out: peaks of torch's allocator on a GPU repeat to the byte.
"""

RESIDENT = Noise(relative=0.005, floor=0.0, repeats=0, of="on CPUs")
"""Noise of `peak_memory_bytes` on a CPU, which is the process's peak resident size and never repeats exactly. Twelve settings of
the captioning workload that at least two of three committed CPU sweeps measured scatter by 0.47%, from 14 repeats, at most by
1.4% (`docs/results/search/live-captioning-tiny-cpu/{gain,random}` and `benchmarks/tables/captioning-tiny-cpu`, on two machines).
"""


SCRIPT_ON_CPU = Noise(relative=0.25, floor=0.0, repeats=0, of="for scripts on CPUs")
"""Noise of a script's rates on a CPU, whose trials have no eager steps beside them that would show how fast the machine was. On
two cores shared with other work, 18 trials of one script as it is differed from the one before by 25% (standard deviation, less
the factor √2 of a difference), though each was certain to 5% (docs/analysis.md).
"""


Attempts = pd.DataFrame | Sequence[pd.DataFrame]  # all attempts of a sweep, or of several, as one frame each


def noise(attempts: Attempts, name: str) -> Noise:
    """Estimates how much the figure differs between runs of the same setting.

    Args:
        attempts: Result of `load` with `all_attempts`; with one attempt per setting, the usual noise is returned. Pass several
            sweeps as one frame each: runs of a setting in different sweeps are not repeats, because something may have changed in
            between. Rates of scripts count what was repeated from the first repeat on, with the usual noise as one more.
        name: Name of the figure's column; a figure that is not in `USUAL` counts as exact unless it was repeated, except for
            memory on a CPU.
    """
    sweeps = [attempts] if isinstance(attempts, pd.DataFrame) else attempts
    is_on_cpu, usual = _any_is(sweeps, "device", _CPU), USUAL.get(name, EXACT)
    is_rate_of_script = usual is _RATE and _any_is(sweeps, "pipeline", _SCRIPT)
    if is_on_cpu and (name == _MEMORY or is_rate_of_script):
        usual = RESIDENT if name == _MEMORY else SCRIPT_ON_CPU
    groups = [values for sweep in sweeps for values in _repeated(sweep, name)]
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < ENOUGH_REPEATS and not (is_rate_of_script and freedom):
        return usual
    # relative to the first value, so that equal values scatter by exactly zero
    logarithms = [np.log(values) - np.log(values[0]) for values in groups]
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logarithms)
    if freedom < ENOUGH_REPEATS:
        together = (usual.relative**2 + squares) / (1 + freedom)
        return usual._replace(relative=float(np.sqrt(together)), repeats=freedom)
    return Noise(relative=float(np.sqrt(squares / freedom)), floor=usual.floor, repeats=freedom)


def deviations(trials: pd.DataFrame, name: str, between: Noise) -> npt.NDArray[np.float64]:
    """Returns the relative standard deviation of each trial's figure: from its interval and the noise between runs together.

    A figure without an interval uses that of the figure it is a multiple of (`INTERVALS`), as useful tokens per second use that
    of samples per second.
    """
    values = floats(trials[name])
    within = np.zeros(len(trials))
    of = INTERVALS.get(name, (name,))[0]
    if {of, f"{of}_low", f"{of}_high"} <= set(trials.columns):
        centre, low, high = (floats(trials[column]) for column in (of, f"{of}_low", f"{of}_high"))
        with np.errstate(divide="ignore", invalid="ignore"):
            below = np.where(low > 0, np.log(centre) - np.log(low), np.nan)
            above = np.where(np.isfinite(high), np.log(high) - np.log(centre), np.nan)
        # If an interval reaches 0 or has no upper end, the other end represents both.
        width = np.where(np.isnan(below), above, below) + np.where(np.isnan(above), below, above)
        is_unbounded = np.isnan(width) & (low <= 0) & (high == np.inf)
        within = np.where(is_unbounded, _UNBOUNDED, np.where(np.isfinite(width), np.maximum(width, 0.0) / (2 * Z95), 0.0))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        floor = np.where(values > 0, np.minimum(between.floor / values, _LARGEST), 0.0)
        relative: npt.NDArray[np.float64] = np.sqrt(within**2 + between.relative**2 + floor**2)
    return relative


def drawn(
    trials: pd.DataFrame,
    names: tuple[str, ...],
    *,
    attempts: Attempts | None = None,
    like: Mapping[str, str] = MappingProxyType({}),
    count: int = DRAWS,
    seed: int = 0,
) -> npt.NDArray[np.float64]:
    """Returns possible true values of the trials' figures, of shape (draw, trial, figure); the same in every call.

    Args:
        trials: Rows whose figures in `names` are all finite.
        like: For columns that `load` does not return, the column whose noise between runs they have.
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


def _any_is(sweeps: Sequence[pd.DataFrame], name: str, value: str) -> bool:
    return any(name in attempts and bool((attempts[name] == value).fillna(False).any()) for attempts in sweeps)


def _repeated(attempts: pd.DataFrame, name: str) -> list[npt.NDArray[np.float64]]:
    """Returns the figures of each setting with several valid measurements: usable, undisturbed, in one environment."""
    if name not in attempts or "settings_key" not in attempts or not attempts["settings_key"].duplicated().any():
        return []
    values = floats(attempts[name])
    fit = (attempts["caches"] == Caches.COLD) & ~attempts["contended"].fillna(False)
    fit &= is_usable(attempts, name) & (values > 2 * USUAL.get(name, EXACT).floor)
    alike = zip(*(attempts[column] for column in ("settings_key", "num_workers", "environment_key")), strict=True)
    groups: dict[tuple[Any, ...], list[float]] = {}
    for is_fit, key, value in zip(fit.to_numpy(dtype=bool), alike, values, strict=True):
        if is_fit:
            groups.setdefault(tuple(text(part) for part in key), []).append(value)
    return [np.array(group) for group in groups.values() if len(group) > 1]


def chance(share: float) -> str:
    """Formats a fraction of draws, never as certain or impossible, since draws are finite."""
    least = 2 / DRAWS
    if share > 1 - least:
        return f"over {percent(1 - least)}"
    return f"under {percent(least)}" if share < least else percent(share)


POSSIBLE = 0.05  # probability from which a trial that is not on the front counts as possibly on it

_FAR = 3.0
"""Standard deviations by which both of two trials must be off at once for their order to change, which happens in one of 30,000
draws: a trial this far behind another gets probability 0 without drawing.
"""

_DRAWN_AT_ONCE = 20_000_000  # number of comparisons at once; bounds the memory for a sweep of thousands of trials


class UncertainFront(NamedTuple):
    """A front, what might be on it, and the evidence."""

    trials: pd.DataFrame
    """The front and the trials that might be on it, ascending in the last objective, with four additional columns: `on_front`, as
    in `pareto_front`; `front_probability`; `equal_to`, the settings_key of the trial it cannot be told apart from, its own
    if no earlier one qualifies; `ties`, how many trials share that value.
    """
    noise: Mapping[str, Noise]
    """Noise of each objective between runs."""


def uncertain_front(
    df: pd.DataFrame,
    objectives: Mapping[str, Goal | str] = DEFAULT_OBJECTIVES,
    *,
    attempts: pd.DataFrame | None = None,
) -> UncertainFront:
    """Returns the Pareto front with each trial's probability of being on it.

    Every draw moves all trials' figures by their uncertainty, and the fraction of draws in which a trial is not dominated is its
    probability. Two trials are equal if their difference is within the 95% interval in every objective. Groups have leaders: the
    most probable trial takes all that equal it, then the most probable one of the rest does, so that no chain of small steps
    groups very different trials.

    Args:
        df: Trials as `load` returns them.
        objectives: "max" or "min", by column; usually two or three.
        attempts: Result of `load` with `all_attempts`, to see how settings scatter between runs.

    Raises:
        ValueError: The objectives are invalid as in `pareto_front`.
    """
    signs = signs_of(df, objectives)
    candidates, between, chances = _chances(df, signs, attempts, DRAWS)
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
) -> pd.Series:
    """Returns each trial's probability of being on the front; NA for trials that cannot be, such as those that are not ok.

    Args:
        objectives: As in `uncertain_front`.
        attempts: Result of `load` with `all_attempts`, to see how settings scatter between runs.

    Raises:
        ValueError: The objectives are invalid as in `pareto_front`.
    """
    candidates, _, chances = _chances(df, signs_of(df, objectives), attempts, count)
    return pd.Series(chances, index=candidates.index, dtype="Float64").reindex(df.index)


def _chances(
    df: pd.DataFrame, signs: Mapping[str, float], attempts: pd.DataFrame | None, count: int
) -> tuple[pd.DataFrame, dict[str, Noise], npt.NDArray[np.float64]]:
    """Returns the trials that can be on the front, the noise between runs, and the fraction of draws in which each is on it."""
    between = {name: noise(df if attempts is None else attempts, name) for name in signs}
    candidates = usable(df, *signs)
    chances = np.zeros(len(candidates))
    near = _near(candidates, signs, between)
    if not len(near):
        return candidates, between, chances
    factors = np.array(list(signs.values()))
    costs = factors * drawn(candidates.iloc[near], tuple(signs), attempts=attempts, count=count)
    chances[near] = (_undominated_in_two(costs) if len(signs) == 2 else _undominated(costs)) / count
    return candidates, between, chances


def _undominated(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns, for costs of shape (draw, trial, objective), in how many draws each trial is not dominated; tests every pair."""
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
    """Does what `_undominated` does for two objectives, by sorting: a trial must be below all earlier ones in the second."""
    count, trials, _ = costs.shape
    order = np.lexsort((costs[:, :, 1], costs[:, :, 0]), axis=-1)
    first, second = (np.take_along_axis(costs[:, :, at], order, axis=1) for at in (0, 1))
    lowest_before = np.minimum.accumulate(np.column_stack([np.full(count, np.inf), second[:, :-1]]), axis=1)
    is_new = second < lowest_before
    lowest_at = np.maximum.accumulate(np.where(is_new, np.arange(trials), 0), axis=1)
    equal = (second == np.take_along_axis(second, lowest_at, axis=1)) & (first == np.take_along_axis(first, lowest_at, axis=1))
    return np.bincount(order[is_new | equal], minlength=trials).astype(np.float64)


def _near(candidates: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """Returns positions of the candidates that are not behind another one by far more than the uncertainty of both."""
    margins = np.column_stack([_FAR * absolute_deviations(candidates, name, between[name]) for name in signs])
    costs = costs_of(candidates, signs)
    at_worst: npt.NDArray[np.float64] = costs + margins
    at_worst = at_worst[~dominated(at_worst)]
    worse_everywhere = np.asarray((at_worst[None, :, :] < (costs - margins)[:, None, :]).all(axis=2))
    return np.flatnonzero(~worse_everywhere.any(axis=1))


def _leaders(trials: pd.DataFrame, signs: Mapping[str, float], between: Mapping[str, Noise]) -> npt.NDArray[np.intp]:
    """Returns, for each trial, the position of its group's leader."""
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
    """Returns the standard deviation of each trial's figure, in the figure's own unit."""
    values = trials[name].to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(values > 0, np.maximum(deviations(trials, name, between) * values, between.floor), between.floor)
