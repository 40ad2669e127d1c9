"""Settings during which a sweep died: each is counted before it starts, so that none takes a host down at every resume.

Background: a trial that ends its own process is recorded. One that ends what would record it (the driver, Ray's raylet, the
host) leaves nothing, and would be the first to run again. So a line in `starts.jsonl` is made durable before a trial's first
attempt. If a sweep did not end in order, each start without a record counts; after two the setting is recorded and skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compile_sweep.schema import journal
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError, SessionError
from compile_sweep.schema.outcome import Label
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import SweepConfig
from orchestrator.run import sweep_folder

STARTS_FILE = "starts.jsonl"
MAX_ENDS = 2
"""Times that a sweep may die while a setting runs. The first may be chance: a power failure, a job's time limit."""


def note_start(folder: Path, trial_id: str, settings_key: str) -> None:
    """Counts a trial that is about to start. A log that cannot be written counts nothing, and keeps no trial from running."""
    with suppress(OSError, RecordsError):
        if trial_id not in _starts(folder):
            journal.append(folder / STARTS_FILE, json.dumps({"trial_id": trial_id, "settings_key": settings_key}))


@contextmanager
def withdrawn_if_ended_in_order(folder: Path) -> Iterator[None]:
    """Forgets what was in flight when the sweep ends by itself or is stopped, and remembers it if what runs the trials failed."""
    try:
        yield
    except SessionError:
        raise
    except BaseException:
        _withdraw(folder, _starts(folder))
        raise
    _withdraw(folder, _starts(folder))


def record_poison(folder: Path, config: SweepConfig) -> list[str]:
    """Records each setting during which the sweep died too often, so that it does not run again; returns a sentence for each.

    Raises:
        RecordsError: the folder's records are damaged.
        OSError: a record cannot be written.
    """
    recorded = {trial.trial_id for trial in records.read(folder)}
    ends: dict[str, list[str]] = {}
    for trial_id, key in _starts(folder).items():
        if trial_id not in recorded:
            ends.setdefault(key, []).append(trial_id)
    said = []
    for key, trial_ids in ends.items():
        if len(trial_ids) < MAX_ENDS:
            continue
        settings = CompileSettings.parse(key)
        reason = (
            f"the sweep or its host died {len(trial_ids)} times while this setting ran, so it is not run again; "
            "to try it once more, remove this line, or name it with --settings in a new folder"
        )
        records.append(
            folder,
            TrialRecord(
                trial_id=trial_ids[-1],
                settings=settings.to_dict(),
                settings_key=settings.key,
                status=Label.SWEEP_DIED.status,
                label=Label.SWEEP_DIED,
                reason=reason,
                workload=config.workload,
                size=config.size,
                num_workers=config.workers_per_trial,
                started_at=sweep_folder.now(),
            ),
        )
        _withdraw(folder, trial_ids)
        said.append(f"{settings.label}: {reason}")
    return said


def _starts(folder: Path) -> dict[str, str]:
    """Settings' key of each start that was not withdrawn, by trial_id."""
    found: dict[str, str] = {}
    for line in journal.read(folder / STARTS_FILE, _parsed, "start"):
        if line.get("withdrawn"):
            found.pop(line["trial_id"], None)
        else:
            found[line["trial_id"]] = line["settings_key"]
    return found


def _withdraw(folder: Path, trial_ids: Iterable[str]) -> None:
    with suppress(OSError, RecordsError):
        recorded = {trial.trial_id for trial in records.read(folder)}
        for trial_id in trial_ids:
            if trial_id not in recorded:
                journal.append(folder / STARTS_FILE, json.dumps({"trial_id": trial_id, "withdrawn": True}))


def _parsed(line: str) -> dict[str, str]:
    try:
        values = json.loads(journal.unsealed(line))
        if not isinstance(values["trial_id"], str) or not (values.get("withdrawn") or isinstance(values["settings_key"], str)):
            raise TypeError("trial_id or settings_key is no text")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordsError(f"not a start ({error})") from None
    return dict(values)
