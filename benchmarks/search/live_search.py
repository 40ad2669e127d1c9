"""Compares sweeps that ran live over one space under one budget, each with another searcher.

Background: replays of recorded tables say what searchers are worth on average over seeds; this says what one achieved in the
available time on a machine, with Ray, compiling and early stopping. Run each sweep alone, one after the other, with the same
options:

    python -m orchestrator.sweep --searcher gain --time-budget-s 1200 --cache-store none --output live/gain
    python -m orchestrator.sweep --searcher random --time-budget-s 1200 --cache-store none --output live/random
    python -m benchmarks.search.live_search live/gain live/random --output live.json --figure live.png

Output: for each sweep its trials, how many of them are on the front of all sweeps together, its share of their hypervolume
at fractions of the budget, and when it reached most of it; a JSON file; a picture of the fronts.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import analysis
from analysis.formatting import figure
from analysis.load import SweepInfo
from analysis.picture import draw, picture_title
from benchmarks.output_files import make_room
from benchmarks.search.fronts_of_sweeps import SweepLine, fronts_figure, fronts_info, share_at
from compile_sweep import command_line
from compile_sweep.schema.errors import ConfigError
from orchestrator.run.sweep_folder import write_json

PROG = "python -m benchmarks.search.live_search"
SHARES = (0.25, 0.5, 1.0)  # fractions of the budget at which hypervolume is printed

_ALIKE = ("workload", "size", "time_budget_s", "workers_per_trial", "device", "pipeline", "caches", "max_concurrent")
"""Fields of a sweep's configuration that must be equal in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare live searches of the same space."""

    sweeps: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The folders of the sweeps."""
    output: Path
    """The JSON file to write."""
    figure: Path | None = None
    """The PNG or SVG file to draw a chart to; by default there is no chart."""
    goal: float = 0.98
    """Print the time it took to reach this share of the common hypervolume."""


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _compare(command_line.parse(Options, PROG, words)))


def _compare(options: Options) -> int:
    if len(set(options.sweeps)) < 2:
        raise ConfigError("one sweep cannot be compared with itself; name the folders of two or more")
    make_room(options.output)
    infos = {folder: analysis.load_sweep(folder) for folder in options.sweeps}
    _refuse_unlike(infos)
    names = _names(infos)
    first = infos[options.sweeps[0]]
    sweeps = {names[folder]: (analysis.load(folder), info.started_at) for folder, info in infos.items()}
    found = fronts_info(sweeps, title=picture_title(first))
    if not any(line.points for line in found.lines):
        raise ConfigError("no sweep has a usable trial; give sweeps that measured something")
    budget_s = float(
        first.config.get("time_budget_s") or max((end for line in found.lines for end, _ in line.reached), default=0.0)
    )
    told = [_told(line, budget_s, options.goal) for line in found.lines]
    title = f"hypervolume in % of what all sweeps have together, at shares of {budget_s:,.0f} s; trials on the front of all"
    console = Console()
    console.print(title, soft_wrap=True)
    console.print(_table(told, options.goal))
    write_json(
        options.output,
        {"budget_s": budget_s, "goal": options.goal, "environment": dict(first.environment), "sweeps": told},
    )
    if options.figure is not None:
        draw(fronts_figure(found), options.figure)
    return 0


def _refuse_unlike(infos: Mapping[Path, SweepInfo]) -> None:
    (one, first), *others = infos.items()
    for other, info in others:
        if info.environment_key != first.environment_key:
            raise ConfigError(f"{one} and {other} ran in different environments; give sweeps of one machine")
        for name in _ALIKE:
            if info.config.get(name) != first.config.get(name):
                theirs, ours = info.config.get(name), first.config.get(name)
                raise ConfigError(f"{one} has {name} {ours} and {other} {theirs}; give sweeps that differ in the searcher alone")
        if set(info.config.get("settings", ())) != set(first.config.get("settings", ())):
            raise ConfigError(f"{one} and {other} searched different settings; give sweeps that differ in the searcher alone")


def _names(infos: Mapping[Path, SweepInfo]) -> dict[Path, str]:
    """Returns each sweep's searcher as its name or, if two are equal, its folder's name or, if those are equal, its folder."""
    searchers = {folder: str((info.config.get("search") or {}).get("searcher") or "grid") for folder, info in infos.items()}
    for names in (searchers, {folder: folder.name for folder in infos}):
        if len(set(names.values())) == len(names):
            return names
    return {folder: str(folder) for folder in infos}


def _told(line: SweepLine, budget_s: float, goal: float) -> dict[str, Any]:
    return {
        "name": line.name,
        "trials": line.num_trials,
        "usable": len(line.points),
        "on_front": sum(point.on_front for point in line.points),
        "on_common_front": line.on_common_front,
        "best_samples_per_s": max((point.samples_per_s for point in line.points), default=None),
        # The last trial may end later than the budget.
        "hypervolume_percent": {str(share): share_at(line, share * budget_s if share < 1 else math.inf) for share in SHARES},
        "to_goal_s": next((ended for ended, share in line.reached if share >= 100 * goal), None),
        "reached": line.reached,
    }


def _table(told: list[dict[str, Any]], goal: float) -> Table:
    printed = Table(box=None, pad_edge=False)
    shares = [f"at {share:.0%}" if share < 1 else "at end" for share in SHARES]
    for heading in ("sweep", "trials", "usable", "on front", "samples/s", *shares, f"s to {goal:.0%}"):
        printed.add_column(heading, justify="left" if heading == "sweep" else "right", no_wrap=True)
    for one in told:
        volumes = [f"{share:.1f}" for share in one["hypervolume_percent"].values()]
        counts = [str(one[name]) for name in ("trials", "usable", "on_common_front")]
        printed.add_row(one["name"], *counts, figure(one["best_samples_per_s"]), *volumes, figure(one["to_goal_s"]))
    return printed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
