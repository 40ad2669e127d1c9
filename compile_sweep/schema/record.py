"""`TrialRecord` and `WarmStart` with their logs: the truth about a sweep. Tune's and any searcher's own state is disposable.

`trials.jsonl` is append-only: one valid JSON object a line, one line a finished attempt, durable before Tune hears of it; see
`journal.py`. `warm_starts.jsonl` is the same for restarts from artifacts, which are no measurements of a setting and stand in no
column with them. `docs/records.md` says what each field means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from compile_sweep.schema import journal
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.outcome import LOST_TO_MACHINES, Status
from compile_sweep.schema.setting_text import quote_value
from compile_sweep.schema.settings import CompileSettings

SCHEMA_VERSION = 2
TRIALS_FILE = "trials.jsonl"
WARM_STARTS_FILE = "warm_starts.jsonl"
SWEEP_FILE = "sweep.json"


class Caches(StrEnum):
    """What compile caches the trial began with."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """What the records of a trial and of a warm start have in common. A figure that was not reached is None."""

    what: ClassVar[str]
    """What a line of the log is, for complaints."""

    trial_id: str
    """Unique in the sweep, among trials and warm starts; also the folder's name under `logs/`."""
    settings: dict[str, Any]
    """`CompileSettings.to_dict()`."""
    settings_key: str
    """`CompileSettings.key`."""
    status: Status
    """Of a warm start ok or failed: it says nothing of whether a setting is fit to be used."""
    label: str | None = None
    """Why it is not ok, as one word a program can group by; None if ok."""
    reason: str | None = None
    """Why it is not ok, as a sentence; None if ok."""
    phase: str | None = None
    """The last phase reached: starting, building, warming-up, steady, checking, done."""
    precompile: bool = False
    """Whether what Dynamo traced was kept, or restored, too."""
    workload: str = ""
    size: str = ""
    device: str | None = None
    """The GPU's name, or cpu."""
    num_workers: int = 1
    cores: int | None = None
    """Logical CPUs worker 0 was bound to."""
    gpus: list[str] = field(default_factory=list)
    """GPUs that its workers were on, each as host:index; none on CPUs, and where no worker came up."""
    environment_key: str | None = None
    """Digest of what makes figures comparable."""
    started_at: str = ""
    """ISO 8601 with its UTC offset."""
    wall_s: float = 0.0
    """Seconds the whole attempt took, worker start included."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds of `wall_s` in each phase that it reached, in order; done is publishing and ending. Empty in older records."""
    waited_s: float = 0.0
    """Seconds that its tries waited for hosts of the cluster; in no other figure."""
    tries: int = 1
    """This attempt and those before it that faults of the machines, or `--precompile`, may have ended."""
    retry_reasons: list[str] = field(default_factory=list)
    """Why each of those before ended, as a sentence."""
    retried_s: float = 0.0
    """Seconds that those before took, and the pauses between."""
    compile_phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: dynamo, aot_autograd, inductor, …, and other. Together they are `compile_s`; of a warm start `warmup_s`,
    with the steps in other."""
    cpu_pressure: float | None = None
    """Share of the warm-up that worker 0 and what it started waited for a core."""
    contended: bool = False
    """Whether other trials on the host slowed the warm-up, as far as can be told."""
    gpu_neighbours: list[str] = field(default_factory=list)
    """Processes of others that were on a worker's GPU during the warm-up or the timed steps."""
    first_step_s: float | None = None
    """The first step; a part of `warmup_s`."""
    warmup_s: float | None = None
    """The whole warm-up. A warm start warms up on the same batches as a trial."""
    warmup_steps: int | None = None
    restore_s: float | None = None
    """Seconds it took to fetch artifacts and put them in place, before the model was built; in no other figure but `wall_s`."""
    cache_restored: int | None = None
    """Artifacts put in place; None where none were to be restored."""
    cache_restored_bytes: int | None = None
    cache_refused: int | None = None
    """Artifacts and manifests that were not what their signature or digest says, or not to be had."""
    cache_faults: list[str] = field(default_factory=list)
    """Why nothing could be restored or published, a sentence each; measuring goes on all the same."""
    cache_hits: int | None = None
    """Look-ups of the compiler in its caches that found something."""
    cache_misses: int | None = None
    """Those that did not."""
    cache_saved_s: float | None = None
    """What the artifacts that were hit took to compile when they were made."""

    def to_json(self) -> str:
        """One line of strict JSON: no bare NaN or infinity (they become null), no line break."""
        return journal.written({"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The record that a line of the log holds.

        Raises:
            RecordsError: not JSON, another schema version, or fields missing, unknown, of a wrong kind or impossible.
        """
        kinds = _KINDS[cls]
        values = journal.parsed(line, SCHEMA_VERSION, kinds)
        try:
            values["settings"] = _settings(values["settings"])
            values["status"] = Status(values["status"])
            record = cls(**journal.checked(cls._current(values), kinds))
            if why := why_impossible(record):
                raise ValueError(why)
            return record
        except (KeyError, TypeError, ValueError) as error:
            raise RecordsError(f"not a {cls.what} record ({error})") from None

    @classmethod
    def _current(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values as this version writes them."""
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(AttemptRecord):
    """One finished attempt at one setting."""

    what: ClassVar[str] = "trial"

    caches: Caches = Caches.COLD
    pipeline: str = "resident"
    """resident: batches prepared on the device; real: the workload's own loader."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Of an attempt that was stopped early, the best its figures could have become, by name."""
    compile_s: float | None = None
    """Warm-up seconds less what its steps take once nothing is left to compile."""
    compile_s_by_rank: list[float] = field(default_factory=list)
    """The same of each worker; `compile_s` is the largest."""
    steady_steps: int | None = None
    step_ms_median: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    """95 % interval of the median step, in milliseconds."""
    stable: bool | None = None
    """Whether that interval became narrow enough (1 % on a GPU, 10 % on a CPU) before the limit of passes. If not, fronts go by
    the worse ends of the intervals."""
    outliers: int | None = None
    """Steps over 1.5 times their batch's median; they count in every figure."""
    samples_per_s: float | None = None
    """Over all workers."""
    samples_per_s_ci95: tuple[float, float] | None = None
    samples_per_s_per_worker: float | None = None
    """Mean over the workers, each of which has a GPU of its own where there are GPUs."""
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
    """Most memory allocated on the device of a worker, the worst of them; on CPU a process's largest resident set."""
    peak_memory_bytes_by_rank: list[int] = field(default_factory=list)
    """Of each worker."""
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
    cold_equivalent_s: float | None = None
    """`compile_s` of a warm trial and `cache_saved_s`: an estimate of the cold compile time; None for a cold trial."""
    publish_s: float | None = None
    """Seconds it took to gather and publish what was compiled, after everything was measured."""
    cache_made: int | None = None
    """Artifacts published; None if nothing was."""
    cache_made_bytes: int | None = None
    cache_new_bytes: int | None = None
    """Those bytes of them that the store did not hold already."""
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
    findings: list[str] = field(default_factory=list)
    """What changed while it trained, such as graphs compiled after the warm-up, a sentence each; of a script: what was found in
    it, what limits it first."""
    perf_hints: list[str] = field(default_factory=list)
    """What torch's log says would be faster."""
    step_ms: list[float] = field(default_factory=list)
    """Every timed step of worker 0, in milliseconds, in order."""
    eager_step_ms: list[float] = field(default_factory=list)
    """Every step of the eager reference, likewise."""

    @classmethod
    def _current(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("label") == _NOISY:
            values |= {"status": Status.OK, "label": None, "reason": None}
        return values | {"caches": Caches(values.get("caches", Caches.COLD))}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart(AttemptRecord):
    """One start of a setting from its own artifacts in a fresh process, warmed up and no further."""

    what: ClassVar[str] = "warm-start"

    warm_start_s: float | None = None
    """From a process that has imported torch to one that compiles no more: `restore_s`, `load_s` and `warmup_s` together."""
    load_s: float | None = None
    """Building the model and its optimizer and applying the settings."""


def _kinds(record: type[AttemptRecord]) -> dict[str, Any]:
    hints = get_type_hints(record)
    return {declared.name: hints[declared.name] for declared in fields(record)}


_KINDS: Mapping[type[AttemptRecord], Mapping[str, Any]] = {kind: _kinds(kind) for kind in (TrialRecord, WarmStart)}
"""The type of each field, by the kind of record."""


def append(folder: Path, record: AttemptRecord) -> None:
    """Adds the record to its log in the folder, durable when this returns; safe from several processes of one host.

    Raises:
        RecordsError: a trial with this trial_id is recorded already.
    """
    if isinstance(record, TrialRecord):
        named = json.dumps({"trial_id": record.trial_id}, ensure_ascii=False, separators=(",", ":"))[1:-1]
        journal.append(folder / TRIALS_FILE, record.to_json(), unique=named)
    else:
        journal.append(folder / WARM_STARTS_FILE, record.to_json())


def recover(folder: Path) -> list[str]:
    """Sets aside what a killed writer or a power failure left at the end of the folder's logs; returns a sentence for each.

    Raises:
        RecordsError: a log is no regular file.
        OSError: one cannot be written.
    """
    said = (journal.recover(folder / name) for name in (TRIALS_FILE, WARM_STARTS_FILE))
    return [sentence for sentence in said if sentence is not None]


def read(folder: Path) -> list[TrialRecord]:
    """Every trial's record of the folder, in order; none if there is no log yet.

    Raises:
        RecordsError: a line is not a whole record, cannot be true, repeats the trial_id of an earlier line, or is of another
            workload than the sweep; says which.
    """
    path = folder / TRIALS_FILE
    found = journal.read(path, TrialRecord.from_json, TrialRecord.what)
    config = _sweep_config(folder)
    line_of: dict[str, int] = {}
    for number, record in enumerate(found, start=1):
        if (first := line_of.setdefault(record.trial_id, number)) != number:
            raise RecordsError(
                f"{path} line {number} repeats the trial_id {quote_value(record.trial_id)} of line {first}; remove one of the two"
            )
        for name in ("workload", "size"):
            ours, theirs = config.get(name), getattr(record, name)
            if ours is not None and theirs and ours != theirs:
                raise RecordsError(
                    f"{path} line {number} is not a record of this sweep: its {name} is {quote_value(theirs)}, and the sweep's "
                    f"is {quote_value(ours)}; remove the line"
                )
    return found


def follow(folder: Path) -> journal.Tail[TrialRecord]:
    """What reads the folder's trials as they are recorded, each once."""
    return journal.Tail(folder / TRIALS_FILE, TrialRecord.from_json, TrialRecord.what)


def read_warm_starts(folder: Path) -> list[WarmStart]:
    """Every warm start of the folder, likewise."""
    return journal.read(folder / WARM_STARTS_FILE, WarmStart.from_json, WarmStart.what)


def follow_warm_starts(folder: Path) -> journal.Tail[WarmStart]:
    """What reads the folder's warm starts as they are recorded, each once."""
    return journal.Tail(folder / WARM_STARTS_FILE, WarmStart.from_json, WarmStart.what)


def standing(done: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    """The record of each setting that counts: the latest cold one, or, where there is none, the latest warm one.

    One that the machines ended counts only where there is no other.
    """
    found: dict[str, TrialRecord] = {}
    for record in done:
        before = found.get(record.settings_key)
        if before is None or _standing_rank(record) <= _standing_rank(before):
            found[record.settings_key] = record
    return found


def _standing_rank(record: TrialRecord) -> tuple[bool, bool]:
    return record.label in LOST_TO_MACHINES, record.caches is not Caches.COLD


def _settings(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError(f"settings is {values!r}")
    return CompileSettings.from_dict(values).to_dict()


def _sweep_config(folder: Path) -> Mapping[str, Any]:
    """The configuration in `sweep.json`; empty if there is none that can be read, which its own readers complain of."""
    try:
        path = folder / SWEEP_FILE
        config = json.loads(path.read_bytes())["config"] if path.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


_LARGEST = 1e15
"""No figure is above this, in any unit."""
_SMALLEST = 1e-12
"""No rate, ratio or step that was measured is below this, in any unit."""
_SHARES = ("cpu_pressure", "data_wait_share")
"""Figures that are at most 1."""
_POSITIVE = ("samples_per_s", "samples_per_s_per_worker", "step_ms_median", "speedup_eager", "num_workers", "tries")
"""Figures that are above 0."""
_DIFFERENCES = (
    "compile_s",
    "compile_s_by_rank",
    "compile_phases_s",
    "cache_saved_s",
    "cold_equivalent_s",
    "waited_s",
    "retried_s",
)
"""Figures that come of a subtraction and may be below 0."""
_ESTIMATES = ("bounds", "numerics")
"""Objects that hold other numbers than measured ones."""


def why_impossible(record: AttemptRecord) -> str | None:
    """Says why a record cannot be true: a figure outside of its range, or two that contradict each other; None if it can."""
    for declared in fields(record):
        name = declared.name
        least, most = _range_of(name)
        for value in _numbers(getattr(record, name)) if name != "settings" else ():
            if not least <= value <= most:
                return f"{name} is {value:.6g}, and it must be from {least:.6g} to {most:.6g}"
            if value < _SMALLEST and name in _POSITIVE:
                return f"{name} is {value:.6g}, and it must be above 0"
    if record.settings_key != (key := CompileSettings.from_dict(record.settings).key):
        return f"settings_key is {quote_value(record.settings_key)}, and the key of its settings is {key!r}"
    if record.status is Status.OK and record.label is not None:
        return f"status is ok, and yet its label is {quote_value(record.label)}"
    for interval, inside in _INTERVALS.items():
        ends = getattr(record, interval, None)
        if ends is None or not math.isfinite(ends[0]) or not ends[1] > -math.inf:
            continue
        if ends[0] > ends[1]:
            return f"{interval} is {ends[0]:.6g} to {ends[1]:.6g}, and its lower end must come first"
        center = getattr(record, inside) if inside else None
        if center is not None and math.isfinite(center) and not ends[0] * (1 - 1e-9) <= center <= ends[1] * (1 + 1e-9):
            return f"{inside} is {center:.6g}, outside of its interval from {ends[0]:.6g} to {ends[1]:.6g}"
    return None


def _range_of(name: str) -> tuple[float, float]:
    """The range of a field's numbers."""
    if name in _ESTIMATES:
        return -1e100, 1e100
    if name in _SHARES:
        return 0.0, 1.0 + 1e-6
    most = 2.0**60 if name.endswith(_OF_BYTES) else _LARGEST
    return (-most if name in _DIFFERENCES else 0.0), most


_INTERVALS = {"step_ms_ci95": None, "samples_per_s_ci95": "samples_per_s", "speedup_eager_ci95": None}
"""Intervals, each with the figure that must lie in it, if one must."""
_OF_BYTES = ("_bytes", "_bytes_by_rank")


def _numbers(value: Any) -> Iterator[float]:
    """Every finite number in a field; one that is not finite is written as null."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield value


_NOISY = "unstable"
"""What earlier versions labelled a trial that was only noisy, and called failed; `stable` says it."""
