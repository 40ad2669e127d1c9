"""What a sweep is: one complete, frozen value that decides everything a sweep does, and the options of a single run.

The options of `python -m orchestrator.sweep` are the fields of these classes: the string below each is its help.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, cast, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from compile_sweep.command_line import Flag, Several
from compile_sweep.schema import redact
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.setting_text import quote_value
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.short_names import is_name
from orchestrator.search.proposers import Searcher
from orchestrator.search.stopping import Budget, StableFront

IDENTITY = ("workload", "size", "script", "seed", "device", "workers_per_trial", "pipeline")
"""Fields that a resumed sweep must have in common with the original for its figures to be comparable."""

EACH_RUN = ("max_concurrent", "confirm", "warm_starts", "time_budget_s", "effort")
"""Fields that concern one run and are not taken over by a resumed sweep."""

AUTO = "auto"  # leaves a field to the machine, the workload or the sweep's folder; `plan.resolve` fills it in
NONE = "none"  # value of `--cache-store` and `--storage` for storing nothing
REDIS = ("redis://", "rediss://")  # prefix of the address of Inductor's own remote caches

LONGEST_DEADLINE_S = 30 * 24 * 3600
"""Maximum deadline: the system's timers accept no longer one, and nothing in a sweep takes that long."""

AFTER_COMPILING_S = 300.0  # seconds of a trial in addition to its compile deadline, unless its own deadline is given
MOST_AT_ONCE = 10_000  # Ray counts claims in ten-thousandths, so more workers could not get their share
HIDDEN = redact.REDACTED  # replaces a cache's user and password wherever its address is stored


class RunnerKind(StrEnum):
    """Where trials run."""

    RAY = "ray"
    LOCAL = "local"


class Device(StrEnum):
    """Device type that a trial trains on, by torch's names."""

    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    """The host that a trial's workers are placed on."""

    PACK = "pack"
    """A host with room next to other trials; a trial's workers use as few hosts as possible."""
    SPREAD = "spread"
    """A host without other trials, for all workers of a trial."""


class CachePolicy(StrEnum):
    """The caches that trials start with."""

    COLD = "cold"
    """Empty caches: every compile time is measured."""
    SHARED = "shared"
    """Artifacts of earlier trials: compile times are warm, and cold ones are estimated."""
    AUTO = "auto"
    """Artifacts of earlier trials; then the front is measured again, cold."""


class Effort(StrEnum):
    """How long recipe auto may take."""

    QUICK = "quick"
    STANDARD = "standard"
    THOROUGH = "thorough"

    @property
    def seconds(self) -> float:
        """The time budget in seconds."""
        return {Effort.QUICK: 300.0, Effort.STANDARD: 600.0, Effort.THOROUGH: 3600.0}[self]


def check_count(name: str, count: int, *, least: int = 1) -> None:
    """Refuses a number of trials or workers below `least` or above `MOST_AT_ONCE`."""
    if count < least:
        raise ConfigError(f"--{_flag(name)} {count} is too few; use {least} or more")
    if count > MOST_AT_ONCE:
        raise ConfigError(f"--{_flag(name)} {count} is too many; use {MOST_AT_ONCE} or fewer")


def check_seed(seed: int) -> None:
    """Refuses a seed that some generators do not accept: a negative one, or one of more than 32 bits."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed} is not a seed; use a whole number from 0 to {2**32 - 1}")


def shown(cache: str) -> str:
    """Returns a cache's address without user and password."""
    return redact.redact_uri(cache)


def _flag(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """A candidate that will not be tried."""

    candidate: str
    reason: str


_SAID = {AUTO: None, "on": True, "off": False}

_OnOff = Annotated[
    bool | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="{auto,on,off}",
        choices=tuple(_SAID),
        instance_from_str=lambda words: _SAID[words[0]],
        is_instance=lambda value: value is None or isinstance(value, bool),
        str_from_instance=lambda value: [next(word for word, stands_for in _SAID.items() if stands_for is value)],
    ),
]


