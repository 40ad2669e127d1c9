"""Writes the prior that `auto` begins with: what each lever gained in the committed sweeps.

Background: a search of ten minutes cannot try everything, and what won on one model often wins on the next. Each entry of the
file is one lever (a field's value against its baseline) on one workload in one size, from pairs of settings that differ in
nothing else; a sweep of a workload leaves out the entries of its own family of workloads.

Output: orchestrator/search/prior.json, and a table of what the prior expects of each lever on a GPU.

    python -m benchmarks.levers.lever_prior [SWEEP ...]          # by default all under docs/results and benchmarks/tables
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from compile_sweep import command_line
from compile_sweep.schema import record as records
from compile_sweep.schema.outcome import LOST_TO_MACHINES, Status
from compile_sweep.schema.record import TRIALS_FILE, Caches, TrialRecord
from compile_sweep.schema.settings import CompileSettings, Padding
from orchestrator.search import lever_prior
from orchestrator.search.lever_prior import SCHEMA_VERSION, LeverGain, Prior
from orchestrator.search.levers import TOGETHER, Lever, changed, kind_of, levers_of

PROG = "python -m benchmarks.levers.lever_prior"
ROOT = Path(__file__).parents[2]
TARGET = Path(lever_prior.__file__).with_name(lever_prior.PRIOR_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Learn what levers gain from recorded sweeps."""

    sweeps: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SWEEP")] = ()
    """Folders of sweeps; by default every one of one worker under docs/results and benchmarks/tables."""


def committed_sweeps() -> list[Path]:
    """Returns the folders of all committed sweeps, except the table that repeats one and those of a busy machine."""
    logs = [*(ROOT / "docs" / "results").rglob(TRIALS_FILE), *(ROOT / "benchmarks" / "tables").rglob(TRIALS_FILE)]
    left_out = ("search", "captioning-base-h200", "cpu-two-torches")
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


def prior_text(gains: Iterable[LeverGain]) -> str:
    """Returns the JSON text of a prior, one entry per line, in an order that does not depend on where the entries came from."""
    lines = sorted(json.dumps(asdict(gain)) for gain in gains)
    return f'{{"schema_version": {SCHEMA_VERSION}, "gains": [\n' + ",\n".join(lines) + "\n]}\n"


class _Trial(NamedTuple):
    """A recorded setting."""

    levers: Mapping[str, str]
    padding: str | None
    speed: float | None  # samples per second; None if the setting failed


def gains_in(records: Sequence[TrialRecord]) -> list[LeverGain]:
    """Returns what each lever gained in one sweep, from all pairs of its settings that differ in nothing else.

    Args:
        records: Records of one workload and size, the one that counts for each setting.
    """
    trials = [trial for record in records if (trial := _trial(record)) is not None]
    has_lengths = any(trial.padding != Padding.MAX for trial in trials if "scope" not in trial.levers)
    ratios: dict[tuple[str, bool], list[float | None]] = defaultdict(list)
    for before in trials:
        if before.speed is None:
            continue
        for after in trials:
            lever = _pulled(before, after, has_lengths=has_lengths)
            if lever is not None:
                ratio = None if after.speed is None else math.log(after.speed / before.speed)
                ratios[str(kind_of(lever)), "scope" in before.levers].append(ratio)
    origin: dict[str, Any] = {
        "workload": records[0].workload,
        "size": records[0].size,
        "device": "cpu" if records[0].device in (None, "cpu") else "cuda",
    }
    return [_gain(lever, compiled, found, origin) for (lever, compiled), found in sorted(ratios.items())] if trials else []


def _gain(lever: str, compiled: bool, ratios: Sequence[float | None], origin: Mapping[str, Any]) -> LeverGain:
    measured = [ratio for ratio in ratios if ratio is not None]
    middle = round(statistics.median(measured), 4) if measured else 0.0
    failed = len(ratios) - len(measured)
    return LeverGain(lever=lever, compiled=compiled, log_gain=middle, pairs=len(measured), failed=failed, **origin)


def _trial(record: TrialRecord) -> _Trial | None:
    """Returns what a record says about levers; None if the machines ended the trial, it was stopped early, or it started warm."""
    if record.label in LOST_TO_MACHINES or record.status is Status.STOPPED or record.caches is not Caches.COLD:
        return None
    setting = CompileSettings.from_dict(record.settings)
    speed = record.samples_per_s if record.status is Status.OK else None
    return _Trial(levers_of(setting), setting.padding, speed or None)


def _pulled(before: _Trial, after: _Trial, *, has_lengths: bool) -> Lever | None:
    """Returns the one lever that `after` pulls and `before` does not; None if they differ in more or less."""
    names = changed(before.levers, after.levers)
    if len(names) != 1 or names[0] in before.levers or names[0] == "workload":
        return None
    (name,) = names
    if (along := TOGETHER.get(name)) and before.levers.get(along) != after.levers.get(along):
        return None  # gains what the other does, too
    if name == "scope" and has_lengths and before.padding != after.padding:
        return None  # pads to another number of tokens per batch
    return Lever(name, after.levers[name])


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

    return command_line.main_of(Options, write, PROG)()


if __name__ == "__main__":
    sys.exit(main())
