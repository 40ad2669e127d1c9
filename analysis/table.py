"""`python -m analysis.table DIR`: the sweep in DIR as a table for GitHub, on standard output.

It contains every trial, the usable ones first. Intervals are 95%. Compile times are cold, or a warm trial's estimate after a ≈,
with a column for each phase that took any time. A missing figure is a dash.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from analysis.choose.pareto import pareto_front
from analysis.columns import COMPILE_PHASES
from analysis.command_line import SweepFolder
from analysis.formatting import MISSING, cell, figure, gib, interval, number, or_estimate, text, times
from analysis.load import load
from analysis.page.table import numerics_cell
from analysis.page.verdict import remarks
from compile_sweep import command_line
from compile_sweep.schema.outcome import Status

PROG = "python -m analysis.table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Print a sweep's trials as a Markdown table, for example for GitHub."""

    folder: SweepFolder
    """The folder a sweep wrote."""


class TableColumn(NamedTuple):
    """A column: its title, and its text for a trial."""

    title: str
    write: Callable[[pd.Series], str]
    is_number: bool = True


def markdown_table(df: pd.DataFrame) -> str:
    """Formats the trials that `load` returned as a GitHub table, ending in a line break; text from records is escaped."""
    front = pareto_front(df).index
    usable = (df["status"] == Status.OK).to_numpy(dtype=bool)
    order = df.assign(_last=~usable).sort_values(["_last", "samples_per_s"], ascending=[True, False], kind="stable")
    columns = _columns(df)
    lines = [
        [column.title for column in columns] + ["status"],
        ["--:" if column.is_number else "---" for column in columns] + ["---"],
        *(
            [*(cell(column.write(trial)) for column in columns), cell(_status(trial, index in front))]
            for index, trial in order.iterrows()
        ),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _command(options: Options) -> int:
    print(markdown_table(load(options.folder)), end="")
    return 0


def _columns(df: pd.DataFrame) -> list[TableColumn]:
    phases = [phase for phase in COMPILE_PHASES.values() if (df[phase.column].fillna(0) > 0).any()]
    warm = [_seconds("warm_compile_s", "warm compile s")] if df["warm_compile_s"].notna().any() else []
    return [
        TableColumn("id", lambda trial: str(trial["setting_id"]), is_number=False),
        TableColumn("setting", lambda trial: str(trial["settings_label"]), is_number=False),
        _with_interval("samples_per_s", "samples/s", figure),
        _with_interval("speedup_eager", "vs eager interleaved", times),
        TableColumn("compile s", lambda trial: or_estimate(trial["compile_s"], trial["cold_equivalent_s"], _tenths)),
        *(_seconds(phase.column, f"{phase.title} s") for phase in phases),
        *warm,
        TableColumn("peak GiB", lambda trial: gib(trial["peak_memory_bytes"]).removesuffix(" GiB")),
        TableColumn("numerics", _numerics, is_number=False),
    ]


def _seconds(name: str, title: str) -> TableColumn:
    return TableColumn(title, lambda trial: _tenths(trial[name]))


def _tenths(seconds: object) -> str:
    known = number(seconds)
    return MISSING if known is None else f"{known:,.1f}"


def _with_interval(name: str, title: str, write: Callable[[object], str]) -> TableColumn:
    def written(trial: pd.Series) -> str:
        ends = interval(trial[f"{name}_low"], trial[f"{name}_high"])
        return write(trial[name]) + (f" ({ends})" if ends else "")

    return TableColumn(title, written)


def _numerics(trial: pd.Series) -> str:
    cell = numerics_cell(trial)
    return ", ".join(filter(None, (cell.text, cell.under)))


def _status(trial: pd.Series, on_front: bool) -> str:
    if trial["status"] != Status.OK:
        return f"{trial['status']}: {text(trial['label']) or MISSING}"
    return ", ".join([str(Status.OK), *(["on the front"] if on_front else []), *(remark.text for remark in remarks(trial))])


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
