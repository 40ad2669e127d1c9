"""Prints the tables of two sources from recorded sweeps: `python -m benchmarks.recipes.source_tables TRAIN [INFERENCE]`.

Background: "torch.compile Benchmarked" gives, for each mode, the first training step's seconds and memory, and milliseconds an
iteration of training and of inference; the regional recipe gives compile seconds, full against regional. Output: Markdown, with
half the 95 % interval beside what noisy trials took.
Folders are those of sweeps of `gpt2` and `gpt2-inference` (recipe modes), or of `layers` (recipe regional).
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compile_sweep import command_line
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, read

PROG = "python -m benchmarks.recipes.source_tables"
_MIB = 2**20
_NOT_OPTIONS = ("scope=", "mode=", "cudagraphs=", "dynamic=static", "padding=", "pad_multiple=", "optimizer=", "inductor.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Print sweeps in the form of two sources' tables, as Markdown."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRAIN [INFERENCE]")] = ()
    """A sweep's folder, or one folder for training and one for inference."""


def good(folder: Path) -> dict[str, TrialRecord]:
    """Returns the last good record of each setting, by the setting's key."""
    return {record.settings_key: record for record in read(folder) if record.status is Status.OK}


def by_mode(training: dict[str, TrialRecord], inference: dict[str, TrialRecord]) -> Iterator[str]:
    """Yields the table of modes, with inference under the same setting."""
    yield "| setting | first training step s | MiB | training ms/iter | inference ms/iter |"
    yield "|---|---|---|---|---|"
    for record in training.values():
        figures = [
            _figure(record.first_step_s, 1),
            _mib(record),
            _step(record),
            _step(inference.get(record.settings_key)),
        ]
        yield f"| {_name(record)} | {' | '.join(figures)} |"


def by_scope(records: dict[str, TrialRecord]) -> Iterator[str]:
    """Yields the table of scopes, with compile seconds relative to the least."""
    compiled = [record for record in records.values() if record.compile_s and record.settings["scope"] != "eager"]
    least = min((record.compile_s or 0.0 for record in compiled), default=1.0)
    yield "| setting | compile s | times the least | first step s |"
    yield "|---|---|---|---|"
    for record in compiled:
        ratio = _figure((record.compile_s or 0.0) / least, 1)
        yield f"| {_name(record)} | {_figure(record.compile_s, 2)} | {ratio} | {_figure(record.first_step_s, 2)} |"


def by_option(records: dict[str, TrialRecord]) -> Iterator[str]:
    """Yields milliseconds per iteration, then MiB: a row per choice of options, a column per scope and mode."""
    names = list(dict.fromkeys(_name(record) for record in records.values()))
    options = list(dict.fromkeys(_options(record) for record in records.values()))
    found = {(_options(record), _name(record)): record for record in records.values()}

    def table(unit: str, figure: Callable[[TrialRecord | None], str]) -> Iterator[str]:
        yield f"| {unit} | {' | '.join(names)} |"
        yield f"|---|{'--:|' * len(names)}"
        for chosen in options:
            yield f"| {chosen} | {' | '.join(figure(found.get((chosen, name))) for name in names)} |"

    yield from table("ms/iter", _step)
    yield ""
    yield from table("MiB", _mib)


def _options(record: TrialRecord) -> str:
    """Returns a record's settings except scope, mode and what follows from them."""
    chosen = [part for part in record.settings_key.split(",") if not part.startswith(_NOT_OPTIONS)]
    return ", ".join(part.removeprefix("workload.") for part in chosen) or "–"


def _name(record: TrialRecord) -> str:
    return " ".join(str(record.settings[field]) for field in ("scope", "mode") if record.settings.get(field))


def _step(record: TrialRecord | None) -> str:
    """Formats milliseconds per step; for a noisy trial with half its 95 % interval."""
    if record is None or record.step_ms_median is None:
        return _figure(None, 1)
    digits = 2 if record.step_ms_median < 10 else 1
    took = _figure(record.step_ms_median, digits)
    if record.stable is not False or record.step_ms_ci95 is None:
        return took
    low, high = record.step_ms_ci95
    return f"{took} ± {_figure((high - low) / 2, digits) if math.isfinite(high) else '∞'}"


def _mib(record: TrialRecord | None) -> str:
    return _figure(None if record is None or record.peak_memory_bytes is None else record.peak_memory_bytes / _MIB, 0)


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _print(command_line.parse(Options, PROG, words).folders))


def _print(folders: Sequence[Path]) -> int:
    if len(folders) not in (1, 2):
        raise ConfigError("give a sweep's folder, or one folder for training and one for inference")
    found = [good(folder) for folder in folders]
    for folder, records in zip(folders, found, strict=True):
        if not records:
            raise ConfigError(f"{folder} holds no good trial; name the folder of a sweep")
    names = {record.workload.partition("-")[0] for records in found for record in records.values()}
    if names == {"layers"}:
        lines = by_scope(found[0])
    elif len(found) == 1 and len({_name(record) for record in found[0].values()}) < len(found[0]):
        lines = by_option(found[0])
    else:
        lines = by_mode(found[0], found[1] if len(found) > 1 else {})
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
