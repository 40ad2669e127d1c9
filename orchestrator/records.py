"""`TrialRecord` and its log: the truth about a sweep. Tune's and any searcher's own state is disposable.

`trials.jsonl` is append-only: one valid JSON object a line, one line a finished attempt. A record is written with a single
`write` under a lock and fsynced before Tune hears of it, so a killed driver leaves whole lines. `docs/records.md` says what
each field means.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from orchestrator.errors import RecordsError
from workloads.settings import CompileSettings

SCHEMA_VERSION = 2
TRIALS_FILE = "trials.jsonl"
SWEEP_FILE = "sweep.json"


class Status(StrEnum):
    """What became of an attempt."""

    OK = "ok"
    """Measured, and nothing speaks against using it."""

    INFEASIBLE = "infeasible"
    """The setting itself cannot or must not be used: out of memory, wrong numerics, a compile beyond its deadline."""

    FAILED = "failed"
    """The attempt broke for a reason that says nothing certain about the setting: an exception, a dead worker."""


class Caches(StrEnum):
    """What compile caches the trial began with."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One finished attempt at one setting. A figure that was not reached is None."""

    trial_id: str
    """Unique in the sweep; also the folder's name under `logs/`."""
    settings: dict[str, Any]
    """`CompileSettings.to_dict()`."""
    settings_key: str
    """`CompileSettings.key`."""
    status: Status
    label: str | None = None
    """Why it is not ok, as one word a program can group by; None if ok."""
    reason: str | None = None
    """Why it is not ok, as a sentence; None if ok."""
    phase: str | None = None
    """The last phase reached: starting, building, warming-up, steady, checking, done."""
    caches: Caches = Caches.COLD
    workload: str = ""
    size: str = ""
    device: str | None = None
    """The GPU's name, or cpu."""
    pipeline: str = "resident"
    """resident: batches prepared on the device; real: the workload's own loader."""
    num_workers: int = 1
    cores: int | None = None
    """Logical CPUs worker 0 was bound to."""
    environment_key: str | None = None
    """Digest of what makes figures comparable; see `environment.py`."""
    started_at: str = ""
    """ISO 8601 with its UTC offset."""
    wall_s: float = 0.0
    """Seconds the whole attempt took, worker start included."""
    compile_s: float | None = None
    """Warm-up seconds less what its steps take once nothing is left to compile."""
    compile_phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of `compile_s` by phase: dynamo, aot_autograd, inductor, …, and other; together they are `compile_s`."""
    cpu_pressure: float | None = None
    """Share of the warm-up that worker 0 and what it started waited for a core; see `pressure.py`."""
    contended: bool = False
    """Whether other trials on the host slowed the warm-up, as far as can be told."""
    first_step_s: float | None = None
    warmup_s: float | None = None
    warmup_steps: int | None = None
    steady_steps: int | None = None
    step_ms_median: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    """95 % interval of the median step, in milliseconds."""
    stable: bool | None = None
    """Whether that interval became narrow enough (1 % on a GPU, 10 % on a CPU) before the limit of passes."""
    outliers: int | None = None
    """Steps over 1.5 times their batch's median; they count in every figure."""
    samples_per_s: float | None = None
    """Over all workers."""
    samples_per_s_ci95: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    """Useful tokens, padding not counted, over all workers."""
    mean_length: float | None = None
    """Mean padded length of the timed batches, in tokens."""
    speedup_eager: float | None = None
    """Eager's time over the compiled one's on the same padded batches, from blocks in turn."""
    speedup_eager_ci95: tuple[float, float] | None = None
    clock_drift: float | None = None
    """Slowest over fastest block of that eager reference, minus 1."""
    data_wait_share: float | None = None
    """Share of a pass that waits for data, with pipeline=real."""
    peak_memory_bytes: int | None = None
    """Most memory allocated on worker 0's device; on CPU the process's largest resident set."""
    peak_reserved_bytes: int | None = None
    """Most memory that torch's allocator held of the device."""
    compile_peak_memory_bytes: int | None = None
    """Most memory allocated during the warm-up."""
    cudagraph_pool_bytes: int | None = None
    """Memory that CUDA graphs hold for themselves."""
    numerics: dict[str, Any] = field(default_factory=dict)
    """`status` (ok, nan, diverges, eager-unstable) and the gaps and tolerances behind it."""
    source: str | None = None
    """The settings as Python, as they were executed."""
    graphs: int | None = None
    graph_breaks: int | None = None
    graph_break_reasons: list[str] = field(default_factory=list)
    recompiles: int | None = None
    recompile_reasons: list[str] = field(default_factory=list)
    recompile_limit_hits: list[str] = field(default_factory=list)
    cudagraph_skips: int | None = None
    cudagraph_skip_reasons: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    """Where torch ran eagerly without being asked to, a sentence each."""
    perf_hints: list[str] = field(default_factory=list)
    """What torch's log says would be faster."""
    step_ms: list[float] = field(default_factory=list)
    """Every timed step of worker 0, in milliseconds, in order."""
    eager_step_ms: list[float] = field(default_factory=list)
    """Every step of the eager reference, likewise."""

    def to_json(self) -> str:
        """One line of strict JSON: no bare NaN or infinity (they become null), no line break."""
        values = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return json.dumps(_writable(values), allow_nan=False, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> TrialRecord:
        """The record a line of `trials.jsonl` holds.

        Raises:
            RecordsError: not JSON, another schema version, or fields missing, unknown or of a wrong kind.
        """
        try:
            values = json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            raise RecordsError(f"not a whole JSON object ({error})") from None
        if not isinstance(values, dict):
            raise RecordsError("not a JSON object")
        version = values.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise RecordsError(f"schema version {version!r}, and this version reads {SCHEMA_VERSION}")
        names = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - names):
            raise RecordsError(f"unknown field {unknown[0]!r}")
        try:
            if not isinstance(values["settings"], dict):
                raise TypeError(f"settings is {values['settings']!r}")
            values["settings"] = CompileSettings.from_dict(values["settings"]).to_dict()
            values["status"] = Status(values["status"])
            values["caches"] = Caches(values.get("caches", Caches.COLD))
            for name, kind in _KINDS.items():
                if kind == _INTERVAL and values.get(name) is not None:
                    low, high = values[name]
                    values[name] = None if None in (low, high) else (float(low), float(high))  # null: it was not finite
            for name, value in values.items():
                if not _is_of(value, _KINDS[name]):
                    raise TypeError(f"{name} is {value!r}")
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordsError(f"not a trial record ({error})") from None


