"""The report's table of usable trials: which columns, how each figure is written, and by what it sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from analysis.formatting import MISSING, figure, gib, number, text, times, whole
from analysis.pareto import pareto_front, speedup_over_eager
from orchestrator.records import Status


class Cell(NamedTuple):
    """A figure as written, and the number it sorts by (None sorts last)."""

    text: str
    sort: float | None
    note: str = ""
    """What a pointer held over it shows."""


class Heading(NamedTuple):
    """A column of the table."""

    name: str
    """The frame's column."""
    title: str
    unit: str
    write: Callable[[Any], str]
    meaning: str

    @classmethod
    def named(cls, name: str) -> Heading:
        """The heading of the frame's column `name`."""
        return next(heading for heading in HEADINGS if heading.name == name)

    def cell(self, row: pd.Series) -> Cell:
        """This column's cell of a trial's row."""
        note = ""
        if f"{self.name}_low" in row and number(row[f"{self.name}_low"]) is not None:
            note = f"95 %: {figure(row[f'{self.name}_low'])} to {figure(row[f'{self.name}_high'])}"
        return Cell(self.write(row[self.name]), number(row[self.name]), note)


class Row(NamedTuple):
    """A usable trial."""

    settings_label: str
    settings_key: str
    on_front: bool
    numerics: str
    cells: list[Cell]


def _plain_gib(num_bytes: Any) -> str:
    return gib(num_bytes).removesuffix(" GiB")


HEADINGS = (
    Heading("samples_per_s", "throughput", "samples/s", figure, "over all workers"),
    Heading("speedup_best_eager", "vs best eager", "", times, "throughput over the fastest eager trial's"),
    Heading("speedup_same_padding", "vs same padding", "", times, "throughput over that of eager which pads alike"),
    Heading("compile_s", "compile", "s", figure, "cold: warm-up less as many steady steps"),
    Heading("first_step_s", "first step", "s", figure, "cold"),
    Heading("warm_compile_s", "warm compile", "s", figure, "with restored caches"),
    Heading("step_ms_median", "step", "ms", figure, "median"),
    Heading("tokens_per_s", "useful tokens", "tokens/s", figure, "padding not counted"),
    Heading("peak_memory_bytes", "peak memory", "GiB", _plain_gib, "most allocated by worker 0"),
    Heading("mean_length", "mean length", "tokens", whole, "padded length of the timed batches"),
    Heading("graphs", "graphs", "", whole, "graphs compiled"),
    Heading("graph_breaks", "breaks", "", whole, "graph breaks"),
    Heading("recompiles", "recompiles", "", whole, "after the first compile"),
)


def table(df: pd.DataFrame) -> tuple[list[Heading], list[Row]]:
    """The columns that hold a figure, and a row for each usable trial, the highest throughput first."""
    front = pareto_front(df).index
    trials = speedup_over_eager(df)
    trials = trials[trials["status"] == Status.OK].sort_values("samples_per_s", ascending=False, kind="stable")
    headings = [heading for heading in HEADINGS if trials[heading.name].notna().any()]
    rows = [
        Row(
            settings_label=str(row["settings_label"]),
            settings_key=str(row["settings_key"]),
            on_front=index in front,
            numerics=text(row["numerics_status"]) or MISSING,
            cells=[heading.cell(row) for heading in headings],
        )
        for index, row in trials.iterrows()
    ]
    return headings, rows
