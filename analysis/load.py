"""Reads a sweep's folder: `trials.jsonl` as a typed DataFrame, `sweep.json` as a `SweepInfo`."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.choose.break_even import baseline_key
from analysis.columns import COLD_OR_WARM, COLUMNS, COMPILE_PHASES, TIMESTAMP, WARM_START, settings_column, warm_start_column
from analysis.formatting import number
from compile_sweep.schema import record as records
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.objectives import INTERVALS
from compile_sweep.schema.outcome import Status, says_nothing
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, Caches, TrialRecord, WarmStart
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.short_names import setting_ids, setting_names
from compile_sweep.schema.visible_text import visible, visible_values

_SWEPT = "give a folder that a sweep wrote"
_INTERVALS = dict(INTERVALS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepInfo:
    """What `sweep.json` says; missing values are empty."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """The sweep's configuration: recipe, workload, size, seed, …"""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, GPU, driver, cores, commit; None for unknown values."""
    environment_key: str = ""
    started_at: str = ""
    """ISO 8601 with its UTC offset."""
    planned: tuple[str, ...] = ()
    """`settings_key` of each setting that the sweep planned to measure."""

    @property
    def what(self) -> str:
        """Workload and size, as far as they are known."""
        return " ".join(str(self.config[name]) for name in ("workload", "size") if self.config.get(name))


def load(folder: str | Path, *, all_attempts: bool = False) -> pd.DataFrame:
    """Returns the trials of a sweep, one row per measurement, in the order in which they finished.

    A measurement is a setting with its number of workers, cold or warm. If one was attempted more than once, the latest attempt
    counts, whatever its status, unless the machines or the script ended it; `attempt` is its number. A warm start is not a
    measurement: its figures are in columns of their own, in each row of its setting.

    Args:
        folder: The sweep's folder.
        all_attempts: Keep earlier attempts as rows, too. Do not compute a front from these: a setting would count twice.

    Returns:
        The columns of `analysis.COLUMNS`, which documents units and dtypes, also for a sweep without records.

    Raises:
        RecordsError: The folder or its `trials.jsonl` is missing, unreadable, or has other contents.
    """
    frame, latest = _read(Path(folder))
    return frame if all_attempts else frame.loc[latest].reset_index(drop=True)