# A recipe may follow the values of an option. Each test recognizes a value by something that no recipe's name has.
_SETTINGS = Several(lambda word: "=" in word or is_name(word))
_OBJECTIVES = Several(lambda word: ":" in word)
_BOUNDS = Several(lambda word: "<" in word or ">" in word or "=" in word)
_FOLDERS = Several(lambda word: os.sep in word or os.path.isdir(word))
_PLACES = Several(lambda word: ":" in word)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How settings are chosen among those of the recipe, and when enough were tried."""

    searcher: Searcher | None = None
    """Let a searcher choose which setting to try next, from recipe grid unless another is named; by default all settings run, in
    order. gain maximizes the hypervolume it expects to gain per second."""
    objectives: Annotated[tuple[str, ...], tyro.conf.arg(name="objective", metavar="FIELD:GOAL …"), _OBJECTIVES] = ()
    """What to optimize, like samples_per_s:max; by default throughput, compile time and memory."""
    constraints: Annotated[tuple[str, ...], tyro.conf.arg(name="constraint", metavar="BOUND …"), _BOUNDS] = ()
    """Bounds to keep, like compile_s<=120 or peak_memory_bytes<=40GiB."""
    stop: str | None = None
    """When to stop because nothing new turns up, like "front stable for 6 trials"."""
    num_trials: int | None = None
    """Run at most this many trials, including earlier runs': the first settings of the recipe, or what a searcher proposes."""
    gpu_budget_s: float | None = None
    """Start no trial that would probably bring all trials, including earlier runs' and compile time, above this many
    GPU-seconds."""
    learn_from: Annotated[tuple[str, ...], _FOLDERS, tyro.conf.arg(metavar="DIR …")] = ()
    """Folders of earlier sweeps for the searcher to learn from; settings they tried are not tried again."""
    learn_anyway: bool = False
    """Also learn from sweeps of another workload or environment: their best settings are tried first."""
    prune: _OnOff = None
    """Stop trials that can no longer keep a constraint or add to the front; auto is on with --searcher or --constraint."""

    def __post_init__(self) -> None:
        if "warm_start_s" in {*(one.name for one in self.aims.objectives), *(one.name for one in self.aims.constraints)}:
            raise ConfigError(
                "warm_start_s is known only at the end of a sweep, of members of the front, so no search can go by it; "
                "orchestrator.simulate can, on a sweep that has ended"
            )
        Budget(gpu_s=self.gpu_budget_s)
        if self.stop is not None:
            StableFront.parse(self.stop)
        if self.num_trials is not None and self.num_trials < 1:
            raise ConfigError(f"--num-trials {self.num_trials} is too few; use 1 or more")
        if self.learn_anyway and not self.learn_from:
            raise ConfigError("--learn-anyway says how to learn from other sweeps; name them with --learn-from")

    @property
    def aims(self) -> Aims:
        """The objectives and constraints."""
        return Aims.parse(self.objectives, self.constraints)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """What is measured, and how; a resumed sweep goes on with what it began with, unless something else is said here."""

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    """auto (the default), quickstart, captioning, grid (the default with --searcher) or another; --list names them."""
    workload: str = "captioning"
    """captioning, another that --list names, or package.module:Class or path/to/file.py:Class for your own."""
    size: str = AUTO
    """One of the workload's sizes; auto is the first one with a GPU and the last one without."""
    settings: Annotated[tuple[CompileSettings, ...], tyro.conf.Suppress] = ()
    """What to try, in order, or to choose from: what the recipe or `--settings` comes to."""
    excluded: Annotated[tuple[Excluded, ...], tyro.conf.Suppress] = ()
    """What the recipe would have tried and why it is not."""
    script: Annotated[Mapping[str, Any] | None, tyro.conf.Suppress] = None
    """A person's script in place of a workload, as `ScriptJob.to_dict` writes it."""
    seed: int = 0
    """Seed for weights and data."""
    device: Device | None = None
    """cpu or cuda; by default cuda if this machine has a GPU. Write cuda on a cluster whose head has no GPU."""
    pipeline: Pipeline = Pipeline.RESIDENT
    """resident times the compute on prepared batches; real times it with the workload's own loader."""
    largest_batch: bool = False
    """Also find the largest batch that fits the GPU's memory under each setting, in about five more compiles a trial."""
    workers_per_trial: int = 1
    """Ray Train workers per trial, each with a GPU of its own if there are GPUs."""
    max_concurrent: int = 0
    """Trials at once; 0 is one per GPU, or one without a GPU. Trials on a host share its cores evenly."""
    runner: RunnerKind = RunnerKind.RAY
    """ray runs trials on this host or in a cluster. local runs them here one after another, each in a fresh process, without
    Ray, so that a trial starts seconds earlier; one worker per trial."""
    placement: Placement = Placement.PACK
    """pack fills a cluster's hosts one after another; spread gives each trial a host to itself."""
    confirm: bool = True
    """At the end, measure again, alone, the members of the front that other trials disturbed."""
    cache: Annotated[str | None, tyro.conf.arg(name="cache-store", aliases=("--cache",))] = AUTO
    """Where compile caches are kept for later trials and jobs: a folder, s3://…, gs://…, redis://host:port, or none; auto is the
    folder `cache` beside the sweep's own."""
    caches: Annotated[CachePolicy, tyro.conf.arg(name="starts", aliases=("--caches",))] = CachePolicy.COLD
    """What trials start with. cold: empty compile caches. shared: what earlier trials compiled; cold compile times are then
    estimated. auto: as shared, and the front is measured again cold."""
    precompile: bool = False
    """Also store Dynamo's traces, so that a warm start need not trace again. Fewer guards are checked then."""
    warm_starts: Annotated[bool, tyro.conf.arg(name="warm-start")] = True
    """At the end, start the members of the front again from their own artifacts."""
    effort: Effort | None = None
    """How long recipe auto may take: quick is 5 minutes (the default on a CPU), standard 10 (on a GPU), thorough an hour."""
    time_budget_s: float | None = None
    """Start no trial that would probably end more than this many seconds from now."""
    compile_deadline_s: float = 600.0
    """Kill a trial that is still compiling or warming up after this many seconds."""
    trial_deadline_s: float = 0.0
    """Kill a trial that is not done after this many seconds; 0 is 300 s more than the compile deadline."""
    storage: Annotated[str | None, tyro.conf.Suppress] = None
    """Where the folder is copied while the sweep runs; None for nowhere."""
    search: SearchConfig = SearchConfig()
    """How settings are chosen among `settings`."""
    log_to: Annotated[tuple[str, ...], _PLACES, tyro.conf.arg(metavar="PLACE …")] = ()
    """Also log each trial as it finishes: mlflow:URI, mlflow:DIR, tensorboard:DIR or wandb:PROJECT."""

    def __post_init__(self) -> None:
        check_count("workers_per_trial", self.workers_per_trial)
        check_count("max_concurrent", self.max_concurrent, least=0)
        for name in ("time_budget_s", "compile_deadline_s", "trial_deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf and (name, value) != ("trial_deadline_s", 0):
                raise ConfigError(f"--{_flag(name)} {value:g} is not a time; use a finite number of seconds above 0")
        if self.cache == NONE:
            object.__setattr__(self, "cache", None)
        for name in ("compile_deadline_s", "trial_deadline_s"):
            if (value := getattr(self, name)) > LONGEST_DEADLINE_S:
                raise ConfigError(f"--{_flag(name)} {value:g} is too long; use {LONGEST_DEADLINE_S} (30 days) or less")
        check_seed(self.seed)
        if self.runner is RunnerKind.LOCAL and self.workers_per_trial > 1:
            raise ConfigError(f"--runner local has one worker per trial; leave it out to train with {self.workers_per_trial}")
        if self.runner is RunnerKind.LOCAL and self.max_concurrent > 1:
            raise ConfigError(f"--runner local runs one trial at a time; leave it out to run {self.max_concurrent} at once")
        if self.largest_batch and self.workers_per_trial > 1:
            raise ConfigError(f"--largest-batch has one worker per trial; leave it out to train with {self.workers_per_trial}")
        if 0 < self.trial_deadline_s < self.compile_deadline_s:
            raise ConfigError(
                f"--trial-deadline-s {self.trial_deadline_s:g} is below --compile-deadline-s {self.compile_deadline_s:g}, "
                "which it includes; raise it"
            )
        if self.cache is None and self.caches is not CachePolicy.COLD:
            raise ConfigError(f"--starts {self.caches} shares artifacts, and --cache-store none keeps none; leave one out")
        if self.precompile and (self.cache is None or self.cache.startswith(REDIS)):
            raise ConfigError(
                f"--precompile keeps what was traced, which --cache-store {shown(self.cache or 'none')} does not; "
                "name a folder or URI"
            )
        if self.cache is not None and self.cache.startswith(REDIS) and self.caches is CachePolicy.COLD:
            raise ConfigError(
                f"--cache-store {shown(self.cache)} is read while a trial compiles, so none would be cold; add --starts shared, "
                "or auto to measure the front again cold"
            )

    @property
    def whole_trial_s(self) -> float:
        """Seconds that a whole trial may take before it is killed."""
        return self.trial_deadline_s or self.compile_deadline_s + AFTER_COMPILING_S

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain JSON values, with settings as their keys."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items()}
        search = asdict(self.search).items()
        values["search"] = {name: list(value) if isinstance(value, tuple) else value for name, value in search}
        values["log_to"] = [shown(place) for place in self.log_to]
        for name in ("cache", "storage"):
            values[name] = None if values[name] is None else shown(values[name])
        values["settings"] = [setting.key for setting in self.settings]
        values["excluded"] = [asdict(excluded) for excluded in self.excluded]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Restores a configuration from the result of `to_dict`, of any version; TypeError or ConfigError if it does not work."""
        config: Self = _read("", cls, values)
        return config

    def to_resume(self) -> Self:
        """Returns what a resuming command begins with: without fields about one run, and without settings to try."""
        is_usual = self.trial_deadline_s == self.compile_deadline_s + AFTER_COMPILING_S  # as earlier versions stored it
        deadline_s = 0.0 if is_usual else self.trial_deadline_s
        each_run = {name: getattr(SweepConfig(), name) for name in EACH_RUN}
        return replace(self, recipe=None, settings=(), excluded=(), trial_deadline_s=deadline_s, **each_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What this run of the command is to do, and where."""

    settings: Annotated[tuple[str, ...], _SETTINGS, tyro.conf.arg(metavar="SETTING …")] = ()
    """Settings to try instead of a recipe's, each like scope=regional,dynamic=auto, or like DIR:A7 of another sweep; what is left
    out takes its usual value."""
    vary: Annotated[tuple[str, ...], _SETTINGS, tyro.conf.arg(metavar="FIELD=VALUES …")] = ()
    """Values of any field to combine with every setting, like group_window=1,100."""
    script: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A training script, or a module as for python -m, to run unchanged instead of a workload; its arguments follow after --."""
    in_place: Flag = False
    """Run the script in its own folder, which keeps the files that it writes, instead of in a copy made of links."""
    compile_loss: Flag = False
    """In trials of a script with scope=full, also compile the loss functions that it calls outside its modules."""
    batch_arg: Annotated[str | None, tyro.conf.arg(metavar="OPTION")] = None
    """The script's own option for its batch size, such as --batch-size, so that --vary batch_size=16,32 passes it on; with = at
    its end, as in batch_size=, it is passed on as one word."""
    output: Path | None = None
    """The sweep's folder; by default a new one under results/."""
    storage: str | None = AUTO
    """Where the folder is copied to while the sweep runs, and where --resume restores it from: s3://bucket/sweep, gs://…, another
    folder, or none; auto appends the folder's name to $COMPILE_SWEEP_STORAGE, if that is set."""
    serve: Flag = False
    """Serve the report on 127.0.0.1 while the sweep runs; the address is printed as it begins."""
    resume: Flag = False
    """Continue the sweep in --output; what is recorded there is not repeated."""
    dry_run: Flag = False
    """Print what would run, what would not and why, and how long it would take; start nothing."""
    explain: Annotated[str | None, tyro.conf.arg(metavar="SETTING")] = None
    """Run one setting, say what the compiler made of it and what to do about it, and record nothing."""
    bisect: Annotated[str | None, tyro.conf.arg(metavar="SETTING")] = None
    """Find the first part of the model that does not follow eager under one setting, by compiling one part at a time."""
    source: Annotated[str | None, tyro.conf.arg(metavar="SETTING")] = None
    """Print one setting as Python to paste into a training script; run nothing."""
    list: Flag = False
    """List workloads, recipes and settings, one per line; run nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand:
    """Measure compile settings of a training script or a workload, and report which are worth training with.

    For example: compile-sweep sweep --script train.py --output results/mine -- --batch-size 16
    """

    HELP_GROUPS: ClassVar[Mapping[str, Sequence[str]]] = {
        "common options": (
            "--script", "--workload", "--size", "--settings", "--device", "--output", "--resume", "--effort", "--time-budget-s",
            "--serve", "--dry-run", "--list",
        ),
        "what is measured": (
            "--vary", "--seed", "--pipeline", "--largest-batch", "--workers-per-trial", "--in-place", "--compile-loss",
            "--batch-arg", "--explain", "--bisect", "--source",
        ),
        "how trials run": (
            "--max-concurrent", "--runner", "--placement", "--confirm", "--compile-deadline-s", "--trial-deadline-s",
        ),
        "compile caches": ("--cache-store", "--starts", "--precompile", "--warm-start"),
        "search": (
            "--searcher", "--objective", "--constraint", "--num-trials", "--gpu-budget-s", "--stop", "--learn-from",
            "--learn-anyway", "--prune",
        ),
        "results elsewhere": ("--storage", "--log-to"),
    }  # fmt: skip
    sweep: Annotated[SweepConfig, tyro.conf.arg(name="")] = SweepConfig()
    run: Run = Run()


def expanded(option: str, folder: str | Path) -> Path:
    """Expands `~` like a shell, which leaves the one in `--output=~/x` unchanged; raises ConfigError if there is no such user."""
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(f"{option} {folder} is not a folder: there is no such user; name another") from None


def _read(name: str, kind: Any, value: Any) -> Any:
    """Returns a field's value from its JSON form."""
    misfit = TypeError(f"{name} is {quote_value(value)}")
    if kind is CompileSettings and isinstance(value, str):
        return CompileSettings.parse(value)
    if is_dataclass(kind) and isinstance(value, Mapping):
        hints, make = get_type_hints(kind), cast(type[Any], kind)
        return make(**{one.name: _read(one.name, hints[one.name], value[one.name]) for one in fields(kind) if one.name in value})
    if isinstance(kind, UnionType):
        return None if value is None else _read(name, next(one for one in get_args(kind) if one is not type(None)), value)
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return dict(value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_read(name, get_args(kind)[0], member) for member in value)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str) and value in list(kind):
        return kind(value)
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # JSON does not limit numbers
        return float(value)
    if type(value) is not kind:
        raise misfit
    return value
