"""The last lines of a sweep on the terminal: the verdict, and the settings worth naming with what each gains."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.choose.break_even import USUAL_STEPS, Job, line_of
from analysis.choose.decision import Outcome, saving
from analysis.choose.pareto import runs_eagerly, summary
from analysis.decision_text import minus
from analysis.formatting import MISSING, duration, gib, or_estimate
from analysis.load import load_for_analysis
from analysis.page.verdict import none_usable
from analysis.recommend import Recommendation, recommend, verdict
from analysis.training_command import training_command
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.settings import CompileSettings

FINE = 0.1
"""Error of one layer's gradient that may go unseen without a word at the end of a sweep."""


class NamedSetting(NamedTuple):
    """A setting worth naming, as text."""

    what: str
    setting: str
    saves: str  # fraction of the job that it saves relative to what is run today, with its 95% interval
    compile: str
    memory: str


class Ending(NamedTuple):
    """The result of a sweep."""

    sentences: list[str]
    named: list[NamedSetting]
    settings_key: str | None
    """Key of the setting to train with; None if that is what is run today, if nothing else probably saves time, or if nothing is
    known.
    """
    training_command: str | None
    """Command that trains the sweep's script with that setting; None without such a setting, or for a workload."""
    is_known: bool
    finer_check: str | None = None
    """Key of the same setting with eager's random numbers, so that its gradients can be compared with eager's; None where that
    would show no more, or was measured.
    """


def ending(folder: Path) -> Ending:
    """Returns the result of the sweep in this folder, for a job of usual length."""
    df, attempts = load_for_analysis(folder)
    try:
        found = recommend(df, Job(steps=USUAL_STEPS), attempts=attempts)
    except ConfigError as error:
        counted = summary(df)
        return Ending([none_usable(df, counted) if counted.best is None else f"Cannot tell: {error}."], [], None, None, False)
    is_baseline = found.baseline is not None and found.trial.name == found.baseline.name
    stays = is_baseline or (found.decision.outcome is Outcome.UNCLEAR and not _probably_saves(found))
    key, command = (None, None) if stays else (str(found.trial["settings_key"]), training_command(folder, found.trial))
    return Ending(verdict(found), list(_named(found)), key, command, True, None if stays else _finer_check(df, found.trial))


def _finer_check(df: pd.DataFrame, trial: pd.Series) -> str | None:
    setting = CompileSettings.parse(str(trial["settings_key"]))
    numerics = found if isinstance(found := trial.get("numerics"), Mapping) else {}
    checked = numerics.get("gradient_check")
    if not isinstance(checked, Mapping) or not numerics.get("random") or setting.draws_eagers:
        return None
    allowed = checked.get("allowed")
    sees_little = allowed > FINE if isinstance(allowed, float) else checked.get("evaluations")  # none if it was not tried
    is_fine = checked.get("beside_eager") or not sees_little
    key = CompileSettings.parse(f"{setting.key},inductor.fallback_random=on").key
    return None if is_fine or key in set(df["settings_key"]) else key


def _named(found: Recommendation) -> Iterator[NamedSetting]:
    """Yields the settings worth naming, each only once."""
    rows: dict[object, tuple[pd.Series, list[str]]] = {}
    for what, row in _roles(found):
        rows.setdefault(row.name, (row, []))[1].append(what)
    eager = found.costs.table.index[runs_eagerly(found.costs.table)]
    for row, roles in rows.values():
        yield NamedSetting(
            what=", ".join(roles),
            setting=str(row["setting_name"]),
            saves=_saves(found, row),
            compile=MISSING if row.name in eager else or_estimate(row["compile_s"], row["cold_equivalent_s"], duration),
            memory=gib(row["peak_memory_bytes"]),
        )


def _roles(found: Recommendation) -> Iterator[tuple[str, pd.Series]]:
    table, outcome = found.costs.table, found.decision.outcome
    if outcome is not Outcome.STAY and found.decision.setting is not None:
        unclear = "may be better" if _probably_saves(found) else "not certainly slower"
        yield "recommended" if outcome is Outcome.USE else unclear, found.about
    is_eager = runs_eagerly(table)
    if is_eager.any():
        best_eager = table[is_eager].iloc[0]
        gains = [saving(line_of(row), line_of(best_eager), found.job.steps).low_s > 0 for _, row in table.iterrows()]
        if any(gains):
            yield "cheapest that beats eager", table[gains].sort_values("fixed_s", kind="stable").iloc[0]
        yield "best eager", best_eager
    if found.baseline is not None:
        yield "today", found.baseline


def _probably_saves(found: Recommendation) -> bool:
    saving_found = found.decision.saving
    return saving_found is None or saving_found.share > 0


def _saves(found: Recommendation, row: pd.Series) -> str:
    if found.baseline is None or row.name == found.baseline.name:
        return MISSING
    today = line_of(found.baseline)
    gain, whole_s = saving(line_of(row), today, found.job.steps), today.total_s(found.job.steps)
    low, high = (f"{100 * seconds / whole_s:z.0f}" for seconds in (gain.low_s, gain.high_s))
    return minus(f"{100 * gain.share:z.0f}% ({low} to {high})")
