"""The verdict's figures at a glance: what is gained, what it costs, and how far that can be trusted."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.formatting import duration, figure, gib, interval, number, or_estimate, times
from analysis.pareto import Choice, break_even_s, expected_compile_s
from analysis.remarks import remarks
from analysis.uncertainty import chance
from workloads.settings import Scope

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
    return [*_gain(trial, named.speedup), _cost(trial, eager), *_memory(trial, eager), _confidence(trial, uncertain)]


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


def _cost(trial: pd.Series, eager: pd.Series | None) -> Tile:
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
