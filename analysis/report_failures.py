"""The trials that do not count, as the report lists them: grouped by label, with their reason and a link to their log."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd

from analysis.formatting import duration, text
from orchestrator.records import Status

MOST_LISTED = 12
"""Trials of one label that are listed; the others are in the table."""
_FIRST_LINE = 240
"""Characters of a reason that are shown at once."""
_WORKER_LOG = "worker-0.log"


class UnusableTrial(NamedTuple):
    """A trial that is not ok. Text is as it stands in the record, not escaped."""

    settings_label: str
    settings_key: str
    reason: str
    """Its first line."""
    more: str
    """The whole of it, if there is more."""
    phase: str
    attempt: int
    wall: str
    log: str | None
    """Relative link to its log, or the folder under logs/; None if there is none."""


class UnusableGroup(NamedTuple):
    """Trials that failed alike."""

    status: str
    label: str
    trials: list[UnusableTrial]
    num_left_out: int


def unusable(folder: Path, df: pd.DataFrame) -> list[UnusableGroup]:
    """Trials that are not ok, by status and label; the infeasible first, the larger groups first."""
    groups: dict[tuple[str, str], list[pd.Series]] = {}
    for _, row in df[df["status"] != Status.OK].iterrows():
        groups.setdefault((str(row["status"]), text(row["label"]) or "no label"), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0] != Status.INFEASIBLE, -len(group[1]), group[0][1]))
    return [
        UnusableGroup(status, label, [_unusable(folder, row) for row in rows[:MOST_LISTED]], max(0, len(rows) - MOST_LISTED))
        for (status, label), rows in ordered
    ]


def _unusable(folder: Path, row: pd.Series) -> UnusableTrial:
    whole = (text(row["reason"]) or "no reason is recorded").strip()
    first = whole.split("\n", 1)[0].rstrip()
    if len(first) > _FIRST_LINE:
        first = first[: _FIRST_LINE - 1] + "…"
    return UnusableTrial(
        settings_label=str(row["settings_label"]),
        settings_key=str(row["settings_key"]),
        reason=first,
        more="" if first == whole else whole,
        phase=text(row["phase"]) or "unknown",
        attempt=int(row["attempt"]),
        wall=duration(row["wall_s"]),
        log=_log(folder, str(row["trial_id"])),
    )


def _log(folder: Path, trial_id: str) -> str | None:
    """A link to the trial's log, or to its folder, if that is really a folder directly under logs/."""
    if not trial_id or Path(trial_id).name != trial_id or "\0" in trial_id:
        return None
    logs = folder / "logs" / trial_id
    if not logs.is_dir():
        return None
    link = f"logs/{quote(trial_id, safe='')}/"
    return link + _WORKER_LOG if (logs / _WORKER_LOG).is_file() else link
