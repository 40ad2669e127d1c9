"""What changed between two sweeps, setting by setting: figures with the certainty of their change, and news. Pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.choose.pareto import standing
from analysis.choose.uncertainty import EXACT, USUAL, Z95, Noise, deviations, noise
from analysis.formatting import MISSING, gib, number, text
from analysis.load import SweepInfo
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Goal
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.settings import Scope

FIGURES: Mapping[str, Goal] = MappingProxyType(
    {
        "samples_per_s": Goal.MAX,
        "speedup_eager": Goal.MAX,
        "compile_s": Goal.MIN,
        "warm_start_s": Goal.MIN,
        "peak_memory_bytes": Goal.MIN,
    }
)
"""Figures that are always compared, and their better direction."""

_COMMIT_CHARS = 10  # length of a commit's name, which is unique enough

_OF_COMPILING = ("compile_s", "warm_start_s")

_SAME = ("workload", "size")  # what two sweeps must have in common to be comparable


class Change(NamedTuple):
    """How a figure of one setting changed."""

    before: float
    after: float
    share: float | None  # after divided by before, minus 1; None if it was 0
    low: float | None  # lower end of the share's 95% interval; None if the share is meaningless, see `is_ratio`
    high: float | None
    is_significant: bool  # whether the interval excludes 0; for figures without noise, whether there is any change

    @property
    def is_ratio(self) -> bool:
        """Whether the share is meaningful: neither figure is 0, nor so small that it is mostly noise."""
        return self.low is not None


class Kind(StrEnum):
    """Kinds of news."""

    FAILURE = "failures"
    BREAK = "breaks"
    RECOMPILE = "recompiles"
    FALLBACK = "fallbacks"
    CUDAGRAPH_SKIP = "cudagraph-skips"
    NUMERICS = "numerics"
    FIXED = "fixed"
    OTHERWISE = "otherwise"
    """Not usable in both sweeps for another reason, such as having been stopped early, which is not a failure."""


class News(NamedTuple):
    """A change other than that of a figure."""

    kind: Kind
    sentence: str


class Pair(NamedTuple):
    """One setting in both sweeps."""

    label: str
    before: pd.Series
    after: pd.Series
    changes: Mapping[str, Change]  # changes of those `FIGURES` that both sweeps have
    news: Sequence[News]


class Comparison(NamedTuple):
    """Two sweeps side by side."""

    pairs: Sequence[Pair]
    noise: Mapping[str, Noise]
    """Noise between runs by figure, from repetitions on either side; never from the difference between the sweeps."""
    only_before: Sequence[str]
    """Labels of settings without a record in the second sweep."""
    only_after: Sequence[str]
    unfinished: Sequence[str]
    """The part of `only_before` that the second sweep planned."""
    circumstances: Sequence[tuple[str, str, str]]
    """Differences around the measurements: name, before, after."""


def compare(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    sweeps: tuple[SweepInfo, SweepInfo] | None = None,
    attempts: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> Comparison:
    """Returns the settings that both sweeps of one workload have recorded, side by side; ConfigError if there are none."""
    infos = sweeps or (SweepInfo(), SweepInfo())
    refuse_other_work(*infos)
    first, second = (
        {(str(row["settings_key"]), int(row["num_workers"])): row for _, row in standing(df).iterrows()} for df in (before, after)
    )
    shared = [key for key in first if key in second]
    if not shared:
        raise ConfigError("the sweeps have no setting with the same number of workers in common, so there is nothing to compare")
    every = (before, after) if attempts is None else attempts
    between = {name: noise(every, name) for name in {**USUAL, **FIGURES}}
    gone = [key for key in first if key not in second]
    return Comparison(
        pairs=[_pair(first[key], second[key], between) for key in shared],
        noise=between,
        only_before=[str(first[key]["settings_label"]) for key in gone],
        only_after=[str(second[key]["settings_label"]) for key in second if key not in first],
        unfinished=[str(first[key]["settings_label"]) for key in gone if key[0] in infos[1].planned],
        circumstances=list(_circumstances(*infos)),
    )


def refuse_other_work(first: SweepInfo, second: SweepInfo) -> None:
    """Refuses sweeps that do not measure the same workload in the same size."""
    for name in _SAME:
        one, other = (str(info.config.get(name, "")) for info in (first, second))
        if one != other and one and other:
            raise ConfigError(f"the sweeps are not of the same {name} ({one} and {other}), so their figures cannot be compared")


def side_by_side(before: pd.Series, after: pd.Series) -> pd.DataFrame:
    """Returns both rows as a frame, for `change`."""
    return pd.DataFrame([before, after]).infer_objects()


def change(both: pd.DataFrame, name: str, between: Mapping[str, Noise]) -> Change | None:
    """Returns how the figure changed from the first row to the second; None if one of them lacks it.

    The interval is that of a ratio: both figures' own 95% intervals and noise between runs, as deviations of the
    logarithm. If one of the figures is 0, or mostly noise (`Noise.near_floor`, and eager's compile time, which is the start of
    libraries), their difference is used instead.
    """
    first, second = map(number, both[name]) if name in both else (None, None)
    if first is None or second is None:
        return None
    noise = between.get(name, EXACT)
    share = None if first == 0 else second / first - 1
    compiles_nothing = name in _OF_COMPILING and "scope" in both and both["scope"].iloc[0] == Scope.EAGER
    if min(first, second) <= 0 or min(first, second) < noise.near_floor or compiles_nothing:
        spread = math.hypot(noise.floor, noise.floor, noise.relative * first, noise.relative * second)
        return Change(first, second, share, None, None, abs(second - first) > Z95 * spread)
    off = deviations(both, name, noise)
    half = Z95 * float(np.sqrt((off**2).sum()))
    ratio = math.log(second) - math.log(first)
    return Change(first, second, share, _share(ratio - half), _share(ratio + half), abs(ratio) > half)


def mean_change(pairs: Sequence[Pair], name: str) -> float | None:
    """Returns the geometric mean of the figure's change over `ratios`, minus 1; None if there are none."""
    logarithms = [math.log(found.after) - math.log(found.before) for found in ratios(pairs, name)]
    return _share(float(np.mean(logarithms))) if logarithms else None


