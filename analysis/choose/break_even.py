"""How long a job takes under each setting, and from which length on another setting is better. Pure functions.

A job of n steps takes `fixed_s + step_s · n`: the cost of its starts, plus the steps. As a function of n each setting is a line,
so the fastest settings by length form the lower envelope of all lines, whose corners are the crossovers. A job pays for a compile
on all of its GPUs at once, so money is total time times GPUs times price, and crosses over where time does.

Steps are assumed to take as long as measured, also in a job on more nodes.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.choose.decision import Line
from analysis.choose.pareto import comparable, expected_compile_s, floats, standing, usable
from analysis.choose.uncertainty import DRAWS, Attempts, absolute_deviations, deviations, drawn, noise
from analysis.formatting import number, text
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches
from compile_sweep.schema.settings import CompileSettings, Dynamic, Padding, Scope

USUAL_STEPS = 100_000  # length of the job to decide for by default

_MOST = 10**12
"""Upper limit of any figure of a job: more than any job has, and small enough that products do not overflow."""


class Starts(StrEnum):
    """What a job's starts find in compile caches."""

    COLD = "cold"
    """Nothing: every start compiles everything."""

    FIRST_COLD = "first-cold"
    """Nothing at the first start; restarts use what it left."""

    WARM = "warm"
    """Everything: every start uses what an earlier job left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job; raises ConfigError for a number that is out of range."""

    steps: int
    restarts: int = 0
    """Number of restarts, after failures or preemptions; lost steps are not counted."""
    nodes: int = 1
    gpus_per_node: int | None = None
    """None for as many as a trial had workers."""
    starts: Starts = Starts.COLD
    start_overhead_s: float = 0.0
    """Seconds of each start under any setting: scheduling, loading a checkpoint."""
    price_per_gpu_hour: float | None = None
    """Price in any currency; None if money does not matter."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("restarts", 0), ("nodes", 1), ("gpus_per_node", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name}={value} is too few for a job; use {least} or more")
            if value is not None and value > _MOST:
                raise ConfigError(f"{name}={value:g} is too many for a job; use {_MOST:,} or fewer")
        for name in ("start_overhead_s", "price_per_gpu_hour"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= _MOST:
                raise ConfigError(f"{name}={value} is not an amount; use a number from 0 to {_MOST:,}")

    def gpus(self, num_workers: int) -> int:
        """Returns the number of devices that the job occupies."""
        return self.nodes * (self.gpus_per_node or num_workers)


class Costs(NamedTuple):
    """The cost of a job under each setting."""

    table: pd.DataFrame
    """Usable trials, the fastest total first, with additional columns: `first_s` and `again_s`, the seconds of the first start
    and each further one; `starts_known`, whether that was measured for the requested kind of start; `fixed_s`, all starts
    together; `step_s`; the standard deviations of these four, such as `step_sd_s`; `total_s` with `total_s_low` and
    `total_s_high`, its 95% interval; `gpu_hours`; `cost`, NA without a price; and `best_probability` of being the fastest.
    """
    left_out: int
    """Number of usable trials that are not comparable: of another environment, number of workers or input pipeline."""
    draws: npt.NDArray[np.float64]
    """Total seconds, of shape (draw, trial), with the trials as in the table."""


class Reign(NamedTuple):
    """A range of job lengths in which one setting is the fastest."""

    trial: pd.Series
    from_steps: int
    to_steps: int | None
    """Last length of the range; None if no other setting is ever better."""
    from_s: float


@cache
def is_plain(settings_key: str) -> bool:
    """Tells whether the settings are plain `torch.compile(model)`: one length or, padded to any multiple, dynamic=auto."""
    settings = CompileSettings.parse(settings_key)
    return settings in (
        CompileSettings(scope=Scope.FULL, dynamic=Dynamic.STATIC, padding=Padding.MAX),
        CompileSettings(scope=Scope.FULL, dynamic=Dynamic.AUTO, padding=Padding.LONGEST, pad_multiple=settings.pad_multiple),
    )


def lines_of(table: pd.DataFrame) -> list[Line]:
    """Returns the line of each setting, a job's seconds by number of steps."""
    return [line_of(row) for _, row in table.iterrows()]


def line_of(row: pd.Series) -> Line:
    """Returns the line of one setting, given its row of that table."""
    return Line(*(float(row[name]) for name in Line._fields))


def baseline_place(table: pd.DataFrame) -> int | None:
    """Returns the index of what is run today: the unchanged script, or else the plainest eager setting; None if neither.

    Of several, the first is taken, which in a table of `costs` is the fastest.
    """
    settings = [CompileSettings.parse(str(key)) for key in table["settings_key"]]
    eager = [place for place, one in enumerate(settings) if one.scope is Scope.EAGER]
    return min(eager, key=lambda place: (not settings[place].as_written, _num_fields_set(settings[place])), default=None)


