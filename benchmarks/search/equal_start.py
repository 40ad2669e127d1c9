"""Compares searchers over all recorded tables, ours and public ones of GPU kernels, each search with the same first settings.

Background: a searcher's first settings may decide how it compares, so here all begin with the six that `gain` would choose with
this seed (`designed` in `orchestrator/search/gain_search.py`). Settings known from other workloads are part of them on our
tables, of which the one that is searched is left out. A baseline that no sweep offers is added: LFBO (`lfbo.py`). GP is left out:
it takes a second or more per proposal. Optuna's samplers see every field as a choice, `gain` and LFBO see numbers in order.

Output: for each table and searcher the share of the table's cost to 98 % of its hypervolume, and the score of the autotuning
community for throughput alone (`methodology_score.py`), as Markdown on standard output and in a JSON file.

    python -m benchmarks.search.equal_start --output equal_start.json [--seeds 20] [KERNELS.csv ...]
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import tyro

from benchmarks.search.lfbo import Lfbo
from benchmarks.search.methodology_score import Search, Space, score
from benchmarks.search.public_tables import read_csv_table
from benchmarks.search.same_start import ROOT, WORKLOAD_TABLES, Started
from compile_sweep import command_line
from compile_sweep.schema.objectives import Aims
from orchestrator.run.sweep_folder import write_json
from orchestrator.search import Budget, Outlook, Searcher, make_proposer
from orchestrator.search.gain_search import designed, good_elsewhere
from orchestrator.search.proposers import Proposer
from orchestrator.search.tables import Table, read_table
from orchestrator.simulate import Ground, Step, quartiles

PROG = "python -m benchmarks.search.equal_start"
LFBO = "lfbo"
SEARCHERS = ("gain", LFBO, "tpe", "nsga2", "random")
LARGE = 100  # number of settings from which a table is searched only for `UNTIL` of its cost

UNTIL = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare searchers over our recorded tables, and over public ones, from the same start."""

    kernels: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="KERNELS.csv")] = ()
    """Public tables, as `benchmarks/search/public_tables.py` describes them."""
    output: Path
    """The JSON file to write."""
    seeds: int = 20
    goal: float = 0.98
    """Share of a table's hypervolume to reach."""
    processes: int = os.cpu_count() or 1


def main() -> int:
    return command_line.main_of(Options, _compare, PROG)()


def _compare(options: Options) -> int:
    paths = [*(ROOT / name for name in WORKLOAD_TABLES), *options.kernels]
    tables = [_table(path) for path in paths]
    jobs = [(path, name, seed) for path in paths for name in SEARCHERS for seed in range(options.seeds)]
    # By its module's name, because a spawned process cannot import `__main__` as its own.
    search = partial(import_module("benchmarks.search.equal_start").searched, goal=options.goal)
    os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported by the processes
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        found = {}
        for job, result in zip(jobs, pool.map(search, jobs), strict=True):
            found[job] = result
            print(f"{job[0].stem} {job[1]} {job[2]}: {_percent(result[0])}", file=sys.stderr, flush=True)
    rows = [
        {
            "table": table.name,
            "settings": len(table.rows),
            "searchers": {
                name: _summary(table, [found[path, name, seed] for seed in range(options.seeds)]) for name in SEARCHERS
            },
        }
        for path, table in zip(paths, tables, strict=True)
    ]
    write_json(options.output, {"goal": options.goal, "seeds": options.seeds, "tables": rows})
    print("\n".join(markdown(rows)))
    return 0


def _table(path: Path) -> Table:
    return read_csv_table(path) if path.suffix == ".csv" else read_table(path)


def searched(job: tuple[Path, str, int], *, goal: float) -> tuple[float, Search]:
    """Runs a searcher twice on a table with one seed.

    Returns:
        The share of the table's cost to the goal, infinite if it was not reached, and the trials of the search for speed alone.
    """
    warnings.simplefilter("ignore")  # Optuna warns about samplers that may still change
    path, name, seed = job
    table = _table(path)
    # Kernels have no figure for memory.
    aims = Aims.parse(["samples_per_s:max", "compile_s:min"] if path.suffix == ".csv" else [])
    budget = Budget(gpu_s=UNTIL * table.gpu_s) if len(table.rows) >= LARGE else None
    ground = Ground(table, aims)
    share = ground.replay(_proposer(name, table, aims, seed), budget=budget, enough=goal).share_to(goal)
    speed = Aims.parse(["samples_per_s:max"])
    budget = Budget(gpu_s=float(_space(table).budget()[-1]))
    steps = Ground(table, speed).replay(_proposer(name, table, speed, seed), budget=budget).steps
    return share, [_trial(table, speed, step) for step in steps]


def _proposer(name: str, table: Table, aims: Aims, seed: int) -> Proposer:
    guessed_s = Outlook(table.candidates, aims, table.facts).guessed_s
    places = designed(table.candidates, guessed_s, good_elsewhere(table.workload), seed=seed)
    start = [table.candidates.settings[place] for place in places]
    if name == LFBO:
        return Started(start, Lfbo(table.candidates, aims, seed=seed))
    return Started(start, make_proposer(Searcher(name), table.candidates, aims, table.facts, seed=seed))


def _trial(table: Table, speed: Aims, step: Step | str) -> tuple[float, float | None]:
    row = table.rows[step if isinstance(step, str) else step.settings_key]
    return float(row["wall_s"]), 1 / float(row["samples_per_s"]) if speed.is_usable(row) else None


def _space(table: Table) -> Space:
    speed = Aims.parse(["samples_per_s:max"])
    return Space.of([_trial(table, speed, key) for key in table.rows])


def _summary(table: Table, runs: Sequence[tuple[float, Search]]) -> dict[str, Any]:
    shares = [None if share == math.inf else share for share in quartiles([share for share, _ in runs])]
    return {"cost_to_goal": shares, "score": score(_space(table), [search for _, search in runs])}


def markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of both tables: costs with the median over tables, and scores with their mean."""
    yield f"| share of the cost to the goal | settings | {' | '.join(SEARCHERS)} |"
    yield f"|---|--:|{'--:|' * len(SEARCHERS)}"
    medians: dict[str, list[float]] = {name: [] for name in SEARCHERS}
    for row in rows:
        for name in SEARCHERS:
            share = row["searchers"][name]["cost_to_goal"][1]
            medians[name].append(math.inf if share is None else share)
        yield f"| {row['table']} | {row['settings']} | {' | '.join(_percent(medians[name][-1]) for name in SEARCHERS)} |"
    yield f"| median over tables | | {' | '.join(_percent(statistics.median(medians[name])) for name in SEARCHERS)} |"
    yield ""
    yield f"| score | settings | {' | '.join(SEARCHERS)} |"
    yield f"|---|--:|{'--:|' * len(SEARCHERS)}"
    for row in rows:
        yield _scores(row)
    means = [statistics.mean(row["searchers"][name]["score"] for row in rows) for name in SEARCHERS]
    yield f"| mean over tables | | {' | '.join(f'{mean:.2f}' for mean in means)} |"


def _scores(row: dict[str, Any]) -> str:
    cells = [f"{row['searchers'][name]['score']:.2f}" for name in SEARCHERS]
    return f"| {row['table']} | {row['settings']} | {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return "not reached" if share == math.inf else f"{share:.1%}"


if __name__ == "__main__":
    sys.exit(main())
