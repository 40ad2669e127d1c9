"""What changed between two sweeps, setting by setting: figures with the certainty of their change, and news. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.formatting import number, text
from analysis.load import SweepInfo
from analysis.pareto import standing
from analysis.uncertainty import EXACT, USUAL, Z95, Noise, deviations, noise
from orchestrator.errors import ConfigError
from orchestrator.objectives import Goal
from orchestrator.records import Status

FIGURES: Mapping[str, Goal] = MappingProxyType(
    {
        "samples_per_s": Goal.MAX,
        "speedup_eager": Goal.MAX,
        "compile_s": Goal.MIN,
        "warm_start_s": Goal.MIN,
        "peak_memory_bytes": Goal.MIN,
    }
)
"""What is always compared, and which way it is better."""

_SAME = ("workload", "size")
"""What two sweeps must have in common for any comparison to mean something."""


class Change(NamedTuple):
    """How a figure of one setting changed."""

    before: float
    after: float
    share: float | None
    """After over before, less 1; None if it was 0."""
    low: float | None
    """Lower end of the share's 95 % interval."""
    high: float | None
    is_significant: bool
    """Whether the interval leaves out 0; for figures without noise, whether there is any change."""


class Kind(StrEnum):
    """What news is about."""

    FAILURE = "failures"
    BREAK = "breaks"
    RECOMPILE = "recompiles"
    FALLBACK = "fallbacks"
    CUDAGRAPH_SKIP = "cudagraph-skips"
    NUMERICS = "numerics"
    MENDED = "mended"
    OTHERWISE = "otherwise"
    """Not usable in both sweeps, for another reason; or stopped before it was measured to the end, which is no failure."""


class News(NamedTuple):
    """Something other than a figure that is not as it was."""

    kind: Kind
    sentence: str


class Pair(NamedTuple):
    """One setting in both sweeps."""

    label: str
    before: pd.Series
    after: pd.Series
    changes: Mapping[str, Change]
    """Of those of `FIGURES` that both have."""
    news: Sequence[News]


class Comparison(NamedTuple):
    """Two sweeps side by side."""

    pairs: Sequence[Pair]
    noise: Mapping[str, Noise]
    """Figure → its noise between runs, from what was repeated within either sweep; never from how the two differ."""
    only_before: Sequence[str]
    """Labels of settings without a record in the second sweep."""
    only_after: Sequence[str]
    unfinished: Sequence[str]
    """Those of `only_before` that the second sweep planned."""
    circumstances: Sequence[tuple[str, str, str]]
    """What differs around the measurements: name, before, after."""


