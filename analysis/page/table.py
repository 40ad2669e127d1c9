"""The report's table of trials: its columns, how each figure is written, and what it sorts by.

Also lists the trials that do not count, grouped by label, with their reason and a link to their log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd

from analysis.choose.pareto import pareto_front, speedup_over_eager
from analysis.columns import COMPILE_PHASES
from analysis.formatting import MISSING, duration, figure, gib, interval, number, percent, text, times, whole
from analysis.page.verdict import Remark, remarks
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches

MOST_SOURCES = 300
"""Number of rows that include the Python of their setting, which would be too much for a page of 10,000."""


_IN_A_UNIT = {"GiB": 2**30, "%": 0.01}  # size of a heading's unit in the frame's unit, if the two differ


class Cell(NamedTuple):
    """A figure as written, and the number behind it."""

    text: str
    sort: float | None  # in the heading's unit, which the filter also uses; None sorts last
    under: str = ""  # small text below it: its 95% interval, or how much of a tolerance it uses
    note: str = ""  # tooltip


class Heading(NamedTuple):
    """A column of the table."""

    name: str
    title: str
    unit: str
    write: Callable[[Any], str]
    meaning: str
    is_detail: bool = False  # whether it is shown only with all columns

    @classmethod
    def named(cls, name: str) -> Heading:
        """Returns the heading of the frame's column `name`."""
        return next(heading for heading in HEADINGS if heading.name == name)

    def cell(self, trial: pd.Series) -> Cell:
        """Returns this column's cell in a trial's row."""
        value = trial[self.name]
        known = number(value)
        between = ""
        if f"{self.name}_low" in trial:
            between = interval(trial[f"{self.name}_low"], trial[f"{self.name}_high"])
        note = phases_note(trial) if self.name == "compile_s" else ""
        return Cell(self.write(value), None if known is None else known / _IN_A_UNIT.get(self.unit, 1), between, note)


class Row(NamedTuple):
    """A trial. Text is unescaped, as in the record."""

    setting_name: str
    settings_label: str
    settings_key: str
    on_front: bool
    columns: list[tuple[Heading, Cell]]
    numerics: Cell
    remarks: list[Remark]
    status: str
    outcome: str
    source: str  # the settings as the Python that was executed; empty if the record has none


def _plain_gib(num_bytes: Any) -> str:
    return gib(num_bytes).removesuffix(" GiB")


def _plain_percent(share: Any) -> str:
    return percent(share).removesuffix("%")


HEADINGS = (
    Heading("samples_per_s", "throughput", "samples/s", figure, "over all workers"),
    Heading("speedup_eager", "vs eager interleaved", "", times, "step time of eager over this, on the same batches in turn"),
    Heading("speedup_best_eager", "vs best eager", "", times, "throughput over the fastest eager trial's"),
    Heading(
        "speedup_same_padding", "vs same padding", "", times,
        "throughput over that of the eager trial with the same padding, grouping, precision, attention and options", True,
    ),
    Heading("compile_s", "compile", "s", figure, "cold: warm-up less what its steps take once warm"),
    Heading("first_step_s", "first step", "s", figure, "cold", True),
    Heading("warm_compile_s", "warm compile", "s", figure, "with restored caches"),
    Heading("cold_equivalent_s", "cold, estimated", "s", figure, "warm compile and what the artifacts hit once took to compile"),
    Heading("warm_start_s", "warm start", "s", figure, "from importing torch to compiling no more, from its own artifacts"),
    Heading("warm_start_first_step_s", "warm first step", "s", figure, "of a warm start", True),
    Heading("cache_hits", "cache hits", "", whole, "look-ups of the compiler that found something", True),
    Heading("cache_misses", "cache misses", "", whole, "look-ups that did not", True),
    Heading("step_ms_median", "step", "ms", figure, "mean of the batches' median steps"),
    Heading("tokens_per_s", "useful tokens", "tokens/s", figure, "padding not counted", True),
    Heading("mean_length", "mean length", "tokens", whole, "padded length of the timed batches", True),
    Heading("peak_memory_bytes", "peak memory", "GiB", _plain_gib, "most allocated on a worker's device, the worst of them"),
    Heading("peak_reserved_bytes", "peak reserved", "GiB", _plain_gib, "most held by torch's allocator", True),
    Heading("compile_peak_memory_bytes", "compile memory", "GiB", _plain_gib, "most allocated during the warm-up", True),
    Heading("cudagraph_pool_bytes", "CUDA-graph pool", "GiB", _plain_gib, "held by the pool of CUDA graphs", True),
    Heading("data_wait_share", "data wait", "%", _plain_percent, "share of a pass spent waiting for data", True),
    Heading("clock_drift", "clock drift", "%", _plain_percent, "slowest over fastest block of the eager reference, less 1", True),
    Heading("outliers", "outliers", "steps", whole, "over 1.5 times their batch's median", True),
    Heading("graphs", "graphs", "", whole, "graphs compiled", True),
    Heading("graph_breaks", "breaks", "", whole, "graph breaks", True),
    Heading("recompiles", "recompiles", "", whole, "after the first compile", True),
)  # fmt: skip


