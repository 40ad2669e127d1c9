"""How fast each searcher reaches the front of recorded tables, over many seeds, without Ray and without a GPU.

Background: the goal is that the project's own searcher, gain, reaches 98 % of a full grid's hypervolume for at most a quarter of
the grid's cost, and beats random, TPE, NSGA-II and GP on every table. Every setting costs the seconds in its record. What gain
takes from elsewhere comes from other tables than the one it searches (leave one table out): the fronts of given tables with other
workloads or environments, and `orchestrator/search/gain_search.py` without the settings found on this workload. `gain alone`
begins without any of that.

Output: for each table the fraction of the grid's cost to the goal and the regret at some costs, as medians and quartiles over
seeds, and what early stopping saves and loses; a JSON file; a chart per table as a page and, if there is a Chromium, as a
picture. With --flat instead: time and memory of 10,000 trials of one search.

    python -m benchmarks.search --output search.json --figures docs/results/search               # benchmarks/tables/*
    python -m benchmarks.search benchmarks/tables/NAME --searcher random gain --seeds 5 --output s.json
    python -m benchmarks.search --flat --output flat.json
"""

import os
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table as Printed

from analysis.picture import PictureError, draw
from benchmarks.output_files import make_room
from benchmarks.search.regret_curves import regret_figure, regret_info
from benchmarks.search.same_start import Started
from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings
from orchestrator.plan.recipes import grid
from orchestrator.plan.space import Target, choose, varied
from orchestrator.run.sweep_folder import write_json
from orchestrator.search import Candidates, Outlook, Searcher
from orchestrator.search.earlier_sweeps import best_settings
from orchestrator.search.gain_search import GainPerSecond, designed, good_elsewhere
from orchestrator.search.pruning import Patience
from orchestrator.search.tables import Table, read_table
from orchestrator.simulate import Ground, Replay, quartiles, replays

PROG = "python -m benchmarks.search"
TABLES = Path(__file__).parents[1] / "tables"
ALONE = "gain alone"
LEAST_GAINS = (0.001, 0.005, 0.0075, 0.01)
"""Thresholds of early stopping to compare; `orchestrator/search/pruning.py` has the one in use."""

COSTS = (0.25, 0.5)  # fractions of the grid's cost at which regret is printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare searchers on recorded tables."""

    tables: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")] = ()
    """Folders of tables; by default all of benchmarks/tables."""
    output: Path
    """The JSON file to write."""
    figures: Path | None = None
    """The folder to draw charts to; by default there are none."""
    searcher: tuple[Searcher, ...] = tuple(Searcher)
    seeds: int = 20
    objective: tuple[str, ...] = ()
    """Like samples_per_s:max; by default throughput, compile time and memory."""
    constraint: tuple[str, ...] = ()
    goal: float = 0.98
    until: float = 0.6
    """Share of the grid's cost at which a search ends; GP takes about a second per trial."""
    processes: int = os.cpu_count() or 1
    same_start: Flag = False
    """Start every searcher with the settings that gain starts with."""
    flat: Flag = False
    """Time 10,000 trials of one search instead."""


def main() -> int:
    return command_line.run(lambda: _benchmark(command_line.parse(Options, PROG, sys.argv[1:])))