def compare(
    before: pd.DataFrame,
    after: pd.DataFrame,
    *,
    sweeps: tuple[SweepInfo, SweepInfo] | None = None,
    attempts: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> Comparison:
    """The settings that both sweeps have records of, side by side.

    Args:
        before: trials as `load` returns them.
        after: those of the other sweep.
        sweeps: what the two `sweep.json` say.
        attempts: every attempt of the one and of the other, to see how settings scatter between runs of one sweep.

    Raises:
        ConfigError: the sweeps are of different workloads, or have no setting in common.
    """
    infos = sweeps or (SweepInfo(), SweepInfo())
    for name in _SAME:
        one, other = (str(info.config.get(name, "")) for info in infos)
        if one != other and one and other:
            raise ConfigError(f"the sweeps are not of the same {name} ({one} and {other}), so their figures do not compare")
    first, second = (_by_setting(df) for df in (before, after))
    shared = [key for key in first if key in second]
    if not shared:
        raise ConfigError("the sweeps have no setting with as many workers in common, so there is nothing to compare")
    between = {name: noise(attempts or (before, after), name) for name in {**USUAL, **FIGURES}}
    gone = [key for key in first if key not in second]
    return Comparison(
        pairs=[_pair(first[key], second[key], between) for key in shared],
        noise=between,
        only_before=[str(first[key]["settings_label"]) for key in gone],
        only_after=[str(second[key]["settings_label"]) for key in second if key not in first],
        unfinished=[str(first[key]["settings_label"]) for key in gone if key[0] in infos[1].planned],
        circumstances=list(_circumstances(*infos)),
    )


def change(before: pd.Series, after: pd.Series, name: str, between: Mapping[str, Noise]) -> Change | None:
    """How the figure changed from one row to the other; None where one of them has none.

    The interval is that of a ratio: each figure's own 95 % interval and the noise between runs, of both, as deviations of the
    logarithm.
    """
    first, second = number(before.get(name)), number(after.get(name))
    if first is None or second is None:
        return None
    if first <= 0 or second <= 0:
        floor = math.sqrt(2) * Z95 * between.get(name, EXACT).floor
        share = None if first == 0 else second / first - 1
        return Change(first, second, share, None, None, abs(second - first) > floor)
    off = deviations(pd.DataFrame([before, after]).infer_objects(), name, between.get(name, EXACT))
    half = Z95 * float(np.sqrt((off**2).sum()))
    ratio = math.log(second / first)
    low, high = math.exp(ratio - half) - 1, math.exp(ratio + half) - 1
    return Change(first, second, second / first - 1, low, high, abs(ratio) > half)


def mean_change(pairs: Sequence[Pair], name: str) -> float | None:
    """Geometric mean of the figure's change over the settings that are usable in both, less 1; None without any."""
    ratios = [
        math.log1p(found.share)
        for pair in pairs
        if (found := pair.changes.get(name)) is not None and found.share is not None and found.share > -1 and _usable(pair)
    ]
    return math.expm1(float(np.mean(ratios))) if ratios else None


def _usable(pair: Pair) -> bool:
    return bool(pair.before["status"] == Status.OK) and bool(pair.after["status"] == Status.OK)


def _by_setting(df: pd.DataFrame) -> dict[tuple[str, int], pd.Series]:
    return {(str(row["settings_key"]), int(row["num_workers"])): row for _, row in standing(df).iterrows()}


def _pair(before: pd.Series, after: pd.Series, between: Mapping[str, Noise]) -> Pair:
    changes = {name: found for name in FIGURES if (found := change(before, after, name, between)) is not None}
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
        yield News(Kind.FAILURE, f"not usable any more ({why})")
    elif not was_ok and is_ok:
        yield News(Kind.MENDED, f"usable now; it was {before['status']} ({text(before['label']) or 'no label'})")
    elif not is_ok and text(before["label"]) != text(after["label"]):
        yield News(Kind.OTHERWISE, f"fails otherwise: it was {text(before['label'])}, now {why}")
    for kind, count, reasons, what in (
        (Kind.BREAK, "graph_breaks", "graph_break_reasons", "graph breaks"),
        (Kind.RECOMPILE, "recompiles", "recompile_reasons", "recompiles"),
        (Kind.CUDAGRAPH_SKIP, "cudagraph_skips", "cudagraph_skip_reasons", "graphs without CUDA graphs"),
    ):
        first, second = number(before[count]), number(after[count])
        if first is not None and second is not None and first != second:
            more = second > first
            yield News(kind if more else Kind.MENDED, f"{second:.0f} {what}, before {first:.0f}{_new(before, after, reasons)}")
    for name, what in (("fallbacks", "runs eagerly"), ("recompile_limit_hits", "reached the recompile limit")):
        if fresh := _fresh(before[name], after[name]):
            yield News(Kind.FALLBACK, f"{what}: {fresh[0]}")
    old, new = text(before["numerics_status"]), text(after["numerics_status"])
    if old is not None and new is not None and old != new:
        yield News(Kind.MENDED if new == "ok" else Kind.NUMERICS, f"numerics: {new}, before {old}")


def _new(before: pd.Series, after: pd.Series, name: str) -> str:
    fresh = _fresh(before[name], after[name])
    return f"; new: {fresh[0]}" + (f" and {len(fresh) - 1} more" if len(fresh) > 1 else "") if fresh else ""


def _fresh(before: Sequence[Any] | None, after: Sequence[Any] | None) -> list[str]:
    known = set(before or [])
    return [str(one) for one in after or [] if one not in known]


def _circumstances(before: SweepInfo, after: SweepInfo) -> Iterator[tuple[str, str, str]]:
    """Facts of the environments, and of how was measured, that are not the same."""
    for one, other in ((before.environment, after.environment), (_measuring(before), _measuring(after))):
        for name in dict.fromkeys([*one, *other]):
            first, second = one.get(name), other.get(name)
            if first != second:
                yield str(name), _said(first), _said(second)


def _measuring(sweep: SweepInfo) -> dict[str, Any]:
    return {name: sweep.config.get(name) for name in ("pipeline", "max_concurrent", "seed", "device", "caches")}


def _said(fact: Any) -> str:
    return "—" if fact is None else str(fact)