def table(df: pd.DataFrame, *, usable_only: bool = True) -> tuple[list[Heading], list[Row]]:
    """Returns the columns with any figure, and a row for each trial: usable ones first, the highest throughput on top."""
    front = pareto_front(df).index
    trials = _cold_and_warm_joined(speedup_over_eager(df))
    usable = trials["status"] == Status.OK
    if usable_only:
        trials = trials[usable]
    trials = trials.assign(_last=~usable).sort_values(["_last", "samples_per_s"], ascending=[True, False], kind="stable")
    headings = [heading for heading in HEADINGS if trials[heading.name].notna().any()]
    rows = [
        Row(
            setting_name=str(trial["setting_name"]),
            settings_label=str(trial["settings_label"]),
            settings_key=str(trial["settings_key"]),
            on_front=index in front,
            columns=[(heading, heading.cell(trial)) for heading in headings],
            numerics=numerics_cell(trial),
            remarks=remarks(trial),
            status=str(trial["status"]),
            outcome=outcome_of(trial),
            source=text(trial["source"]) or "",
        )
        for index, trial in trials.iterrows()
    ]
    return headings, rows


def _cold_and_warm_joined(df: pd.DataFrame) -> pd.DataFrame:
    """Adds a usable warm trial's compile times to the row of the same setting's usable cold trial, and drops its own row."""
    ok, keys = df[(df["status"] == Status.OK).to_numpy(dtype=bool)], ["settings_key", "num_workers"]
    cold = {tuple(key): index for index, *key in ok[ok["caches"] == Caches.COLD][keys].itertuples()}
    joined, dropped = df.copy(), []
    for index, warm in ok[ok["caches"] == Caches.WARM].iterrows():
        if (row := cold.get(tuple(warm[keys]))) is not None:
            dropped.append(index)
            for name in ("warm_compile_s", "cold_equivalent_s"):
                joined.at[row, name] = warm[name]
    return joined.drop(index=dropped)


def outcome_of(trial: pd.Series) -> str:
    """Returns a trial's status with its label."""
    return " ".join(filter(None, (str(trial["status"]), text(trial["label"]))))


STATIC_ROWS = 30  # number of rows that are shown without a script


