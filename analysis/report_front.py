"""The front as the report lists it: each member's figures, how probable it is, and what cannot be told apart from it."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from analysis.formatting import figure, text, times
from analysis.pareto import Summary, pareto_front, speedup_over_eager
from analysis.remarks import Remark, remarks
from analysis.uncertainty import chance

MOST_EQUALS = 4
"""Trials that are named as not to be told apart from one."""


class FrontEntry(NamedTuple):
    """One point of the front. Text is as it stands in the record, not escaped."""

    settings_label: str
    figures: list[str]
    remarks: list[Remark]
    is_knee: bool
    equals: list[str]
    """Trials that cannot be told apart from it, each with its probability of being on the front."""
    num_more_equals: int


class FrontList(NamedTuple):
    """The front, and what is not on it by the figures as they are but may be."""

    entries: list[FrontEntry]
    others: list[str]
    """Trials apart from all entries that may be on it."""


def front_list(df: pd.DataFrame, found: Summary, uncertain: pd.DataFrame) -> FrontList:
    """The front over throughput and cold compile time, ascending in the latter.

    Args:
        df: trials as `load` returns them.
        found: their `summary`.
        uncertain: the `trials` of their `uncertain_front`.
    """
    knee = None if found.knee is None else found.knee.trial.name
    rows = pareto_front(speedup_over_eager(df))
    named: set[object] = set()
    entries = []
    for index, row in rows.iterrows():
        equals = _equals(uncertain, index)
        named.update(equals.index)
        entries.append(
            FrontEntry(
                settings_label=str(row["settings_label"]),
                figures=[*_figures(row), *_certainty(uncertain, index)],
                remarks=remarks(row),
                is_knee=index == knee,
                equals=[_named(one) for _, one in equals.head(MOST_EQUALS).iterrows()],
                num_more_equals=max(0, len(equals) - MOST_EQUALS),
            )
        )
    others = uncertain[~uncertain.index.isin([*rows.index, *named])]
    return FrontList(entries, [_named(one) for _, one in others.sort_values("front_probability", ascending=False).iterrows()])


def _equals(uncertain: pd.DataFrame, index: object) -> pd.DataFrame:
    """The others of a trial's group, the most probable first."""
    itself = uncertain.index == index
    group = uncertain[uncertain["equal_to"].isin(uncertain[itself]["equal_to"]) & ~itself]
    return group.sort_values("front_probability", ascending=False, kind="stable")


def _named(row: pd.Series) -> str:
    where = "on the front" if row["on_front"] else "may be on the front"
    return f"{row['settings_label']} ({where}: {chance(float(row['front_probability']))} probable)"


def _figures(trial: pd.Series) -> list[str]:
    interleaved = [] if text(trial["speedup_eager"]) is None else [f"{times(trial['speedup_eager'])} eager interleaved"]
    best = f"{times(trial['speedup_best_eager'])} best eager"
    return [figure(trial["samples_per_s"], "samples/s"), f"{figure(trial['compile_s'], 's')} compile", *interleaved, best]


def _certainty(uncertain: pd.DataFrame, index: object) -> list[str]:
    rows = uncertain[uncertain.index == index]
    return [f"{chance(float(row['front_probability']))} probable" for _, row in rows.iterrows()]