def _benchmark(options: Options) -> int:
    console = Console()
    make_room(options.output)
    if options.flat:
        write_json(options.output, {"flat": _flat(console, options)})
        return 0
    folders = options.tables or tuple(sorted(folder for folder in TABLES.glob("*") if folder.is_dir()))
    if not folders:
        raise ConfigError(f"{TABLES} holds no table; make one with python -m orchestrator.search.tables SWEEP {TABLES}/NAME")
    aims = Aims.parse(options.objective, options.constraint)
    tables = {folder: read_table(folder) for folder in folders}
    for table in tables.values():
        Ground(table, aims)  # refuses bad input before hours are spent
    told: dict[str, Any] = {"objectives": list(map(str, aims.objectives)), "constraints": list(map(str, aims.constraints))}
    told |= {"seeds": options.seeds, "goal": options.goal, "until": options.until, "tables": {}}
    for folder, table in tables.items():
        known = [setting.key for setting in _known_elsewhere(table, list(tables.values()), aims)]
        names = [*map(str, options.searcher), *([ALONE] if Searcher.GAIN in options.searcher else [])]
        jobs = [(name, seed) for name in names for seed in range(1 if name == Searcher.GRID else options.seeds)]
        aimed = (options.objective, options.constraint)
        # By its module's name, because a spawned process cannot import a package's `__main__` as its own.
        search = import_module("benchmarks.search.__main__")._search
        run = partial(search, str(folder), *aimed, options.until, tuple(known), options.same_start)
        with _processes(options.processes) as pool:
            found = list(pool.map(run, jobs))
        by_name = {name: [replay for (n, _), replay in zip(jobs, found, strict=True) if n == name] for name in names}
        pruned = _pruned(Ground(table, aims))
        _print(console, table, by_name, options)
        for one in pruned:
            console.print(
                f"early stopping at {one['least_gain']:.2%} in the order of {one['searcher']}: {one['saved']:.1%} of GPU-seconds "
                f"saved (median), {one['lost']:.2%} of volume lost at most",
                soft_wrap=True,
            )
        told["tables"][table.name] = {
            "settings": len(table.rows),
            "gpu_s": table.gpu_s,
            "workload": table.workload,
            "environment_key": table.origin.environment_key,
            "known_from_elsewhere": known,
            "early_stopping": pruned,
            "searchers": {name: _told(runs, options) for name, runs in by_name.items()},
        }
        if options.figures is not None:
            _draw(console, options.figures, table, {n: runs for n, runs in by_name.items() if n != ALONE}, options)
    write_json(options.output, told)
    return 0


def _processes(count: int) -> ProcessPoolExecutor:
    """Returns a pool of processes with one core each, since several threads would only wait for each other."""
    os.environ["OMP_NUM_THREADS"] = "1"  # here, because numpy reads it on import, before any initializer
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def _known_elsewhere(table: Table, tables: list[Table], aims: Aims) -> list[CompileSettings]:
    others = [other for other in tables if other.origin != table.origin]
    known = [s for other in others for s in best_settings(list(other.rows.values()), aims)] + good_elsewhere(table.workload)
    return list({setting.key: setting for setting in known}.values())


def _search(
    folder: str,
    objectives: tuple[str, ...],
    constraints: tuple[str, ...],
    until: float,
    known: tuple[str, ...],
    same_start: bool,
    job: tuple[str, int],
) -> Replay:
    """Runs one search, in a process of its own."""
    import warnings

    warnings.simplefilter("ignore")  # Optuna warns about samplers that may still change
    from orchestrator.search import Budget, make_proposer

    name, seed = job
    table = read_table(Path(folder))
    ground = Ground(table, Aims.parse(objectives, constraints))
    known_good = () if name == ALONE else [CompileSettings.parse(key) for key in known]
    proposer = make_proposer(
        Searcher.GAIN if name == ALONE else Searcher(name),
        table.candidates,
        ground.aims,
        table.facts,
        seed=seed,
        known_good=known_good,
    )
    if same_start:
        guessed_s = Outlook(table.candidates, ground.aims, table.facts).guessed_s
        places = designed(table.candidates, guessed_s, known_good, seed=seed)
        proposer = Started([table.candidates.settings[place] for place in places], proposer)
    return ground.replay(proposer, budget=None if until >= 1 else Budget(gpu_s=until * table.gpu_s))


def _pruned(ground: Ground) -> list[dict[str, Any]]:
    """Returns what early stopping saves and loses when every setting is tried, at several thresholds and in several orders."""
    found = []
    for least_gain in LEAST_GAINS:
        prune = ground.pruning(Patience(least_gain=least_gain))
        for searcher, seeds in ((Searcher.GRID, 1), (Searcher.RANDOM, 20), (Searcher.GAIN, 8)):
            runs = replays(ground, searcher, seeds, prune=prune, known_good=good_elsewhere(ground.table.workload))
            ends = [replay.steps[-1] for replay in runs]
            found.append(
                {
                    "least_gain": least_gain,
                    "searcher": str(searcher),
                    "saved": 1 - statistics.median(end.gpu_s for end in ends) / runs[0].grid_gpu_s,
                    "lost": 1 - min(end.volume for end in ends),
                }
            )
    return found


