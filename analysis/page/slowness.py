"""Why compiled settings are not faster than eager, as far as their records show, grouped by the reason."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from analysis.choose.break_even import baseline_key
from analysis.choose.pareto import is_noisy_trial, standing, usable
from analysis.formatting import number, times, upper_end
from compile_sweep.schema.causes.slowness import FASTER_FROM, NOTHING_EXPLAINS, Slowness, why_not_faster
from compile_sweep.schema.outcome import SCRIPT_PIPELINE
from compile_sweep.schema.settings import CompileSettings, Scope

MOST_NAMED = 6  # maximum number of settings that are named per reason
MOST_REASONS = 2  # maximum number of reasons at the end of a sweep; the report has all

_NOISY = Slowness("noisy", "its figure is noisy, so it may be faster after all", "measure it again on an otherwise idle machine")
"""In place of a reason that nothing recorded gives."""

_LISTS = (
    "recompile_limit_hits", "recompile_reasons", "fallbacks", "graph_break_reasons", "perf_hints", "cudagraph_skip_reasons",
    "findings",
)  # fmt: skip


class Reason(NamedTuple):
    """Why some settings are not faster. Text is unescaped, as in the records."""

    found: str
    advice: str
    settings: list[str]  # labels, each with its speed as a multiple of eager's
    num_more: int


def reasons(df: pd.DataFrame) -> list[Reason]:
    """Returns why usable compiled settings are at most 5% faster than eager, the most frequent reason first."""
    return _grouped(_compiled(df))


def why_none_is_faster(df: pd.DataFrame) -> list[str]:
    """Returns why no compiled setting is faster than eager, the most frequent reason first; nothing if one is."""
    compiled = list(_compiled(df))
    if not all(slow for _, slow in compiled):
        return []
    known = [reason for reason in _grouped(compiled) if reason.found not in (NOTHING_EXPLAINS, _NOISY.found)]
    return [
        f"{reason.settings[0]}{f' and {others} more' if (others := len(reason.settings) - 1 + reason.num_more) else ''}: "
        f"{reason.found}: {reason.advice}"
        for reason in known[:MOST_REASONS]
    ]


def _grouped(compiled: Iterable[tuple[str, list[Slowness]]]) -> list[Reason]:
    groups: dict[tuple[str, str], list[str]] = {}
    for label, slow in compiled:
        for reason in slow:
            groups.setdefault((reason.found, reason.advice), []).append(label)
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [Reason(found, advice, labels[:MOST_NAMED], max(0, len(labels) - MOST_NAMED)) for (found, advice), labels in ranked]


def _compiled(df: pd.DataFrame) -> Iterator[tuple[str, list[Slowness]]]:
    """Yields the usable compiled settings with their speed as a multiple of eager's, and why each is not faster."""
    trials = usable(standing(df), "samples_per_s", "step_ms_median")
    rates = trials.set_index("settings_key")["samples_per_s"]
    today = rates[rates.index == baseline_key(df)].head(1)
    for _, trial in trials[(trials["scope"] != Scope.EAGER).to_numpy(dtype=bool)].iterrows():
        in_turn = number(trial["speedup_eager"])
        speedup = in_turn if in_turn is not None or today.empty else number(trial["samples_per_s"] / today.iloc[0])
        backend = CompileSettings.parse(str(trial["settings_key"])).backend
        why = why_not_faster(_measured(trial), speedup, backend)
        at_most = upper_end(trial["samples_per_s_high"])
        if [slow.found for slow in why] == [NOTHING_EXPLAINS] and is_noisy_trial(trial) and speedup and at_most is not None:
            why = [_NOISY] if speedup * at_most / trial["samples_per_s"] >= FASTER_FROM else why
        yield f"{trial['setting_name']} ({times(speedup)})", why


def _measured(trial: pd.Series) -> Mapping[str, Any]:
    """Converts a row back to its measurement: missing lists are empty, missing figures None."""
    figures = {name: number(trial[name]) for name in ("graphs", "data_wait_share", "step_ms_median")}
    lists = {name: trial[name] if isinstance(trial[name], list) else [] for name in _LISTS}
    if trial["pipeline"] is not pd.NA and trial["pipeline"] == SCRIPT_PIPELINE:  # its wait is in no figure that is compared
        figures["data_wait_share"] = None
    return figures | lists | {"device_use": trial["device_use"]}
