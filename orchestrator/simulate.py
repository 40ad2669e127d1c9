"""`python -m orchestrator.simulate TABLE`: replays recorded tables through searchers, without Ray and without a GPU.

Each setting has the cost and the figures of its record, so replays differ only in which settings were tried in which order.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console
from rich.table import Table as Printed

from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.pareto import Losses, extended, front, hypervolume, reference_point
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.gain_search import good_elsewhere
from orchestrator.search.proposers import Proposer, Searcher, make_proposer
from orchestrator.search.pruning import Patience, Prune, patience_with, replayed
from orchestrator.search.stopping import Budget, Spending, StableFront
from orchestrator.search.tables import Table, read_table

PROG = "python -m orchestrator.simulate"


class Step(NamedTuple):
    """A finished trial of a replay."""

    settings_key: str
    gpu_s: float  # GPU-seconds of all finished trials so far
    volume: float  # hypervolume so far, as a fraction of the whole table's
    was_pruned: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """One search on a table."""

    steps: tuple[Step, ...]
    grid_gpu_s: float  # GPU-seconds for trying the whole table
    why_stopped: str | None = None  # None if nothing was left to try

    def share_to(self, volume: float) -> float:
        """Returns the fraction of the grid's cost until this fraction of its hypervolume was reached; infinite if it was not."""
        return next((step.gpu_s / self.grid_gpu_s for step in self.steps if step.volume >= volume), float("inf"))

    def volume_at(self, share: float) -> float:
        """Returns the fraction of the grid's hypervolume reached with this fraction of its cost."""
        return max((step.volume for step in self.steps if step.gpu_s <= share * self.grid_gpu_s), default=0.0)


class Ground:
    """A table with objectives and constraints: its front, and the reference point; raises ConfigError if no record is usable."""

    def __init__(self, table: Table, aims: Aims) -> None:
        rows = list(table.rows.values())
        aims.refuse_infeasible(rows)
        usable = aims.usable_losses(rows)
        self.table = table
        self.aims = aims
        self.reference = reference_point(usable)
        """Reference point of hypervolumes; see `objectives.reference_point`."""
        self._whole = hypervolume(front(usable), self.reference)
        self._gpu_s = table.gpu_s
        if not self._gpu_s > 0:
            raise ConfigError(f"no trial of {table.name} took any time, so there is no cost to compare; give another table")

    def pruning(self, patience: Patience) -> Prune:
        """Returns early stopping over the table's settings, for `replay`."""
        return replayed(self.table.candidates, self.aims, self.table.facts, patience=patience)

    def replay(
        self,
        proposer: Proposer,
        *,
        budget: Budget | None = None,
        rule: StableFront | None = None,
        prune: Prune | None = None,
        enough: float | None = None,
    ) -> Replay:
        """Searches the table until the rule, the budget, or that share (`enough`) of the hypervolume ends it."""
        spending = Spending(self.aims, rule=rule, budget=budget)
        steps: list[Step] = []
        done: list[Record] = []
        found: list[Losses] = []
        volume, now, why = 0.0, 0.0, None
        while (why := why or spending.reason_to_stop(now)) is None and (setting := proposer.propose()) is not None:
            row = self.table.rows[setting.key]
            stopped = prune(row, done) if prune else None
            row = row if stopped is None else stopped
            now += float(row["wall_s"])
            proposer.tell(row)
            spending.tell(row)
            done.append(row)
            losses = self.aims.losses(row)
            if losses is not None and self.aims.is_usable(row) and (grown := extended(found, losses)) is not found:
                found, volume = grown, hypervolume(grown, self.reference) / self._whole
            steps.append(Step(str(row["settings_key"]), spending.gpu_s, volume, stopped is not None))
            if enough is not None and volume >= enough:
                why = f"{enough:.0%} of the hypervolume is reached"
        return Replay(tuple(steps), self._gpu_s, why)


