"""How far a trial's figures may be off, and draws of what they may truly be.

A figure errs in two ways. *Within a run* it scatters as its record's 95 % interval says, which is a bootstrap over the run's
timed steps. *Between runs* the same setting comes out differently, which no single run can show: that is taken from settings
measured more than once in one sweep, or, where there are too few of them, from what this project's benchmarks saw (`USUAL`). A
draw moves each figure by both, as a normal deviation of its logarithm, so that no draw is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.formatting import percent
from analysis.pareto import floats, usable
from orchestrator.objectives import INTERVALS
from orchestrator.records import Caches

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
            one frame each: runs of a setting in different sweeps are no repeats, for what lies between the sweeps may be a
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
