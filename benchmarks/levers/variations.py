"""Prints the effect of each variation on eager and compiled steps: `python -m benchmarks.levers.variations FOLDER [FOLDER …]`.

Background: the recipes inference and vision vary one thing at a time, so that a finding of their sources ("compiling made
inference slower"; "no EMA, no SyncBN, a smaller batch, AMP") is a row beside the same row without it. Output: Markdown, one table
of times and one of memory for each workload, and for a workload of images the source's four pitfalls with what the records say.
Folders are those of sweeps of one workload and machine, with one worker or several.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from compile_sweep import command_line
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, read
from compile_sweep.schema.setting_text import format_value
from compile_sweep.schema.settings import CompileSettings, Dynamic, Mode, Scope

PROG = "python -m benchmarks.levers.variations"
_GIB = 2**30
USUAL = "nothing"  # name of the row without variation

_FURTHER = ("optimizer", "padding", "pad_multiple", "bucket_size", "buckets", "group_window", "shape_padding", "backend")
"""Fields that the recipes leave at their defaults."""

Table = Mapping[tuple[str, str], TrialRecord]
"""Records by variation and by how they are compiled: the last good one of each, or else one that is not good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Print how each variation affects eager and compiled steps, as Markdown."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER [FOLDER …]")] = ()
    """Folders of sweeps of one workload on one machine."""


def table_of(records: Sequence[TrialRecord], *, num_workers: int | None = None) -> Table:
    """Groups the records by row and column.

    Args:
        records: Records of one workload.
        num_workers: Leaves out records with another number of workers; None includes all, with the number as part of the
            variation.
    """
    found: dict[tuple[str, str], TrialRecord] = {}
    for record in records:
        if num_workers not in (None, record.num_workers):
            continue
        place = _place(record, with_workers=num_workers is None)
        if record.status is Status.OK or place not in found or found[place].status is not Status.OK:
            found[place] = record
    return found


def _place(record: TrialRecord, *, with_workers: bool) -> tuple[str, str]:
    settings = CompileSettings.from_dict(record.settings)
    varied = [f"{name}={format_value(value)}" for name, value in settings.workload or ()]
    varied += [f"{name}={value}" for name in ("autocast", "attention", "matmul_precision") if (value := getattr(settings, name))]
    usual = CompileSettings(scope=settings.scope, dynamic=settings.dynamic)
    varied += [
        f"{name}={format_value(value)}"
        for name in _FURTHER
        if (value := getattr(settings, name)) not in (None, getattr(usual, name))
    ]
    if settings.dynamic not in (None, Dynamic.STATIC):
        varied.append(f"dynamic={settings.dynamic}")
    if with_workers and record.num_workers > 1:
        varied.append(f"{record.num_workers} workers")
    mode = "" if settings.mode in (None, Mode.DEFAULT) else f" {settings.mode}"
    reduced = f", {settings.ddp.label}" if settings.ddp else ""
    return ", ".join(varied) or USUAL, f"{settings.scope}{mode}{reduced}"


def times(table: Table) -> Iterator[str]:
    """Yields milliseconds per step and, for compiled ones, the speedup over eager ones of the same row."""
    yield from _tabulated(table, "varied, ms/step", _time)


def memory(table: Table) -> Iterator[str]:
    """Yields peak memory in GiB."""
    yield from _tabulated(table, "varied, peak GiB", lambda record: _gib(record.peak_memory_bytes))


def _tabulated(table: Table, corner: str, cell: Callable[[TrialRecord], str]) -> Iterator[str]:
    rows = list(dict.fromkeys([*([USUAL] if any(row == USUAL for row, _ in table) else []), *(row for row, _ in table)]))
    columns = sorted({column for _, column in table}, key=lambda name: (not name.startswith(Scope.EAGER), name))
    yield f"| {' | '.join([corner, *columns])} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for row in rows:
        cells = [_cell(table.get((row, column)), cell) for column in columns]
        yield f"| {' | '.join([row, *cells])} |"


def _cell(record: TrialRecord | None, cell: Callable[[TrialRecord], str]) -> str:
    if record is None:
        return "–"
    if record.status is Status.OK:
        return cell(record)
    return ", ".join(said for said in (cell(record), str(record.label or record.status)) if said != "–")


def _time(record: TrialRecord) -> str:
    if record.step_ms_median is None:
        return "–"
    breaks = f", {record.graph_breaks} breaks" if record.graph_breaks else ""
    ratio = f" ({record.speedup_eager:.2f}×{breaks})" if record.speedup_eager and record.settings["scope"] != "eager" else ""
    return f"{record.step_ms_median:.4g}{ratio}"