def ratios(pairs: Sequence[Pair], name: str) -> list[Change]:
    """Returns the figure's changes for settings that are usable in both sweeps and have a meaningful ratio.

    Compile times near zero are left out: in logarithms, the noise of eager, which compiles nothing, outweighs all others.
    """
    found = [pair.changes[name] for pair in pairs if name in pair.changes and is_usable(pair)]
    return [one for one in found if one.is_ratio]


def _share(logarithm: float) -> float:
    """Returns the relative change for a ratio's logarithm; infinite if it overflows a float."""
    with np.errstate(over="ignore"):
        return float(np.expm1(logarithm))


def is_usable(pair: Pair) -> bool:
    """Tells whether the setting is ok in both sweeps."""
    return bool(pair.before["status"] == Status.OK) and bool(pair.after["status"] == Status.OK)


def _pair(before: pd.Series, after: pd.Series, between: Mapping[str, Noise]) -> Pair:
    both = side_by_side(before, after)
    changes = {name: found for name in FIGURES if (found := change(both, name, between)) is not None}
    workers = int(after["num_workers"])
    label = str(after["settings_label"]) + (f", {workers} workers" if workers > 1 else "")
    return Pair(label, before, after, changes, list(_news(before, after)))


def _news(before: pd.Series, after: pd.Series) -> Iterator[News]:
    was_ok, is_ok = before["status"] == Status.OK, after["status"] == Status.OK
    why = f"{after['status']}, {text(after['label']) or 'no label'}: {text(after['reason']) or 'no reason is recorded'}"
    if was_ok and after["status"] == Status.STOPPED:
        yield News(
            Kind.OTHERWISE, f"stopped early ({text(after['label']) or 'no label'}): {text(after['reason']) or 'no reason'}"
        )
    elif was_ok and not is_ok:
        yield News(Kind.FAILURE, f"no longer usable ({why})")
    elif not was_ok and is_ok:
        yield News(Kind.FIXED, f"usable now; it was {before['status']} ({text(before['label']) or 'no label'})")
    elif not is_ok and text(before["label"]) != text(after["label"]):
        yield News(Kind.OTHERWISE, f"fails for another reason: it was {text(before['label'])}, now {why}")
    for kind, count, reasons, what in (
        (Kind.BREAK, "graph_breaks", "graph_break_reasons", "graph breaks"),
        (Kind.RECOMPILE, "recompiles", "recompile_reasons", "recompiles"),
        (Kind.CUDAGRAPH_SKIP, "cudagraph_skips", "cudagraph_skip_reasons", "graphs without CUDA graphs"),
    ):
        first, second = number(before[count]), number(after[count])
        if first is None or second is None or first == second:
            continue
        if (more := second > first) or is_ok:  # a setting that broke has fewer of them, which is no merit
            yield News(kind if more else Kind.FIXED, f"{second:.0f} {what}, before {first:.0f}{_new(before, after, reasons)}")
    for name, what in (("fallbacks", "runs eagerly"), ("recompile_limit_hits", "reached the recompile limit")):
        if fresh := _fresh(before[name], after[name]):
            yield News(Kind.FALLBACK, f"{what}: {fresh[0]}")
    old, new = text(before["numerics_status"]), text(after["numerics_status"])
    if old is not None and new is not None and old != new:
        yield News(Kind.FIXED if new == "ok" else Kind.NUMERICS, f"numerics: {new}, before {old}")


def _new(before: pd.Series, after: pd.Series, name: str) -> str:
    fresh = _fresh(before[name], after[name])
    return f"; new: {fresh[0]}" + (f" and {len(fresh) - 1} more" if len(fresh) > 1 else "") if fresh else ""


def _fresh(before: Sequence[Any] | None, after: Sequence[Any] | None) -> list[str]:
    known = set(before or [])
    return [str(one) for one in after or [] if one not in known]


def _circumstances(before: SweepInfo, after: SweepInfo) -> Iterator[tuple[str, str, str]]:
    """Yields facts of the environments, and of the measurements, that differ."""
    for one, other in ((before.environment, after.environment), (_measuring(before), _measuring(after))):
        for name in dict.fromkeys([*one, *other]):
            first, second = one.get(name), other.get(name)
            if first != second:
                yield str(name), _said(name, first), _said(name, second)


def _measuring(sweep: SweepInfo) -> dict[str, Any]:
    return {name: sweep.config.get(name) for name in ("pipeline", "max_concurrent", "seed", "device", "caches")}


def _said(name: str, fact: Any) -> str:
    if name.endswith("_bytes"):
        return gib(fact)
    said = MISSING if fact is None else str(fact)
    return said[:_COMMIT_CHARS] if name == "commit" else said