def static_table(headings: Sequence[Heading], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells of the fastest usable settings as text, for readers without JavaScript."""
    shown = [heading for heading in headings if not heading.is_detail]
    titles = ["setting", "remarks", *(f"{one.title} {one.unit}".strip() for one in shown), "numerics"]
    cells = [
        [
            row.setting_name,
            ", ".join(remark.text for remark in row.remarks),
            *(cell.text for heading, cell in row.columns if not heading.is_detail),
            row.numerics.text,
        ]
        for row in rows
        if row.status == Status.OK
    ]
    return titles, cells[:STATIC_ROWS]


def table_data(headings: Sequence[Heading], rows: Sequence[Row], command: str, arguments: str = "") -> dict[str, Any]:
    """Returns the table as JSON for the page's script.

    Args:
        rows: Its rows, the most important first: only the first `MOST_SOURCES` keep their source.
        command: The command that measures a setting, up to `--settings`.
        arguments: What follows the setting in that command.
    """
    return {
        "command": command,
        "arguments": arguments,
        "columns": [
            {"title": one.title, "unit": one.unit, "meaning": one.meaning, "is_detail": one.is_detail} for one in headings
        ],
        "rows": [_row_data(row, row.source if place < MOST_SOURCES else "") for place, row in enumerate(rows)],
    }


def _row_data(row: Row, source: str) -> dict[str, Any]:
    data = {
        "name": row.setting_name,
        "label": row.settings_label,
        "key": row.settings_key,
        "on_front": row.on_front,
        "status": row.status,
        "outcome": row.outcome,
        "cells": [_cell_data(cell) for _, cell in row.columns],
        "numerics": _cell_data(row.numerics),
        "remarks": [[remark.text, remark.meaning] for remark in row.remarks],
    }
    return data | ({"python": source} if source else {})


def _cell_data(cell: Cell) -> list[Any]:
    """Returns the text, the number to sort by, and the other parts that are present."""
    data = [cell.text, None if cell.sort is None else float(f"{cell.sort:.6g}"), cell.under, cell.note]
    while len(data) > 2 and not data[-1]:
        data.pop()
    return data


def numerics_cell(trial: pd.Series) -> Cell:
    """Says how the check against eager ended, and how close its worst gap came to the tolerance."""
    ratio = number(trial["numerics_worst_ratio"])
    status = text(trial["numerics_status"]) or MISSING
    used = "" if ratio is None else f"{100 * ratio:.0f}% of tolerance"
    return Cell(status, ratio, used, text(trial["numerics_worst"]) or "")


def phases_note(trial: pd.Series) -> str:
    """Lists the phases of the compile time that took any, as `Dynamo 3.1 s, …`."""
    parts = [(phase.title, number(trial[phase.column])) for phase in COMPILE_PHASES.values()]
    return ", ".join(f"{title} {figure(seconds, 's')}" for title, seconds in parts if seconds)


MOST_LISTED = 12  # maximum number of trials listed per label; the others are in the table
_FIRST_LINE = 240  # characters of a reason that are shown at first
WORKER_LOG = "worker-0.log"


class UnusableTrial(NamedTuple):
    """A trial that is not ok. Text is unescaped, as in the record."""

    setting_name: str
    settings_key: str
    reason: str  # first line of the reason
    more: str  # the whole reason, if it is longer
    phase: str
    attempt: int
    wall: str
    log: str | None  # relative link to its log, or the folder under logs/; None if there is none


class UnusableGroup(NamedTuple):
    """Trials that failed alike."""

    status: str
    label: str
    trials: list[UnusableTrial]
    num_left_out: int


def unusable(folder: Path, df: pd.DataFrame) -> list[UnusableGroup]:
    """Groups trials that are not ok by status and label; infeasible ones first, larger groups first."""
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
        setting_name=str(row["setting_name"]),
        settings_key=str(row["settings_key"]),
        reason=first,
        more="" if first == whole else whole,
        phase=text(row["phase"]) or "unknown",
        attempt=int(row["attempt"]),
        wall=duration(row["wall_s"]),
        log=log_of(folder, str(row["trial_id"])),
    )


def log_of(folder: Path, trial_id: str) -> str | None:
    """Returns a link to the trial's log, or to its folder, if that is an actual folder directly under logs/."""
    if not trial_id or Path(trial_id).name != trial_id or "\0" in trial_id:
        return None
    logs = folder / "logs" / trial_id
    if not logs.is_dir():
        return None
    link = f"logs/{quote(trial_id, safe='')}/"
    return link + WORKER_LOG if (logs / WORKER_LOG).is_file() else link


def read_end(log: Path, num_bytes: int) -> str:
    """Returns the last bytes of a log as text; raises OSError if it cannot be read."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - num_bytes))
        return file.read(num_bytes).decode("utf-8", "replace")
