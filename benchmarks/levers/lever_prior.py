"""Writes the prior that `auto` begins with: what each lever gained in the committed sweeps.

Background: a search of ten minutes cannot try everything, and what won on one model often wins on the next. Each entry of the
file is one lever (a field's value against its baseline) on one workload in one size, from pairs of settings that differ in
nothing else; a sweep of a workload leaves out the entries of its own family of workloads.

Output: orchestrator/search/prior.json, and a table of what the prior expects of each lever on a GPU.

    python -m benchmarks.levers.lever_prior [SWEEP ...]          # by default all under docs/results and benchmarks/tables
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compile_sweep import command_line
from compile_sweep.schema import record as records
from compile_sweep.schema.record import TRIALS_FILE, TrialRecord
from orchestrator.search import lever_prior
from orchestrator.search.lever_prior import LeverGain, Prior, gains_in, prior_text
from orchestrator.search.levers import Lever

PROG = "python -m benchmarks.levers.lever_prior"
ROOT = Path(__file__).parents[2]
TARGET = Path(lever_prior.__file__).with_name(lever_prior.PRIOR_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Learn what levers gain from recorded sweeps."""

    sweeps: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")] = ()
    """Folders of sweeps; by default every one of one worker under docs/results and benchmarks/tables."""


def committed_sweeps() -> list[Path]:
    """Returns the folders of all committed sweeps, except the table that repeats one and those from a machine under load."""
    logs = [*(ROOT / "docs" / "results").rglob(TRIALS_FILE), *(ROOT / "benchmarks" / "tables").rglob(TRIALS_FILE)]
    left_out = ("search", "captioning-base-h200")
    return sorted(log.parent for log in logs if not set(log.relative_to(ROOT).parts) & set(left_out))


def learn(folders: Sequence[Path]) -> list[LeverGain]:
    """Returns what levers gained in these sweeps; of two sweeps of one workload and size, uses the one with more pairs."""
    best: dict[tuple[str, bool, str, str, str], LeverGain] = {}
    for folder in folders:
        for found in _by_origin(list(records.standing(records.read(folder)).values())).values():
            for gain in gains_in(found):
                key = (gain.lever, gain.compiled, gain.workload, gain.size, gain.device)
                if key not in best or best[key].pairs < gain.pairs:
                    best[key] = gain
    return [gain for gain in best.values() if not gain.lever.startswith("workload.")]  # options are specific to a workload


def _by_origin(done: Sequence[TrialRecord]) -> dict[tuple[str, str], list[TrialRecord]]:
    found: dict[tuple[str, str], list[TrialRecord]] = defaultdict(list)
    for record in done:
        if record.num_workers == 1 and record.pipeline == "resident":
            found[record.workload, record.size].append(record)
    return found


def _print(gains: Sequence[LeverGain]) -> None:
    known = Prior(gain for gain in gains if gain.device == "cuda")
    for text, compiled in sorted({(gain.lever, gain.compiled) for gain in gains if gain.device == "cuda"}):
        name, _, value = text.partition("=")
        expected = known.of(Lever(name, value), compiled=compiled)
        where = "compiled" if compiled else "eager"
        print(
            f"{text:50} {where:8} {expected.log_gain:+.3f} ± {expected.spread:.3f}, works {expected.works:.0%}, "
            f"{expected.num_workloads} workloads"
        )


def main() -> int:
    def write(options: Options) -> int:
        gains = learn(options.sweeps or committed_sweeps())
        TARGET.write_text(prior_text(gains), encoding="utf-8")
        _print(gains)
        return 0

    return command_line.run_with(Options, write, PROG, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