def _gib(count: int | None) -> str:
    return "–" if count is None else f"{count / _GIB:.2f}"


def pitfalls(records: Sequence[TrialRecord]) -> Iterator[str]:
    """Yields the four pitfalls of "PyTorch 2.0: how to speed up model training", with whether each holds here and the figures.

    SyncBN's figures are those with the most workers, the others' those with the fewest.
    """
    counts = sorted({record.num_workers for record in records})
    table = table_of(records, num_workers=counts[0])
    yield f"- “No EMA with torch.compile”: {_average(table)}"
    yield f"- “No SyncBN with torch.compile”: {_synchronized(table_of(records, num_workers=counts[-1]))}"
    yield f"- “A smaller batch, because compiling takes more memory”: {_memory(table)}"
    yield f"- “AMP gives the largest gain”: {_precision(table)}"


def _average(table: Table) -> str:
    plain, averaged = table.get((USUAL, "full")), table.get(("ema=on", "full"))
    if averaged is None:
        return "not measured."
    if averaged.status is not Status.OK:
        return f"holds: compiled with EMA it is {averaged.label}, {averaged.reason}."
    return f"no longer holds: with EMA compiled is {_ratio(averaged)}, without {_ratio(plain)}."


def _synchronized(table: Table) -> str:
    synced = table.get(("norm=sync", "full"))
    if synced is None:
        return "not measured."
    if synced.num_workers < 2:
        return f"cannot be told from one worker, which has nothing to synchronise: {_ratio(synced)}."
    if synced.status is not Status.OK:
        return f"holds: it is {synced.label}, {synced.reason}."
    usual = table.get((USUAL, "full"))
    figures = f"{synced.graph_breaks or 0} graph breaks, with SyncBN compiled is {_ratio(synced)}, with BN {_ratio(usual)}"
    gains = synced.speedup_eager_ci95 is not None and synced.speedup_eager_ci95[0] > 1
    return f"{'no longer holds' if gains else 'holds'}: {figures}."


def _memory(table: Table) -> str:
    eager = table.get((USUAL, "eager"))
    modes = {
        column.removeprefix("full "): record
        for (row, column), record in table.items()
        if row == USUAL and f"{column} ".startswith("full ") and record.status is Status.OK and record.peak_memory_bytes
    }
    if eager is None or not eager.peak_memory_bytes or not modes:
        return "not measured."
    ratios = {name: (record.peak_memory_bytes or 0) / eager.peak_memory_bytes for name, record in modes.items()}
    told = ", ".join(f"{'default' if name == 'full' else name} {ratio:.2f}" for name, ratio in ratios.items())
    above = [ratio for ratio in ratios.values() if ratio > 1]
    verdict = "holds" if len(above) == len(ratios) else "holds for some modes" if above else "no longer holds"
    return f"{verdict}: peak memory in units of eager's, {told}."


def _precision(table: Table) -> str:
    amp, without = table.get((USUAL, "full")), table.get(("autocast=off", "full"))
    if amp is None or without is None or not amp.speedup_eager or not without.speedup_eager:
        return "not measured."
    holds = "holds" if amp.speedup_eager > without.speedup_eager else "no longer holds"
    return f"{holds}: with AMP compiled is {_ratio(amp)}, in float32 {_ratio(without)}."


def _ratio(record: TrialRecord | None) -> str:
    if record is None or record.speedup_eager is None:
        return "not measured against eager"
    low, high = record.speedup_eager_ci95 or (record.speedup_eager, record.speedup_eager)
    return f"{record.speedup_eager:.2f} ({low:.2f} to {high:.2f}) times as fast as eager"


def main(words: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return command_line.run(lambda: _print(command_line.parse(Options, PROG, words).folders))


def _print(folders: Sequence[Path]) -> int:
    if not folders:
        raise ConfigError("give the folder of a sweep, or several of one workload")
    records = [record for folder in folders for record in read(folder)]
    kinds = sorted({(record.workload, record.size) for record in records if record.status is Status.OK})
    if not kinds:
        raise ConfigError(f"{', '.join(map(str, folders))} holds no good trial; name the folder of a sweep")
    for workload, size in kinds:
        of_kind = [record for record in records if (record.workload, record.size) == (workload, size)]
        table = table_of(of_kind)
        devices = ", ".join(sorted({record.device for record in of_kind if record.device}))
        print(f"{workload} ({size}) on {devices or 'an unknown device'}\n")
        print("\n".join([*times(table), "", *memory(table), ""]))
        if any("norm" in row or "ema" in row for row, _ in table):
            print("\n".join([*pitfalls(of_kind), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