def _print(console: Console, table: Table, by_name: dict[str, list[Replay]], options: Options) -> None:
    title = f"{table.name}: {len(table.rows)} settings, {table.gpu_s:,.0f} GPU-s, {options.seeds} seeds; medians and quartiles"
    costs = [cost for cost in COSTS if cost <= options.until]
    console.print(title, soft_wrap=True)
    headings = ("searcher", f"cost to {options.goal:.0%}", "reached", *(f"regret at {cost:.0%}" for cost in costs))
    printed = Printed(*headings, box=None, pad_edge=False)
    for name, runs in by_name.items():
        shares = [replay.share_to(options.goal) for replay in runs]
        reached = sum(share < float("inf") for share in shares)
        regrets = [[1 - replay.volume_at(cost) for replay in runs] for cost in costs]
        printed.add_row(str(name), _spread(shares), f"{reached}/{len(runs)}", *map(_spread, regrets))
    console.print(printed)


def _spread(values: list[float]) -> str:
    low, middle, high = ("—" if value == float("inf") else f"{100 * value:.1f}" for value in quartiles(values))
    return f"{middle} [{low}, {high}] %"


def _told(runs: list[Replay], options: Options) -> dict[str, Any]:
    def plain(values: list[float]) -> list[float | None]:
        return [None if value == float("inf") else value for value in quartiles(values)]

    return {
        "cost_to_goal": plain([replay.share_to(options.goal) for replay in runs]),
        "regret": {str(cost): plain([1 - replay.volume_at(cost) for replay in runs]) for cost in COSTS if cost <= options.until},
        "curves": [[[step.gpu_s / replay.grid_gpu_s, step.volume] for step in replay.steps] for replay in runs],
    }


def _draw(console: Console, folder: Path, table: Table, by_name: dict[str, list[Replay]], options: Options) -> None:
    curves = {n: [[(s.gpu_s / r.grid_gpu_s, s.volume) for s in r.steps] for r in runs] for n, runs in by_name.items()}
    title = f"{table.name}: {len(table.rows)} settings, {options.seeds} seeds"
    chart = regret_figure(regret_info(curves, title=title, goal=options.goal, until=options.until))
    folder.mkdir(parents=True, exist_ok=True)
    chart.write_html(folder / f"{table.name}.html", include_plotlyjs="cdn")
    try:
        draw(chart, folder / f"{table.name}.png")
    except PictureError as error:
        console.print(f"no picture: {error}")


def _flat(console: Console, options: Options) -> list[dict[str, float]]:
    """Returns seconds per trial, process seconds, and the process's memory, for each thousand of one search's 10,000 trials."""
    target = Target(max_length=256, has_gpu=True)
    axes = {"group_window": range(1, 12), "matmul_precision": ["highest", "high"], "autocast": ["bf16", "fp16"]}
    settings = choose(varied(grid(target), {name: list(values) for name, values in axes.items()}), target).settings[:10_000]
    proposer = GainPerSecond(Candidates(settings), Aims.parse(options.objective, options.constraint), target)
    rows, began = [], time.process_time()
    for number in range(1, len(settings) + 1):
        setting = proposer.propose()
        assert setting is not None
        proposer.tell(_made_up(setting, number))
        if number % 1000 == 0:
            took, began = time.process_time() - began, time.process_time()
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            rows.append({"trials": number, "trial_s": took / 1000, "memory_bytes": memory})
            console.print(f"trials {number - 999:,} to {number:,}: {took:.2f} ms each, {memory / 2**20:,.0f} MiB")
    return rows


def _made_up(setting: CompileSettings, number: int) -> dict[str, Any]:
    """Returns made-up figures that differ by field, so that there is a front and a model to learn."""
    weight = sum(map(ord, setting.key)) % 997
    graphs = setting.num_graphs(256)
    compile_s = 1.0 + 10.0 * graphs * (3.0 if setting.tunes else 1.0) + weight / 100
    rate = 500.0 + 100.0 * (graphs > 0) + weight / 5 + (setting.group_window or 1)
    figures = {"samples_per_s": rate, "compile_s": compile_s, "peak_memory_bytes": 2**34 + weight * 2**20}
    return {"settings_key": setting.key, "status": "ok" if number % 9 else "infeasible", "wall_s": 60 + compile_s, **figures}


if __name__ == "__main__":
    sys.exit(main())
