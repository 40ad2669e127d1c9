"""What recipe `auto` says another hour would gain, and what an hour more of the recorded tables does gain.

Background: a forecast is the median of draws of what untried settings may achieve, under a model that adds up the levers' gains.
Levers that save the same time gain less together, and the largest of many draws is large.

Output: for each table a line with the gain that was promised after each trial and the gain that followed; and the median over all
of them of the second's share of the first, both as logarithms.

    python -m benchmarks.search.forecasts [TABLE ...]
"""

import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.search.same_start import ROOT, TABLES, prior_for, tokens_in
from compile_sweep import command_line
from compile_sweep.schema.objectives import Aims
from orchestrator.search.lever_search import LeverSearch
from orchestrator.search.tables import Table, read_table

PROG = "python -m benchmarks.search.forecasts"
AN_HOUR_S = 3600.0
LEAST = 0.02  # promised gains below this are no promise


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare what a search promises with what it then gains."""

    tables: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")] = ()
    """Folders of tables; by default those of nine sweeps."""


def main() -> int:
    return command_line.main_of(Options, _compare, PROG)()


def _compare(options: Options) -> int:
    found = []
    for folder in options.tables or tuple(ROOT / name for name in TABLES):
        table = read_table(folder)
        pairs = list(promised_and_gained(table, Aims.parse(["samples_per_s:max"])))
        found += shares(pairs)
        print(f"{table.name}: {', '.join(f'{promised:.0%} → {gained:.0%}' for promised, gained in pairs)}")
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"median share of {len(found)} promises: {middle:.2f} (quartiles {low:.2f} and {high:.2f})")
    return 0


def shares(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """Returns how much of each promise came true, as logarithms."""
    return [math.log1p(gained) / math.log1p(promised) for promised, gained in pairs if promised >= LEAST]


def promised_and_gained(table: Table, aims: Aims) -> Iterator[tuple[float, float]]:
    """Yields, after each trial of a search, the gain that it promises for an hour and what its trials of an hour then gain."""
    search = LeverSearch(table.candidates, aims, table.facts, prior=prior_for(table), tokens=tokens_in(table))
    spent, best = [0.0], [0.0]
    promises = []
    while (setting := search.propose()) is not None:
        row = table.rows[setting.key]
        search.tell(row)
        spent.append(spent[-1] + float(row["wall_s"]))
        best.append(max(best[-1], row["samples_per_s"] if aims.is_usable(row) else 0.0))
        promises.append(search.forecast(AN_HOUR_S))
    for number, promised in enumerate(promises, start=1):
        later = [speed for speed, at in zip(best, spent, strict=True) if at <= spent[number] + AN_HOUR_S]
        if best[number]:
            yield promised, later[-1] / best[number] - 1


if __name__ == "__main__":
    sys.exit(main())
