"""`AttemptRecord`: the fields that trials' and warm starts' records share, and the validation of a record."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from compile_sweep.schema import journal
from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.figure import (
    DIFFERENCE,
    NOT_MEASURED,
    SHARE,
    SMALLEST_POSITIVE,
    Figure,
    figure,
    most,
    of_slowest,
    required,
)
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.setting_text import quote_value
from compile_sweep.schema.settings import CompileSettings

SCHEMA_VERSION = 2

_IDENTITY = frozenset({"trial_id", "settings", "settings_key", "status", "label", "caches", "environment_key"})
"""Fields in which no secret is looked for. They hold words of this project only, one of which may be somebody's password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """Fields that trials' and warm starts' records share. A figure that was not reached is None."""

    what: ClassVar[str]
    """What a line of the log is, for error messages."""
    measures: ClassVar[str]
    """Figure that every record with status `ok` has."""

    trial_id: str = required("unique in the folder, among trials and warm starts; the name of its folder under `logs/`")
    settings: dict[str, Any] = required(
        "object: the canonical fields of `CompileSettings`, see below",
        missing="never; a field that does not apply, or keeps torch's or the workload's own choice, is null",
    )
    settings_key: str = required("the same as canonical text, equal for equal settings")
    status: Status = required(
        "`ok`; `infeasible`: the setting itself cannot or must not be used; `failed`: the attempt broke, which says nothing "
        "certain about the setting; `stopped`: nothing went wrong, and at best it would not have been worth having, see "
        "`bounds`. A warm start is `ok` or `failed`",
    )
    label: str | None = figure("why it is not ok, as one word, see below", missing="ok")
    reason: str | None = figure("why it is not ok, as a sentence", missing="ok")
    phase: str | None = figure(
        "the last phase reached: starting, building, warming-up, steady, checking, done",
        missing="the trial's process died and its progress is not known",
    )
    precompile: bool = figure("whether what Dynamo traced was kept, or restored, too (`--precompile`)", default=False)
    workload: str = figure("what was trained", default="")
    size: str = figure("the size of the workload", default="")
    device: str | None = figure("the GPU's name; `cpu` on a CPU")
    num_workers: int = figure(
        "processes that trained together",
        default=1,
        limits=(0.0, 1e4),  # the report draws a lane for each
        is_positive=True,
    )
    cores: int | None = figure(
        "logical CPUs that worker 0 and all it started were bound to: its share of the host's, which is divided among the "
        "workers that may run on it at once"
    )
    gpus: list[str] = figure(
        "list of text: GPUs that its workers were on, each as `host:index`, the index being the host's own",
        default=list,
        missing="on CPUs; where no worker came up; records from before there was the field",
    )
    environment_key: str | None = figure("digest of what makes figures comparable, on worker 0's host")
    started_at: str = figure(
        "when the attempt began, later by what it waited for a host of the cluster",
        unit="ISO 8601, UTC",
        default="",
    )
    wall_s: float = figure("the whole attempt, worker start included", unit="s", default=0.0)
    phases_s: dict[str, float] = figure(
        "object: `wall_s` by the phase that worker 0 was in: `starting`, `building`, `warming-up`, `steady`, `checking`, "
        "`eager-runs` for runs that numbers are compared with, if it made them, and `done` for publishing, `--largest-batch` and "
        "ending",
        unit="s",
        default=dict,
        missing="the progress is not known; records from before there was the field",
    )
    waited_s: float = figure(
        "what its tries waited for hosts of the cluster; in no other figure",
        unit="s",
        default=0.0,
        limits=DIFFERENCE,
        missing="never; 0 on one host, and where no worker came up",
    )
    tries: int = figure(
        "this attempt and those before it that faults of the machines, or `--precompile`, may have ended, which are repeated "
        "(docs/reliability.md)",
        default=1,
        is_positive=True,
    )
    retry_reasons: list[str] = figure(
        "list of text: why each of those before ended; with `with --precompile: ` before it where it was tried again without",
        default=list,
        missing="there was none",
    )
    retried_s: float = figure(
        "what those before took, with the pauses between; not in `wall_s`",
        unit="s",
        default=0.0,
        limits=DIFFERENCE,
    )
    compile_phases_s: dict[str, float] = figure(
        "object: `compile_s`, of a warm start `warmup_s`, by phase, which add up to it: `dynamo`, `aot_autograd`, `inductor` "
        "(code generation), `autotuning`, `kernel_compilation`, `cudagraph_capture`, and `other` for the rest",
        unit="s",
        default=dict,
        over_ranks=of_slowest,
        limits=DIFFERENCE,
        missing=NOT_MEASURED,
    )
    cpu_pressure: float | None = figure(
        "share of the warm-up that threads of worker 0 and of what it started waited for a core, 0 to 1, see below",
        limits=SHARE,
        missing="not measured; the kernel does not say",
    )
    contended: bool = figure(
        "other trials had a worker on the host during the warm-up, and `cpu_pressure` is above 0.05 or not known, so compile "
        "times are too long; false if not measured",
        default=False,
    )
    gpu_neighbours: list[str] = figure(
        "list of text: processes of others that were seen on a worker's GPU during the warm-up or the timed steps; with any, "
        "the trial is `gpu-shared`",
        default=list,
        missing="there were none; on a CPU",
    )
    first_step_s: float | None = figure(
        "the first step, up to the device being idle; a part of `warmup_s`", unit="s", over_ranks=most
    )
    warmup_s: float | None = figure("the whole warm-up: compiling, and the steps themselves", unit="s", over_ranks=most)
    warmup_steps: int | None = figure(
        "the first batches of the pool, then every length the padding can produce, twice, or three times with CUDA graphs",
        unit="steps",
    )
    restore_s: float | None = figure(
        "fetching artifacts and putting them in place, before the model is built; in no other figure but `wall_s`",
        unit="s",
        missing="nothing was to be restored",
    )
    cache_restored: int | None = figure("what was put in place", unit="artifacts", missing="nothing was to be restored")
    cache_restored_bytes: int | None = figure(
        "the size of what was put in place", unit="bytes", missing="nothing was to be restored"
    )
    cache_refused: int | None = figure(
        "manifests and artifacts of the store that are not signed with this key, are damaged, or were not there; each is a "
        "sentence in the trial's log",
        missing="nothing was to be restored",
    )
    cache_faults: list[str] = figure(
        "list of text: why nothing could be restored, or published, a sentence each; the sweep's command says it at the end",
        default=list,
        missing="there was no fault",
    )
    cache_hits: int | None = figure(
        "artifacts that the compiler found in its caches, each once and none that the process had made itself",
        missing="eager; not measured",
    )
    cache_misses: int | None = figure("artifacts that it looked for in vain and had to make", missing="eager; not measured")
    cache_saved_s: float | None = figure(
        "what making the artifacts hit took at the time, less what finding and loading them took now",
        unit="s",
        limits=DIFFERENCE,
        missing="cold; not measured",
    )

    def to_json(self) -> str:
        """Returns one line of strict JSON: NaN and infinity become null, no line break."""
        return journal.written({"schema_version": SCHEMA_VERSION, **asdict(self)}, as_is=_IDENTITY)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parses a line of the log; raises RecordsError for anything that this version would not have written."""
        kinds = _kinds(cls)  # type: ignore[arg-type]  # mypy takes no class for hashable
        values = journal.parsed(line, SCHEMA_VERSION, kinds)
        try:
            values["settings"] = _settings(values["settings"])
            values["status"] = Status(values["status"])
            record = cls(**journal.checked(cls._current(values), kinds))
            if why := why_impossible(record):
                raise ValueError(why)
            return record
        except KeyError as error:
            raise RecordsError(f"it has no {error}") from None
        except (TypeError, ValueError) as error:
            raise RecordsError(str(error)) from None

    @classmethod
    def _current(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values


def figures(record: type[AttemptRecord]) -> Mapping[str, Figure]:
    """Returns the declaration of each field of such a record, in order; every record that is read is validated against it."""
    return {declared.name: declared.metadata["figure"] for declared in fields(record)}


@cache
def _kinds(record: Any) -> Mapping[str, Any]:
    hints = get_type_hints(record)
    return {declared.name: hints[declared.name] for declared in fields(record)}


def _settings(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError(f"settings is {values!r}")
    return CompileSettings.from_dict(values).to_dict()


def why_impossible(record: AttemptRecord) -> str | None:
    """Says why a record cannot be true: a figure outside its range, or two that contradict each other; None if it can."""
    for name, about in figures(type(record)).items():
        low, high = about.limits
        for value in _numbers(getattr(record, name)) if name != "settings" else ():
            if not low <= value <= high:
                return f"{name} is {value:.6g}, and it must be from {low:.6g} to {high:.6g}"
            if value < SMALLEST_POSITIVE and about.is_positive:
                return f"{name} is {value:.6g}, and it must be above 0"
    if record.settings_key != (key := CompileSettings.from_dict(record.settings).key):
        return f"settings_key is {quote_value(record.settings_key)}, and the key of its settings is {key!r}"
    if record.status is Status.OK and record.label is not None:
        return f"status is ok, and yet its label is {quote_value(record.label)}"
    measured = record.measures
    if record.status is Status.OK and ((value := getattr(record, measured)) is None or not math.isfinite(value)):
        return f"status is ok, and yet it has no {measured}"
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


_INTERVALS = {"step_ms_ci95": None, "samples_per_s_ci95": "samples_per_s", "speedup_eager_ci95": None}
"""Intervals, and the figure that must lie in each, if any."""


def _numbers(value: Any) -> Iterator[float]:
    """Yields every finite number in a field; other numbers are written as null."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= {float, int}:  # a record can have thousands of steps, so avoid a Python call for each
            yield from filter(math.isfinite, value)
            return
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield value
