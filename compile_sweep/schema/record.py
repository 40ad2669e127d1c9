"""`TrialRecord`, `WarmStart` and their logs: the truth about a sweep. Tune's and any searcher's own state is disposable.

`trials.jsonl` is append-only: one valid JSON object per line, one line per finished attempt, durable before Tune learns of it;
see `journal.py`. `warm_starts.jsonl` has the same format for restarts from artifacts, which are not measurements of a setting and
share no column with them. `docs/records.md` says what each field means.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from compile_sweep.schema import journal
from compile_sweep.schema.attempt_record import AttemptRecord
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.figure import (
    ANY_NUMBER,
    DIFFERENCE,
    NOT_MEASURED,
    SHARE,
    each,
    figure,
    gravest,
    mean,
    mean_of,
    merged,
    most,
    of_slowest,
    scaled,
    total,
)
from compile_sweep.schema.outcome import Status, says_nothing
from compile_sweep.schema.setting_text import quote_value

TRIALS_FILE = "trials.jsonl"
WARM_STARTS_FILE = "warm_starts.jsonl"
SWEEP_FILE = "sweep.json"


class Caches(StrEnum):
    """The state of the compile caches when the trial started."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord(AttemptRecord):
    """One finished attempt at one setting."""

    what: ClassVar[str] = "trial"
    measures: ClassVar[str] = "samples_per_s"

    caches: Caches = figure(
        "`cold`: fresh process, empty compile caches, nothing restored. `warm`: fresh process, artifacts of earlier trials "
        "restored, or a remote cache in reach; also an attempt that was to restore some and died. A trial that was to restore "
        "and found nothing for it is `cold`; so is one that could not, unless it has several workers, of which another may "
        "have restored on the same host",
        default=Caches.COLD,
    )
    pipeline: str = figure("`resident`: batches prepared on the device; `real`: the workload's own loader", default="resident")
    bounds: dict[str, float] = figure(
        "object: of an attempt that was stopped early (`dominated`, and `compile-deadline` by its family), the best its "
        "figures could have become, by name: times and memory at least, speeds at most",
        unit="as the figure",
        default=dict,
        limits=ANY_NUMBER,
        missing="it was not stopped",
    )
    compile_s: float | None = figure(
        "`warmup_s` less, for each step of the warm-up, the median steady step of its padded length, on a line between the "
        "nearest lengths where the pool has none of it; not below 0",
        unit="s",
        over_ranks=of_slowest,
        limits=DIFFERENCE,
    )
    compile_s_by_rank: list[float] = figure(
        "list: the same of each worker; `compile_s`, and its phases, are those of the slowest",
        unit="s",
        default=list,
        over_ranks=each("compile_s"),
        limits=DIFFERENCE,
        missing=NOT_MEASURED,
    )
    steady_steps: int | None = figure("timed steps: whole passes over the pool", unit="steps")
    step_ms_median: float | None = figure(
        "mean over the pool's batches of the median time of their padded length, on worker 0: batches of different length take"
        " different times",
        unit="ms",
        is_positive=True,
    )
    step_ms_ci95: tuple[float, float] | None = figure(
        "[low, high]: 95% interval of that figure, by a bootstrap over passes", unit="ms"
    )
    stable: bool | None = figure(
        "whether that interval became narrow before the limit of passes: its width at most 1% of `step_ms_median`, on a CPU "
        "10%. If not, the trial is noisy: fronts, searches and constraints take the worse end of `samples_per_s_ci95`, "
        "`step_ms_ci95` and `speedup_eager_ci95` instead of the figure. Records from before 2026-11-23 say `failed` and "
        "`unstable` of such a trial, and are read as `ok`"
    )
    outliers: int | None = figure("timed steps over 1.5 times their batch's median; they count in every figure", unit="steps")
    samples_per_s: float | None = figure(
        "samples of a pass over the mean time of a pass, added up over the workers: passes over the prepared pool, or with "
        "`pipeline` real over what the loader gives",
        unit="samples/s",
        over_ranks=total,
        is_positive=True,
    )
    samples_per_s_ci95: tuple[float, float] | None = figure(
        "[low, high]: 95% interval within this run, from the spread of the passes' total times; high is null where they bound"
        " it nowhere, and is read as infinite",
        unit="samples/s",
        over_ranks=scaled("samples_per_s"),
    )
    samples_per_s_per_worker: float | None = figure(
        "`samples_per_s` over the number of workers, each of which has a GPU of its own where there are GPUs",
        unit="samples/s",
        over_ranks=mean_of("samples_per_s"),
        is_positive=True,
        missing="not measured; records from before there was the field",
    )
    tokens_per_s: float | None = figure("the same in useful tokens: padding is not counted", unit="tokens/s", over_ranks=total)
    mean_length: float | None = figure("mean padded length of the pool's batches", unit="tokens", over_ranks=mean)
    speedup_eager: float | None = figure(
        "time of eager steps over that of compiled steps on the same padded batches, from blocks in turn, so that a drift of "
        "the clocks cancels, and any padding, explicit buckets included, has an eager peer",
        is_positive=True,
        missing="not measured; no reference",
    )
    speedup_eager_ci95: tuple[float, float] | None = figure(
        "[low, high]: its 95% interval, from the scatter of whole passes; until 2026-11-23 of single steps, and so too narrow"
        " ([decisions.md](decisions.md#measuring))",
        missing="not measured; no reference",
    )
    clock_drift: float | None = figure(
        "time of the slowest block of that eager reference over the fastest one's, minus 1",
        missing="not measured; no reference",
    )
    data_wait_share: float | None = figure(
        "share of a step that waits for its data: 1 − time of a prepared pass / time of a real one, not below 0",
        over_ranks=most,
        limits=SHARE,
        missing="not measured; `pipeline` is resident",
    )
    device_use: dict[str, float] = figure(
        "object: what a step of training makes of its GPU, on one batch, see below",
        default=dict,
        limits=ANY_NUMBER,
        missing="on a CPU; of inference; of several workers; not measured",
    )
    peak_memory_bytes: int | None = figure(
        "most memory that torch's allocator gave out on a worker's device, the worst of them, from building to the end of the "
        "timed steps; on a CPU the largest resident set of a worker's process",
        unit="bytes",
        over_ranks=most,
    )
    peak_memory_bytes_by_rank: list[int] = figure(
        "list: the same of each worker", unit="bytes", default=list, over_ranks=each("peak_memory_bytes"), missing=NOT_MEASURED
    )
    peak_reserved_bytes: int | None = figure(
        "most memory that the allocator held of the device, given out or not, in the same time",
        unit="bytes",
        over_ranks=most,
        missing="not measured; on a CPU",
    )
    compile_peak_memory_bytes: int | None = figure(
        "most memory given out during the warm-up", unit="bytes", over_ranks=most, missing="not measured; on a CPU"
    )
    cudagraph_pool_bytes: int | None = figure(
        "memory that CUDA graphs keep for themselves", unit="bytes", over_ranks=most, missing="not measured; on a CPU"
    )
    batch_peak_bytes: dict[str, float] = figure(
        "object: of each batch size that `--largest-batch` tried, the most memory that torch's allocator gave out in two steps "
        "on the longest length; null where they did not fit. The worker makes these steps after all else is measured",
        unit="bytes",
        default=dict,
        missing="`--largest-batch` was not given; the search failed, which `findings` says",
    )
    numerics: dict[str, Any] = figure(
        "object, see below",
        default=dict,
        over_ranks=gravest,
        limits=ANY_NUMBER,
        missing=NOT_MEASURED,
    )
    source: str | None = figure("the settings as Python to paste, as they were executed")
    cold_equivalent_s: float | None = figure(
        "`compile_s` + `cache_saved_s`: an estimate of the cold compile time, low where a graph that missed found C++ "
        "libraries of others ready",
        unit="s",
        limits=DIFFERENCE,
        missing="cold; not measured",
    )
    publish_s: float | None = figure(
        "gathering and publishing artifacts, after all else is measured; in no other figure but `wall_s`",
        unit="s",
        missing="nothing was published",
    )
    cache_made: int | None = figure(
        "what worker 0 published: what it made or hit, and what came with that",
        unit="artifacts",
        missing="nothing was published",
    )
    cache_made_bytes: int | None = figure("the size of what it published", unit="bytes", missing="nothing was published")
    cache_new_bytes: int | None = figure(
        "of these, what the store did not hold already", unit="bytes", missing="nothing was published"
    )
    graphs: int | None = figure(
        "graphs that Dynamo compiled for the step, over warm-up and timed steps; the check against eager is not counted"
    )
    graph_breaks: int | None = figure("distinct places in the code at which the graph broke")
    graph_break_reasons: list[str] = figure(
        "list of text, one for each such place",
        default=list,
        over_ranks=merged,
        missing="there was none",
    )
    recompiles: int | None = figure("recompiles that torch reported")
    recompile_reasons: list[str] = figure(
        "list of text with the guards that failed; each cut at 500 characters",
        default=list,
        missing="there was none",
    )
    recompile_limit_hits: list[str] = figure(
        "list of text: what torch says where it reached its recompile limit; such functions run eagerly from then on",
        default=list,
        over_ranks=merged,
        missing="it was not reached",
    )
    cudagraph_skips: int | None = figure(
        "graphs that torch did not replay as CUDA graphs though it was asked to", over_ranks=most
    )
    cudagraph_skip_reasons: list[str] = figure("list of text: why", default=list, over_ranks=merged, missing="there was none")
    fallbacks: list[str] = figure(
        "list of text: where torch ran eagerly without being asked to, a sentence each",
        default=list,
        over_ranks=merged,
        missing="it did not",
    )
    findings: list[str] = figure(
        "list of text: what changed while it trained, such as graphs compiled after the warm-up; of a script, what was found "
        "in it, what limits it first",
        default=list,
        over_ranks=merged,
        missing="nothing was found",
    )
    model_facts: dict[str, Any] = figure(
        "object: what a script's modules are, by fields of `WorkloadFacts`, and `classes`, their names; the searcher `levers` no "
        "longer proposes what they have no use for",
        default=dict,
        missing="of a workload, whose plan knows them; only the unchanged script's trial has them",
    )
    perf_hints: list[str] = figure(
        "list of text: what torch's own log says would be faster",
        default=list,
        missing="it says nothing",
    )
    step_ms: list[float] = figure(
        "every timed step of worker 0, in order, to 0.1 µs",
        unit="ms",
        default=list,
        missing=NOT_MEASURED,
    )
    eager_step_ms: list[float] = figure(
        "every step of the eager reference, likewise",
        unit="ms",
        default=list,
        missing="not measured; no reference",
    )

    @classmethod
    def _current(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("label") == _NOISY:
            values |= {"status": Status.OK, "label": None, "reason": None}
        return values | {"caches": Caches(values.get("caches", Caches.COLD))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures measured by one worker, or combined over several; `TrialRecord` says what each one means."""

    device: str
    compile_s: float
    compile_phases_s: dict[str, float]
    first_step_s: float
    warmup_s: float
    warmup_steps: int
    steady_steps: int
    step_ms_median: float
    step_ms_ci95: tuple[float, float]
    stable: bool
    outliers: int
    samples_per_s: float
    samples_per_s_ci95: tuple[float, float]
    tokens_per_s: float
    mean_length: float
    eager_step_ms: list[float]
    speedup_eager: float | None
    speedup_eager_ci95: tuple[float, float] | None
    clock_drift: float | None
    peak_memory_bytes: int
    peak_reserved_bytes: int | None
    compile_peak_memory_bytes: int | None
    cudagraph_pool_bytes: int | None
    pipeline: str
    data_wait_share: float | None
    source: str
    numerics: dict[str, Any]
    graphs: int
    graph_break_reasons: list[str]
    recompile_reasons: list[str]
    recompile_limit_hits: list[str]
    cudagraph_skips: int
    cudagraph_skip_reasons: list[str]
    perf_hints: list[str]
    fallbacks: list[str]
    step_ms: list[float]
    findings: list[str] = field(default_factory=list)
    model_facts: dict[str, Any] = field(default_factory=dict)
    device_use: dict[str, float] = field(default_factory=dict)
    samples_per_s_per_worker: float | None = None
    compile_s_by_rank: list[float] = field(default_factory=list)
    peak_memory_bytes_by_rank: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values, which cross processes without this module."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart(AttemptRecord):
    """A start of a setting from its own artifacts in a fresh process, which ends after the warm-up."""

    what: ClassVar[str] = "warm-start"
    measures: ClassVar[str] = "warm_start_s"

    warm_start_s: float | None = figure(
        "`restore_s` + `load_s` + `warmup_s`: from a process that has imported torch to one that compiles no more",
        unit="s",
        missing="not reached",
    )
    load_s: float | None = figure(
        "building the model and its optimizer and applying the settings, which with `precompile` loads what was traced",
        unit="s",
        missing="not reached",
    )


def append(folder: Path, record: AttemptRecord) -> None:
    """Appends the record to its log in the folder, as `journal.append` does; raises RecordsError for a doubled trial_id."""
    text = record.to_json()
    type(record).from_json(text)
    named = json.dumps({"trial_id": record.trial_id}, ensure_ascii=False, separators=(",", ":"))[1:-1]
    journal.append(folder / (TRIALS_FILE if isinstance(record, TrialRecord) else WARM_STARTS_FILE), text, unique=named)


def recover(folder: Path) -> list[str]:
    """Moves incomplete lines out of the folder's logs; returns a sentence for each. Raises OSError or RecordsError."""
    said = (journal.recover(folder / name) for name in (TRIALS_FILE, WARM_STARTS_FILE))
    return [sentence for sentence in said if sentence is not None]


def read(folder: Path) -> list[TrialRecord]:
    """Reads every trial's record of the folder, in order; a RecordsError says which line is damaged or not of this sweep."""
    path = folder / TRIALS_FILE
    found = journal.read(path, TrialRecord.from_json, TrialRecord.what)
    sweep = _sweep(folder)
    config = sweep.get("config", {})
    environment = _environment_of_all(found, sweep)
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
        if environment is not None and record.environment_key not in (None, environment):
            raise RecordsError(
                f"{path} line {number} was measured in another environment than the sweep (environment_key "
                f"{quote_value(record.environment_key)} instead of {environment}), so their figures cannot be compared; remove "
                "the line"
            )
    return found


def follow(folder: Path) -> journal.Tail[TrialRecord]:
    """Returns a reader that yields each of the folder's trials once, as they are recorded."""
    return journal.Tail(folder / TRIALS_FILE, TrialRecord.from_json, TrialRecord.what)


def read_warm_starts(folder: Path) -> list[WarmStart]:
    """Reads every warm start of the folder, in order."""
    return journal.read(folder / WARM_STARTS_FILE, WarmStart.from_json, WarmStart.what)


def follow_warm_starts(folder: Path) -> journal.Tail[WarmStart]:
    """Returns a reader that yields each of the folder's warm starts once, as they are recorded."""
    return journal.Tail(folder / WARM_STARTS_FILE, WarmStart.from_json, WarmStart.what)


def standing(done: Iterable[TrialRecord]) -> dict[str, TrialRecord]:
    """Returns the record that counts of each setting: the latest cold one or, if there is none, the latest warm one.

    A record of a trial that the machines or the script ended counts only if there is no other.
    """
    found: dict[str, TrialRecord] = {}
    for record in done:
        before = found.get(record.settings_key)
        if before is None or _standing_rank(record) <= _standing_rank(before):
            found[record.settings_key] = record
    return found


def _standing_rank(record: TrialRecord) -> tuple[bool, bool]:
    return says_nothing(record.label, record.reason), record.caches is not Caches.COLD


def by_size(peaks: Mapping[str, float | None]) -> list[tuple[int, float | None]]:
    """Returns a record's `batch_peak_bytes` as sizes in ascending order, each with its bytes, or None if it did not fit."""
    sizes = {int(size): peak for size, peak in peaks.items() if size.isascii() and size.isdecimal() and len(size) < 19}
    return sorted(sizes.items(), key=lambda one: one[0])


def largest_fitting(peaks: Mapping[str, float | None]) -> int | None:
    """Returns the largest size that fits; None if none does."""
    return max((size for size, peak in by_size(peaks) if peak is not None), default=None)


def largest_batch_text(peaks: Mapping[str, float | None], usual: int | None) -> str:
    """Says which batch size is the largest that fits, and how much memory each takes; `usual` is the setting's own."""
    sizes = by_size(peaks)
    largest = largest_fitting(peaks)
    if largest is None:
        return f"no batch fits, not even {_samples(sizes[0][0])}" if sizes else "no batch size was tried"
    times = f", {largest / usual:.3g} times {usual}" if usual and usual != largest else ""
    said = f"the largest batch that fits: {largest}{times}"
    if all(peak is not None for _, peak in sizes):
        said = f"a batch of {largest} fits{times}; nothing larger was tried"
    memory = ", ".join(f"{size} {'does not fit' if peak is None else f'{peak / 2**30:.2f} GiB'}" for size, peak in sizes)
    return f"{said} (memory by batch size: {memory})"


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"


def _environment_of_all(found: Sequence[TrialRecord], sweep: Mapping[str, Any]) -> str | None:
    """Returns the environment in which all trials must have been measured; None if the hosts of a cluster may differ."""
    key = sweep.get("environment_key")
    if not isinstance(key, str) or sweep.get("cluster") is True:
        return None
    # earlier versions did not write down whether a sweep ran in a cluster, whose head need not measure anything itself
    ran_here = sweep.get("cluster") is False or any(record.environment_key == key for record in found)
    return key if ran_here else None


def _sweep(folder: Path) -> Mapping[str, Any]:
    """Returns what `sweep.json` says; empty if it cannot be read, which its own readers report."""
    try:
        path = folder / SWEEP_FILE
        values = json.loads(journal.read_regular(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) and isinstance(values.get("config", {}), dict) else {}


_NOISY = "unstable"
"""Label that earlier versions gave a trial that was only noisy and counted as failed; `stable` says so now."""
