"""How soon each searcher comes within 2 % of the fastest recorded setting, all with the same start.

Background: `levers`, the searcher of recipe `auto`, begins with what won elsewhere, and a good start is much of any searcher's
lead. So every searcher here first tries the two settings that `levers` would: the baseline, and what its prior expects most of.
The prior leaves out the workload of the table. `own start` lets each begin in its own way.

Output: for each table and searcher the seconds of trials, their number, and the fraction of the best speed after 300 and 600 s,
as medians over seeds; a JSON file.

    python -m benchmarks.search.same_start --output same_start.json [TABLE ...] [--own-start]
"""

import math
import statistics
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run.sweep_folder import write_json
from orchestrator.search import Searcher, make_proposer
from orchestrator.search.lever_prior import Prior, shipped_prior
from orchestrator.search.lever_search import LeverSearch
from orchestrator.search.proposers import Proposer
from orchestrator.search.tables import Table, read_table

PROG = "python -m benchmarks.search.same_start"
ROOT = Path(__file__).parents[2]
WORKLOAD_TABLES = (
    "benchmarks/tables/captioning-base-h200",
    "benchmarks/tables/captioning-tiny-cpu",
    "docs/results/h200-workloads/detection",
    "docs/results/h200-workloads/segmentation",
    "docs/results/h200-workloads/decoder",
    "docs/results/h200-workloads/gpt2-inference-small",
)
TABLES = (
    *WORKLOAD_TABLES,
    "docs/results/h200-workloads/gpt2-small",
    "docs/results/h100-gpt2-levers",
    "docs/results/h100-resnet",
)
SEARCHERS = (Searcher.LEVERS, Searcher.GAIN, Searcher.TPE, Searcher.NSGA2, Searcher.RANDOM, Searcher.GRID)
BUDGETS_S = (300.0, 600.0)
NUM_SHARED = 2  # number of settings that every searcher begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare searchers on recorded tables by the time to the fastest setting."""

    tables: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")] = ()
    """Folders of tables; by default those of nine sweeps."""
    output: Path
    """The JSON file to write."""
    searcher: tuple[Searcher, ...] = SEARCHERS
    seeds: int = 20
    target: float = 0.98
    """Share of the fastest setting's speed to reach."""
    own_start: Flag = False
    """Let each searcher begin as it would by itself."""


class Started:
    """A proposer that begins with given settings.

    Args:
        start: The settings to begin with.
        proposer: Proposes the settings after those.
    """

    def __init__(self, start: Iterable[CompileSettings], proposer: Proposer) -> None:
        self._start, self._proposer = deque(start), proposer
        self._begun = {setting.key for setting in self._start}

    def propose(self) -> CompileSettings | None:
        if self._start:
            return self._start.popleft()
        while (setting := self._proposer.propose()) is not None:
            if setting.key not in self._begun:
                return setting
        return None

    def tell(self, record: Record) -> None:
        self._proposer.tell(record)


def main() -> int:
    return command_line.main_of(Options, _compare, PROG)()


def _compare(options: Options) -> int:
    warnings.simplefilter("ignore")  # Optuna warns about samplers that may still change
    aims = Aims.parse(["samples_per_s:max"])
    told: dict[str, Any] = {"target": options.target, "seeds": options.seeds, "own_start": options.own_start, "tables": {}}
    for folder in options.tables or tuple(ROOT / name for name in TABLES):
        table = read_table(folder)
        name = f"{table.name} ({len(table.rows)} settings, {table.gpu_s:,.0f} s)"
        print(name)
        told["tables"][table.name] = found = {"settings": len(table.rows), "gpu_s": table.gpu_s, "workload": table.workload}
        for searcher in options.searcher:
            seeds = 1 if searcher in (Searcher.LEVERS, Searcher.GRID) else options.seeds
            runs = [_replay(table, aims, searcher, seed, options) for seed in range(seeds)]
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            found[str(searcher)] = {key: None if value == math.inf else round(value, 4) for key, value in middle.items()}
            print(f"  {searcher:8} {found[str(searcher)]}")
    write_json(options.output, told)
    return 0


def _replay(table: Table, aims: Aims, searcher: Searcher, seed: int, options: Options) -> dict[str, float]:
    prior = prior_for(table)
    proposer = make_proposer(searcher, table.candidates, aims, table.facts, seed=seed, prior=prior, tokens=tokens_in(table))
    if not options.own_start and searcher is not Searcher.LEVERS:
        proposer = Started(_start(table, aims, prior), proposer)
    best = max(row["samples_per_s"] for row in table.rows.values() if aims.is_usable(row))
    spent, reached, trials, found, at = 0.0, math.inf, math.inf, 0.0, dict.fromkeys(BUDGETS_S, 0.0)
    number = 0
    while (setting := proposer.propose()) is not None:
        row = table.rows[setting.key]
        proposer.tell(row)
        number, spent = number + 1, spent + float(row["wall_s"])
        found = max(found, row["samples_per_s"] / best if aims.is_usable(row) else 0.0)
        at = {budget: found if spent <= budget else at[budget] for budget in at}
        if found >= options.target and reached == math.inf:
            reached, trials = spent, number
    return {
        "seconds": reached,
        "trials": trials,
        **{f"at_{budget:.0f}_s": share for budget, share in at.items()},
        "in_the_end": found,
        "all_trials": number,
        "all_seconds": spent,
    }


def _start(table: Table, aims: Aims, prior: Prior) -> list[CompileSettings]:
    """Returns the settings that `levers` begins with; the second is chosen knowing the result of the first."""
    search = LeverSearch(table.candidates, aims, table.facts, prior=prior, tokens=tokens_in(table))
    start: list[CompileSettings] = []
    while len(start) < NUM_SHARED and (setting := search.propose()) is not None:
        start.append(setting)
        search.tell(table.rows[setting.key])
    return start


def tokens_in(table: Table) -> Callable[[CompileSettings], float]:
    """Returns a function for the tokens per padded batch, which a sweep knows before a trial and this takes from records."""

    def way(setting: CompileSettings) -> tuple[object, ...]:
        return setting.padding, setting.pad_multiple, setting.group_window, setting.buckets, setting.bucket_size

    measured = {way(CompileSettings.parse(key)): row["mean_length"] for key, row in table.rows.items() if row["mean_length"]}
    return lambda setting: float(measured.get(way(setting), table.facts.max_length))


def prior_for(table: Table) -> Prior:
    """Returns the prior for a table, without what was learned on its workload."""
    has_gpu = any(row.get("device") not in (None, "cpu") for row in table.rows.values())
    return shipped_prior().elsewhere(table.origin.workload, has_gpu=has_gpu)


if __name__ == "__main__":
    sys.exit(main())