def append(folder: Path, record: TrialRecord) -> None:
    """Adds the record to the folder's log, durable when this returns; safe from several processes of one host."""
    line = record.to_json().encode() + b"\n"
    descriptor = os.open(folder / TRIALS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        written = os.write(descriptor, line)
        if written != len(line):  # a full disk: take the part back, so that the log stays whole lines
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(f"only {written} of {len(line)} bytes of a record fitted on the disk")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> list[TrialRecord]:
    """Every record of the folder's log, in order; none if there is no log yet.

    Raises:
        RecordsError: a line is not a whole record; says which, and that those before it are intact.
    """
    path = folder / TRIALS_FILE
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # a record is seen whole or not at all
        text = log.read()
    return list(_parsed(path, text))


def _parsed(path: Path, text: str) -> Iterator[TrialRecord]:
    *lines, rest = text.split("\n")  # splitlines would also cut at U+2028
    for number, line in enumerate([*lines, rest] if rest else lines, start=1):
        try:
            if number > len(lines):  # the next record would be written behind it, into the same line
                raise RecordsError("it does not end with a line break")
            yield TrialRecord.from_json(line)
        except RecordsError as error:
            raise RecordsError(
                f"{path} line {number} is no trial record: {error}; the {number - 1} before it are intact, "
                "and its trial runs again once the line is removed"
            ) from None


_KINDS = get_type_hints(TrialRecord)
_INTERVAL = tuple[float, float] | None


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of a field's kind; contents of lists and objects are not looked at."""
    if isinstance(kind, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if kind is float:  # null is how a number that is not finite is written
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def _refuse(constant: str) -> None:
    raise ValueError(f"a bare {constant}")


def _writable(value: Any) -> Any:
    if isinstance(value, str):  # what stands for bytes that are no UTF-8 cannot be written
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_writable(key): _writable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(inner) for inner in value]
    return value
