"""What the sweep's command prints before and after its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.config import SweepConfig
from orchestrator.environment import Environment
from orchestrator.estimates import expected_s
from orchestrator.records import Status, TrialRecord
from workloads.vocabulary import Pipeline


def machine(environment: Environment) -> str:
    """The processors of a machine in a few words."""
    if environment.gpu is None:
        return f"{environment.cores} CPU cores"
    return environment.gpu if environment.num_gpus == 1 else f"{environment.num_gpus} × {environment.gpu}"


def show_plan(console: Console, config: SweepConfig, max_length: int, done: Sequence[TrialRecord]) -> None:
    """Prints what would run, what would not and why, and an estimate."""
    recorded = {record.settings_key for record in done}
    left = [setting for setting in config.settings if setting.key not in recorded]
    loader = " with its own loader" if config.pipeline is Pipeline.REAL else ""
    console.print(f"recipe {config.recipe}: {config.workload} ({config.size}){loader}, {len(left)} settings", highlight=False)
    table = Table("setting", "graphs", "expected", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    seconds = 0.0
    for setting in left:
        expected = min(expected_s(setting, max_length, done), config.trial_deadline_s)
        seconds += expected
        table.add_row(escape(setting.label), str(setting.num_graphs(max_length)), f"{expected:.0f} s")
    console.print(table)
    if recorded:
        console.print(f"{len(recorded)} recorded already", highlight=False)
    for reason, count in Counter(excluded.reason for excluded in config.excluded).most_common():
        example = next(excluded.candidate for excluded in config.excluded if excluded.reason == reason)
        console.print(f"excluded {count}, for example {example}: {reason}", markup=False, highlight=False, soft_wrap=True)
    budget = f", within a budget of {config.time_budget_s:g} s" if config.time_budget_s else ""
    confirming = (
        ", then members of the front that met contention again, alone" if config.confirm and config.max_concurrent > 1 else ""
    )
    minutes = seconds / 60 / config.max_concurrent
    console.print(
        f"estimate: {minutes:.1f} min, {config.max_concurrent} at once{confirming}{budget}", highlight=False, soft_wrap=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One setting worth naming at the end."""

    what: str
    setting: str
    samples_per_s: float
    compile_s: float
    speedup: float | None


def show_summary(console: Console, rows: Sequence[SummaryRow], counts: Mapping[Status, int]) -> None:
    """Prints the settings worth naming and how many trials ended how."""
    table = Table("", "setting", "samples/s", "compile s", "over eager", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        speedup = "–" if row.speedup is None else f"{row.speedup:.2f}×"
        table.add_row(row.what, escape(row.setting), f"{row.samples_per_s:,.1f}", f"{row.compile_s:,.1f}", speedup)
    if rows:
        console.print(table)
    else:
        console.print("no trial gave a usable result; the reasons are in the report")
    ended = ", ".join(f"{counts.get(status, 0)} {status}" for status in Status)
    console.print(f"trials: {ended}", highlight=False)
