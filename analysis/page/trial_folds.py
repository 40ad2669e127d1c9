"""A fold for each trial in the report: its setting as code, its seconds, breaks, recompiles, steps, numbers, and its log.

Folds are plain text in the page, so that they work without JavaScript, in print and for searches in the page.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.choose.break_even import batch_size_of
from analysis.choose.pareto import pareto_front
from analysis.columns import COMPILE_PHASES
from analysis.formatting import duration, figure, interval, number, text, whole
from analysis.page.table import WORKER_LOG, log_of, outcome_of, read_end
from compile_sweep.schema import redact
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import largest_batch_text
from compile_sweep.schema.visible_text import visible

MOST_FOLDS = 60
"""Maximum number of trials with a fold, since there may be 10,000. Members of the front come first, then the fastest."""
_MOST_LINES = 20  # maximum number of lines shown of a list, such as recompiles
_LOG_LINES = 25
_LOG_BYTES = 16_384  # bytes at the end of a log that are read and shown

_LISTS = {
    "graph breaks": "graph_break_reasons",
    "recompiles": "recompile_reasons",
    "recompile limits reached": "recompile_limit_hits",
    "CUDA graphs skipped": "cudagraph_skip_reasons",
    "ran eagerly": "fallbacks",
    "findings": "findings",
    "hints of torch": "perf_hints",
}


class TrialFold(NamedTuple):
    """Contents of a trial's fold. Text is unescaped, as in the record."""

    setting_name: str
    outcome: str
    on_front: bool
    summary: str  # throughput and compile time in a few words; empty if neither is known
    code: str  # the setting as the Python that was measured or, if the record has none, as text
    facts: list[tuple[str, str]]
    lists: list[tuple[str, list[str]]]
    reason: str
    log: str | None
    log_end: str


def trial_folds(folder: Path, df: pd.DataFrame) -> list[TrialFold]:
    """Returns the trials' folds, those of the front first, then by throughput, failed ones last."""
    front = set(pareto_front(df).index)
    order = df.assign(_front=[index not in front for index in df.index], _last=df["status"] != Status.OK)
    order = order.sort_values(["_front", "_last", "samples_per_s"], ascending=[True, True, False], kind="stable")
    return [_fold(folder, row, on_front=index in front) for index, row in order[:MOST_FOLDS].iterrows()]


def _fold(folder: Path, trial: pd.Series, *, on_front: bool) -> TrialFold:
    rate, compile_s = number(trial["samples_per_s"]), number(trial["compile_s"])
    words = [
        "" if rate is None else f"{figure(rate)} samples/s",
        "" if compile_s is None else f"{duration(compile_s)} compiling",
    ]
    link = log_of(folder, str(trial["trial_id"]))
    return TrialFold(
        setting_name=str(trial["setting_name"]),
        outcome=outcome_of(trial),
        on_front=on_front,
        summary=", ".join(filter(None, words)),
        code=text(trial["source"]) or str(trial["settings_key"]),
        facts=list(_facts(trial)),
        lists=[(title, lines) for title, column in _LISTS.items() if (lines := _lines(trial[column]))],
        reason=text(trial["reason"]) or "",
        log=link,
        log_end=_log_end(folder / "logs" / str(trial["trial_id"]) / WORKER_LOG) if link else "",
    )


def _facts(trial: pd.Series) -> Iterable[tuple[str, str]]:
    """Yields what is known of a trial, by name, in chronological order."""
    phases = trial["phases_s"] if isinstance(trial["phases_s"], Mapping) else {}
    parts = [(str(phase), number(seconds)) for phase, seconds in phases.items()]
    yield "setting", str(trial["settings_label"])
    yield "trial", f"{trial['trial_id']}, attempt {int(trial['attempt'])}, {duration(trial['wall_s'])}"
    yield "phases", _joined(f"{phase} {duration(seconds)}" for phase, seconds in parts if seconds)
    compiling = [(phase.title, number(trial[phase.column])) for phase in COMPILE_PHASES.values()]
    yield "compile", _joined(f"{title} {figure(seconds, 's')}" for title, seconds in compiling if seconds)
    counts = [("graph", "graphs"), ("break", "graph_breaks"), ("recompile", "recompiles")]
    known = [(title, number(trial[column])) for title, column in counts]
    yield "graphs", _joined(f"{whole(count)} {title}{'' if count == 1 else 's'}" for title, count in known if count is not None)
    yield "steps", _steps(trial)
    yield "batches", _batches(trial)
    yield "numbers", _joined(filter(None, (text(trial["numerics_status"]), text(trial["numerics_worst"]))))


def _steps(trial: pd.Series) -> str:
    """Returns the median step with its interval, and the spread of the steps."""
    median = number(trial["step_ms_median"])
    if median is None:
        return ""
    between = interval(trial["step_ms_median_low"], trial["step_ms_median_high"])
    words = [f"median {figure(median, 'ms')}{f' (95%: {between})' if between else ''}"]
    steps = np.array([value for value in _values(trial["step_ms"]) if number(value) is not None], dtype=float)
    if len(steps):
        least, lower, upper, most = np.quantile(steps, [0, 0.1, 0.9, 1])
        spread = f"{figure(lower)} to {figure(upper)} ms in eight of ten, {figure(least)} to {figure(most)} ms in all"
        words.append(f"{len(steps)} steps: {spread}")
    return "; ".join(words)


def _batches(trial: pd.Series) -> str:
    """Returns the largest batch that fits, and the memory of each size that was tried."""
    peaks = trial["batch_peak_bytes"]
    return largest_batch_text(peaks, batch_size_of(trial)) if peaks else ""


def _joined(words: Iterable[Any]) -> str:
    return ", ".join(map(str, words))


def _values(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def _lines(value: Any) -> list[str]:
    lines = [str(line) for line in _values(value)]
    left_out = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"and {left_out} more"] if left_out > 0 else [])]


def _log_end(path: Path) -> str:
    """Returns the last lines of a log, safe to show; empty if it cannot be read."""
    try:
        if path.is_symlink() or not path.is_file():
            return ""
        lines = read_end(path, _LOG_BYTES).splitlines()
    except OSError:
        return ""
    return "\n".join(visible(redact.redact_text(line)) for line in lines[-_LOG_LINES:])