def baseline_key(df: pd.DataFrame) -> str | None:
    """Returns the settings key of what is run today; None before it is measured."""
    trials = usable(standing(df), "samples_per_s").sort_values("samples_per_s", ascending=False, kind="stable")
    place = baseline_place(trials)
    return None if place is None else str(trials.iloc[place]["settings_key"])


def has_tried_others(df: pd.DataFrame) -> bool:
    """Tells whether a second setting was judged, usable or not; a failed trial says nothing certain about its setting."""
    return bool(df[df["status"] != Status.FAILED]["settings_key"].nunique() > 1)


def _num_fields_set(settings: CompileSettings) -> int:
    """Counts the fields besides padding that an eager setting sets."""
    plain = CompileSettings(scope=Scope.EAGER, padding=settings.padding, pad_multiple=settings.pad_multiple)
    usual = plain.to_dict()
    return sum(usual.get(name) != value for name, value in settings.to_dict().items())


def samples_per_step(df: pd.DataFrame) -> int:
    """Returns the number of samples in a worker's step, from trials whose throughput and mean step are of the same batches.

    Where batch sizes differ, those of what is run today: a job is of so many samples, whatever the batches that it takes them in.

    Raises:
        ConfigError: No trial has both figures, or none had resident batches.
    """
    trials = usable(df, "samples_per_s")
    resident = trials[(trials["pipeline"] != "real").fillna(True).to_numpy(dtype=bool)]
    place = baseline_place(resident)
    if place is not None and (today := batch_size_of(resident.iloc[place])) is not None:
        return today
    found = [size for _, trial in resident.iterrows() if (size := batch_size_of(trial)) is not None]
    if not found and resident.empty and not trials.empty:
        raise ConfigError(
            "every usable trial took its batches from the workload's own loader: its throughput includes waits that its step "
            "times leave out, so the number of samples per step is unknown; sweep with --pipeline resident to find it"
        )
    if not found:
        raise ConfigError("no usable trial has both a throughput and its step times, so the length of a step is unknown")
    return sorted(found)[len(found) // 2]  # the mean of two might be no actual batch size


def batch_size_of(trial: pd.Series) -> int | None:
    """Returns the samples in a worker's step of a trial; None if neither the setting nor its figures say."""
    if (asked := CompileSettings.parse(str(trial["settings_key"])).batch_size) is not None:
        return asked
    rate, is_resident = number(trial["samples_per_s"]), text(trial["pipeline"]) != "real"
    if rate is None or not is_resident or not trial["step_ms"]:
        return None
    return max(1, round(rate * float(np.mean(trial["step_ms"])) / 1e3 / int(trial["num_workers"])))


def costs(df: pd.DataFrame, job: Job, *, attempts: Attempts | None = None) -> Costs:
    """Returns the cost of the job under each usable setting.

    Only trials with one environment, number of workers and input pipeline are comparable; the group with the most usable trials
    is taken.

    Raises:
        ConfigError: No trial is usable.
    """
    table, left_out = _with_starts(df, job)
    workers = table["num_workers"].to_numpy(dtype=np.int64)
    samples = samples_per_step(table) * workers.astype(np.float64)  # 64-bit integers would overflow
    attempts = table if attempts is None else attempts
    fixed = table["first_s"] + job.restarts * table["again_s"] + (1 + job.restarts) * job.start_overhead_s
    step_s = samples / table["samples_per_s"]
    first_sd_s, again_sd_s = (absolute_deviations(table, name, noise(attempts, "compile_s")) for name in ("first_s", "again_s"))
    # Returns draws of each trial's total, of shape (draw, trial).
    like = {"first_s": "compile_s", "again_s": "compile_s"}
    totals = np.empty((DRAWS, len(table)), order="F")
    for begin in range(0, len(table), _DRAWN_AT_ONCE):
        part = slice(begin, begin + _DRAWN_AT_ONCE)
        names = ("samples_per_s", "first_s", "again_s")
        draws = drawn(table.iloc[part], names, attempts=attempts, like=like, count=DRAWS, seed=begin)
        starts = draws[:, :, 1] + job.restarts * draws[:, :, 2] + (1 + job.restarts) * job.start_overhead_s
        totals[:, part] = starts + job.steps * samples[part] / draws[:, :, 0]
    low, high = np.quantile(totals, [0.025, 0.975], axis=0)
    total = (fixed + job.steps * step_s).astype("Float64")
    gpu_hours = total * np.array([float(job.gpus(int(number))) for number in workers]) / 3600
    price = gpu_hours * (np.nan if job.price_per_gpu_hour is None else job.price_per_gpu_hour)
    shortest = np.bincount(totals.argmin(axis=1), minlength=len(table)) / len(totals)
    table = table.assign(
        fixed_s=fixed, step_s=step_s, total_s=total, total_s_low=low, total_s_high=high, gpu_hours=gpu_hours, cost=price,
        first_sd_s=first_sd_s, again_sd_s=again_sd_s, fixed_sd_s=np.hypot(first_sd_s, job.restarts * again_sd_s),
        step_sd_s=floats(step_s) * deviations(table, "samples_per_s", noise(attempts, "samples_per_s")),
        best_probability=shortest,
    )  # fmt: skip
    order = np.argsort(floats(total), kind="stable")
    return Costs(table.iloc[order], left_out, totals[:, order])


def reigns(table: pd.DataFrame) -> list[Reign]:
    """Returns the fastest setting for every job length, in order of length: the lower envelope of the settings' lines."""
    fixed, step = floats(table["fixed_s"]), floats(table["step_s"])
    at = int(np.lexsort((step, fixed + step))[0])
    found: list[tuple[int, int]] = [(at, 1)]
    while len(quicker := np.flatnonzero(step < step[at])):
        crossings = (fixed[quicker] - fixed[at]) / (step[at] - step[quicker])
        begins = np.floor(crossings) + 1  # at the crossing itself both take equally long
        nearest = np.lexsort((step[quicker], fixed[quicker] + begins * step[quicker], begins))[0]
        at, begin = int(quicker[nearest]), max(int(begins[nearest]), found[-1][1])
        if begin == found[-1][1]:
            found.pop()
        found.append((at, begin))
    ends = [begin - 1 for _, begin in found[1:]]
    return [
        Reign(trial=table.iloc[position], from_steps=begin, to_steps=end, from_s=float(fixed[position] + begin * step[position]))
        for (position, begin), end in zip(found, [*ends, None], strict=True)
    ]


_DRAWN_AT_ONCE = 500  # number of trials that are drawn at once; bounds the memory for a sweep of thousands


def _with_starts(df: pd.DataFrame, job: Job) -> tuple[pd.DataFrame, int]:
    """Returns the comparable usable trials with the cost of their starts, and the number of other usable trials."""
    trials: pd.DataFrame = usable(standing(df), "samples_per_s")
    cold = expected_compile_s(trials)
    trials, cold = trials[cold.notna()], cold[cold.notna()]
    if trials.empty:
        raise ConfigError("no trial is usable, so how long a job would take is unknown")
    kind = comparable(df)
    among = kind[trials.index]
    counted = trials.groupby(among)["num_workers"].agg(["size", "max"]).sort_values(["size", "max"], kind="stable")
    alike = (among == counted.index[-1]).to_numpy(dtype=bool)
    trials, cold, left_out = trials[alike], cold[alike], int((~alike).sum())
    warm = warm_compiling_s(trials, df[(kind == counted.index[-1]).to_numpy(dtype=bool)])
    known = warm.notna()
    if job.starts is Starts.COLD:
        warm, known = cold, trials["compile_s"].notna()  # otherwise it is a warm trial's estimate
    first = cold if job.starts is Starts.FIRST_COLD else warm.fillna(cold)
    again = warm.fillna(cold)
    return trials.assign(first_s=first.astype("Float64"), again_s=again.astype("Float64"), starts_known=known), left_out


def warm_compiling_s(trials: pd.DataFrame, df: pd.DataFrame) -> pd.Series:
    """Returns the seconds that a start takes to restore a setting's own artifacts and compile the rest; NA if not measured.

    It corresponds to `compile_s` of a cold start: neither includes the warm-up's steps or loading. The sources, in order: a
    recorded warm start, minus its warm-up's steps, which the trial's own warm-up reveals; a warm trial. Eager compiles nothing,
    so its starts do not change.
    """
    steps_s = trials["warmup_s"].fillna(trials["warm_warmup_s"]) - trials["compile_s"].fillna(trials["warm_compile_s"])
    started = (trials["warm_start_restore_s"].fillna(0) + trials["warm_start_warmup_s"] - steps_s).clip(lower=0)
    warm = df[(df["caches"] == Caches.WARM).to_numpy(dtype=bool)].dropna(subset=["warm_compile_s"])
    taken = (warm["restore_s"].fillna(0) + warm["warm_compile_s"]).groupby([warm["settings_key"], warm["num_workers"]]).last()
    keys = pd.MultiIndex.from_frame(trials[["settings_key", "num_workers"]])
    trial = pd.Series(taken.reindex(keys).to_numpy(), index=trials.index, dtype="Float64")
    eager = trials["compile_s"].where((trials["scope"] == Scope.EAGER).to_numpy(dtype=bool))
    return started.astype("Float64").fillna(trial).fillna(eager)