def load_for_analysis(folder: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Reads the folder once and returns its trials and all attempts, in a form from which rows are selected quickly.

    Values are those of `load`, but few columns have an extension dtype of pandas. Each of those is a block of its own, so that
    selecting rows from a hundred of them takes milliseconds, and a report selects rows hundreds of times.

    Raises:
        RecordsError: For the reasons of `load`.
    """
    frame, latest = _read(Path(folder))
    values = {name: _plain(column.array) for name, column in frame.items()}
    attempts = pd.DataFrame(values).copy()  # a copy joins columns of one dtype into one block
    return attempts.loc[latest].reset_index(drop=True), attempts


def _plain(column: Any) -> Any:
    """Converts to float64 or object; booleans stay, because inverting them in a column of objects would not."""
    if column.dtype == "boolean":
        return column
    if column.dtype == "Float64":
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    return pd.Series(column.to_numpy(dtype=object), dtype=object)  # pandas would make an array of text one of its own


def _read(folder: Path) -> tuple[pd.DataFrame, pd.Index]:
    """Returns all attempts, and the index of the latest of each measurement."""
    _check_folder(folder, TRIALS_FILE)
    rows = list(_rows(records.read(folder), records.read_warm_starts(folder)))
    ids = setting_ids(str(row["settings_key"]) for row in rows)
    for row in rows:
        row["setting_id"], row["setting_name"] = ids[str(row["settings_key"])], ""
    frame = pd.DataFrame({name: _column(name, [row[name] for row in rows]) for name in COLUMNS})
    of_one_kind = ["settings_key", "caches", "num_workers"]
    told = pd.Series([not says_nothing(row["label"], row["reason"]) for row in rows], dtype=bool)
    counting = told | ~told.groupby([frame[name] for name in of_one_kind], dropna=False).transform("any")
    candidates = frame[[*of_one_kind, "label", "status", "samples_per_s"]][counting]
    candidates = candidates[~candidates.duplicated(of_one_kind, keep="last")]
    names = setting_names(ids, baseline_key(candidates))
    frame["setting_name"] = _column("setting_name", [names[str(row["settings_key"])] for row in rows])
    return frame, candidates.index


def load_sweep(folder: str | Path) -> SweepInfo:
    """Reads the folder's `sweep.json`; missing parts and parts of a wrong type are left empty.

    Raises:
        RecordsError: The folder or its `sweep.json` is missing or unreadable, or the file is not a JSON object.
    """
    folder = Path(folder)
    _check_folder(folder, SWEEP_FILE)
    path = folder / SWEEP_FILE
    try:
        values = json.loads(read_regular(path).decode("utf-8", "replace"))
    except OSError as error:
        raise RecordsError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{path} is not JSON ({error}); {_SWEPT}") from None
    if not isinstance(values, dict):
        raise RecordsError(f"{path} is not a JSON object; {_SWEPT}")
    planned = values.get("planned")
    return SweepInfo(
        config=visible_values(_mapping(values.get("config"))),
        environment=visible_values(_mapping(values.get("environment"))),
        environment_key=_text(values.get("environment_key")),
        started_at=_text(values.get("started_at")),
        planned=tuple(_text(key) for key in planned) if isinstance(planned, list) else (),
    )


def _check_folder(folder: Path, file: str) -> None:
    try:
        if not folder.exists():
            raise RecordsError(f"there is no folder {folder}; {_SWEPT}")
        if not folder.is_dir():
            raise RecordsError(f"{folder} is a file, not a sweep's folder; {_SWEPT}")
        if not (folder / file).is_file():
            raise RecordsError(_why_no_file(folder / file))
    except OSError as error:  # the folder is not accessible, or the name is too long
        raise RecordsError(f"{folder} cannot be read ({error.strerror}); {_SWEPT}") from None


def _why_no_file(path: Path) -> str:
    if path.exists():
        return f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}; {_SWEPT}"
    if path.is_symlink():
        return f"{path} is a link to {os.readlink(path)}, which is not there; bring that along, or copy the folder with cp -rL"
    return f"{path.parent} holds no {path.name}; {_SWEPT}"


def _rows(trials: Sequence[TrialRecord], starts: Sequence[WarmStart]) -> Iterator[dict[str, Any]]:
    latest_starts = {(start.settings_key, start.num_workers): start for start in starts if start.status is Status.OK}
    attempts: Counter[tuple[str, Caches, str]] = Counter()
    for record in trials:
        measurement = (str(record.settings_key), record.caches, str(record.num_workers))
        attempts[measurement] += 1
        yield _row(record, attempts[measurement], latest_starts.get((record.settings_key, record.num_workers)))


def _row(record: TrialRecord, attempt: int, start: WarmStart | None) -> dict[str, Any]:
    settings = CompileSettings.from_dict(record.settings)
    row = {name: getattr(record, name) for name in COLUMNS if hasattr(record, name)}
    row |= {settings_column(name): value for name, value in settings.to_dict().items()}
    row["settings_label"] = settings.label
    row["attempt"] = attempt
    row |= _numerics(record.numerics)
    for name, interval in _INTERVALS.items():
        row[f"{name}_low"], row[f"{name}_high"] = getattr(record, interval) or (None, None)
    warm = record.caches is Caches.WARM
    for name in COLD_OR_WARM:
        value = getattr(record, name)
        row[name], row[f"warm_{name}"] = (None, value) if warm else (value, None)
    row |= {warm_start_column(name): getattr(start, name, None) for name in WARM_START}
    if unknown := sorted(record.compile_phases_s.keys() - COMPILE_PHASES.keys()):
        raise RecordsError(f"{TRIALS_FILE} has an unknown compile phase {unknown[0]!r}; known are {', '.join(COMPILE_PHASES)}")
    for name, phase in COMPILE_PHASES.items():
        row[phase.column] = None if warm else record.compile_phases_s.get(name)
    return row


def _numerics(numerics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of the check against eager, in three columns."""
    ratios = list(_ratios(numerics))
    return {
        "numerics_status": numerics.get("status"),
        "numerics_worst": numerics.get("remark") or numerics.get("worst"),
        "numerics_worst_ratio": None if None in ratios else max(ratios, default=None),
    }


def _ratios(numerics: Mapping[str, Any]) -> Iterator[Any]:
    """Yields every gap that the status is based on, divided by its tolerance; None if not finite."""
    for name, value in numerics.items():
        if name == "buffers" and numerics.get("remark"):  # out of tolerance, but no reason against the setting
            continue
        if isinstance(value, Mapping) and "tolerance" in value:
            gap, tolerance = number(value.get("gap")), number(value["tolerance"])
            yield 0.0 if gap == 0 else number(gap / tolerance) if gap is not None and tolerance else None
        elif isinstance(value, Mapping):
            yield from _ratios(value)


def _column(name: str, values: list[Any]) -> Any:
    """Returns the values as an array of the column's dtype, of which a frame is made in half the time that it takes of series."""
    dtype: Any = COLUMNS[name].dtype
    if name != "source":  # code, which must stay executable
        values = [visible_values(value) for value in values]
    try:
        if dtype is TIMESTAMP:
            moments = pd.to_datetime(pd.Series(values, dtype="string"), utc=True, errors="coerce", format="ISO8601")
            return moments.astype(TIMESTAMP).array
        return pd.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordsError(
            f"{TRIALS_FILE} has a {name!r} that is not a {dtype} ({error}); expected: {COLUMNS[name].meaning}"
        ) from None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return "" if value is None else visible(str(value))