def replays(
    ground: Ground,
    searcher: Searcher,
    seeds: int,
    *,
    enough: float | None = None,
    budget: Budget | None = None,
    rule: StableFront | None = None,
    prune: Prune | None = None,
    known_good: Sequence[CompileSettings] = (),
) -> list[Replay]:
    """Returns a searcher's replays, with seeds from 0."""
    table = ground.table
    return [
        ground.replay(
            make_proposer(searcher, table.candidates, ground.aims, table.facts, seed=seed, known_good=known_good),
            enough=enough,
            budget=budget,
            rule=rule,
            prune=prune,
        )
        for seed in range(seeds)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Replay searchers on a recorded table, and print what share of the grid's cost each needs to find its front."""

    table: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
    """A sweep's folder, or a table of benchmarks/tables."""
    searcher: tuple[Searcher, ...] = (Searcher.GRID, Searcher.RANDOM, Searcher.GAIN)
    """Which searchers to compare."""
    seeds: int = 20
    """Replays per searcher."""
    objective: tuple[str, ...] = ()
    """Like samples_per_s:max; by default throughput, compile time and memory."""
    constraint: tuple[str, ...] = ()
    """Like compile_s<=120 or peak_memory_bytes<=40GiB."""
    target: float = 0.98
    """Share of the table's hypervolume to reach."""
    stop: str | None = None
    """Like "front stable for 6 trials"."""
    gpu_budget_s: float | None = None
    """GPU-seconds after which no further trial starts."""
    prune: Flag = False
    """Stop trials early, as a sweep does."""


def _simulate(options: Options) -> int:
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds} is too few; use 1 or more")
    if not 0 < options.target <= 1:
        raise ConfigError(f"--target {options.target:g} is not a share; use a number above 0 and at most 1")
    aims = Aims.parse(options.objective, options.constraint)
    rule = StableFront.parse(options.stop) if options.stop else None
    budget = Budget(gpu_s=options.gpu_budget_s)
    ground = Ground(read_table(options.table), aims)
    console = Console()
    console.print(
        f"{ground.table.name}: {len(ground.table.rows)} settings of {ground.table.workload}, {ground.table.gpu_s:,.0f} "
        f"GPU-seconds; hypervolume of {', '.join(map(str, aims.objectives))} from {_point(ground)}",
        soft_wrap=True,
    )
    headings = (f"cost to {options.target:.0%} (quartiles)", "reached", "volume", "cost", "trials", "sweeps/min")
    printed = Printed("searcher", *headings, box=None, pad_edge=False)
    for searcher in options.searcher:
        began = time.perf_counter()
        ends_early = rule is not None or options.gpu_budget_s is not None
        found = replays(
            ground,
            searcher,
            options.seeds,
            enough=None if ends_early else options.target,
            budget=budget,
            rule=rule,
            prune=ground.pruning(patience_with(searcher)) if options.prune else None,
            known_good=good_elsewhere(ground.table.workload),
        )
        per_minute = 60 * len(found) / (time.perf_counter() - began)
        printed.add_row(searcher, *_summary(found, options.target), f"{per_minute:,.0f}")
    console.print(printed)
    return 0


def _summary(found: Sequence[Replay], target: float) -> list[str]:
    shares = sorted(replay.share_to(target) for replay in found)
    reached = sum(share < float("inf") for share in shares)
    low, middle, high = quartiles(shares)
    ends = [replay.steps[-1] for replay in found]
    return [
        f"{_percent(middle)} [{_percent(low)}, {_percent(high)}]",
        f"{reached} of {len(found)}",
        _percent(statistics.median(end.volume for end in ends)),
        _percent(statistics.median(end.gpu_s for end in ends) / found[0].grid_gpu_s),
        f"{statistics.median(len(replay.steps) for replay in found):g}",
    ]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile, each one of the values, since infinity cannot be interpolated."""
    ascending = sorted(values)
    low, middle, high = (ascending[round(share * (len(ascending) - 1))] for share in (0.25, 0.5, 0.75))
    return low, middle, high


def _percent(share: float) -> str:
    return "—" if share == float("inf") else f"{share:.1%}"


def _point(ground: Ground) -> str:
    figures = [o.sign * value for o, value in zip(ground.aims.objectives, ground.reference, strict=True)]
    return ", ".join(f"{figure:.4g}" for figure in figures)


main = command_line.main_of(Options, _simulate, PROG)

if __name__ == "__main__":
    sys.exit(main())
