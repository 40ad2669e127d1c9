"""What a sweep is: one complete, frozen value that decides everything a sweep does.

The options of `python -m orchestrator.sweep`; each one's text is its help.

Where a sweep's folder is: as the command line says, or a new one under results/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from compile_sweep.schema import redact
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims
from compile_sweep.schema.settings import CompileSettings
from orchestrator.search.proposers import Searcher
from orchestrator.search.stopping import Budget, StableFront

if TYPE_CHECKING:
    from orchestrator.plan.space import Excluded  # which loads torch, and processes that wait for workers need none
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

import tyro

IDENTITY = ("workload", "size", "script", "seed", "device", "workers_per_trial", "pipeline")
"""Fields in which a resumed sweep must equal the one that began the folder, for its figures to be comparable."""


REDIS = ("redis://", "rediss://")
"""How the address of Inductor's own remote caches begins."""


LONGEST_DEADLINE_S = 30 * 24 * 3600
"""Timers of the system take no number of seconds, and nothing of a sweep takes so long."""


MOST_AT_ONCE = 10_000
"""Ray counts what workers claim in ten-thousandths: of more, none could have its share."""


HIDDEN = redact.REDACTED
"""Stands for a cache's user and password wherever its address is written down."""


class Device(StrEnum):
    """What a trial trains on; torch's names."""

    CPU = "cpu"
    CUDA = "cuda"


class Placement(StrEnum):
    """Which host a trial's workers go to."""

    PACK = "pack"
    """One that has room beside other trials; a trial's workers to as few hosts as possible."""
    SPREAD = "spread"
    """One that no other trial has, all workers of a trial together."""


class CachePolicy(StrEnum):
    """What trials begin with."""

    COLD = "cold"
    """Nothing: every compile time is measured."""
    SHARED = "shared"
    """What trials before them left: compile times are warm, and cold ones estimated."""
    AUTO = "auto"
    """The same, and then the front is measured again, cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How a sweep chooses what to try next, and when it has tried enough; by default all settings in order.

    Raises:
        ConfigError: a value that does not work.
    """

    searcher: Searcher | None = None
    """Who proposes; None tries all settings in order."""
    objectives: tuple[str, ...] = ()
    """As `Objective.parse` reads them; none are the usual three."""
    constraints: tuple[str, ...] = ()
    """As `Constraint.parse` reads them."""
    stop: str | None = None
    """When to stop for want of news, as `StableFront.parse` reads it."""
    num_trials: int | None = None
    """Trials in all, those of earlier runs included."""
    gpu_budget_s: float | None = None
    """GPU-seconds that trials and warm starts may take in all, those of earlier runs included."""
    learn_from: tuple[str, ...] = ()
    """Folders of earlier sweeps."""
    learn_anyway: bool = False
    """Whether those may be of another workload or environment."""
    prune: bool = False
    """Whether trials are stopped early."""

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
    """One sweep.

    Raises:
        ConfigError: a value that does not work, whatever the machine.
    """

    recipe: str
    """Name of the recipe the settings came from."""
    workload: str
    """A built-in workload's name, or `package.module:Class`."""
    size: str
    """One of the workload's sizes."""
    settings: tuple[CompileSettings, ...]
    """What to try, in order, or to choose from."""
    excluded: tuple[Excluded, ...] = ()
    """What the recipe would have tried and why it is not."""
    script: Mapping[str, Any] | None = None
    """A person's script in place of a workload, as `ScriptJob.to_dict` writes it."""
    seed: int = 0
    """Decides weights and data."""
    device: Device = Device.CPU
    """What trials train on."""
    pipeline: Pipeline = Pipeline.RESIDENT
    """Where timed batches come from."""
    workers_per_trial: int = 1
    """Train workers a trial, each with one GPU where there are GPUs."""
    max_concurrent: int = 1
    """Trials that run at once, and into how many shares a host's cores are divided."""
    placement: Placement = Placement.PACK
    """Which hosts of a cluster trials run on."""
    confirm: bool = True
    """Whether members of the front that other trials disturbed are measured again alone, at the end."""
    cache: str | None = None
    """Where artifacts are kept: an absolute folder, a URI or a Redis address; None keeps none."""
    caches: CachePolicy = CachePolicy.COLD
    """What trials begin with."""
    precompile: bool = False
    """Whether what Dynamo traced is kept too, which leaves out some of its guards."""
    warm_starts: bool = True
    """Whether members of the front are started again from their own artifacts, at the end."""
    time_budget_s: float | None = None
    """Seconds after which no further trial starts; None for no limit."""
    compile_deadline_s: float = 600.0
    """Seconds the warm-up window, compiles included, may take before the trial is killed."""
    trial_deadline_s: float = 1200.0
    """Seconds a whole trial may take before it is killed."""
    storage: str | None = None
    """Where the folder is copied while the sweep runs; None for nowhere."""
    search: SearchConfig = SearchConfig()
    """How settings are chosen among `settings`."""
    log_to: tuple[str, ...] = ()
    """Where trials are logged to besides the sweep's folder, as `tracking.Destination` spells it."""

    def __post_init__(self) -> None:
        for name in ("workers_per_trial", "max_concurrent"):
            check_count(name, getattr(self, name))
        for name in ("time_budget_s", "compile_deadline_s", "trial_deadline_s"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{_flag(name)} {value:g} is no time; use a finite number of seconds above 0")
        for name in ("compile_deadline_s", "trial_deadline_s"):
            if (value := getattr(self, name)) > LONGEST_DEADLINE_S:
                raise ConfigError(f"--{_flag(name)} {value:g} is too long; use {LONGEST_DEADLINE_S} (30 days) or less")
        check_seed(self.seed)
        if self.trial_deadline_s < self.compile_deadline_s:
            raise ConfigError(
                f"--trial-deadline-s {self.trial_deadline_s:g} is below --compile-deadline-s {self.compile_deadline_s:g}, "
                "which it includes; raise it"
            )
        self._check_caches()
        if not self.settings:
            reason = f": {self.excluded[0].reason}" if self.excluded else ""
            raise ConfigError(f"recipe {self.recipe} leaves no setting to try here{reason}")

    def _check_caches(self) -> None:
        if self.cache is None and self.caches is not CachePolicy.COLD:
            raise ConfigError(f"--caches {self.caches} shares artifacts, and --cache none keeps none; leave one of them out")
        if self.precompile and (self.cache is None or self.cache.startswith(REDIS)):
            raise ConfigError(
                f"--precompile keeps what was traced, which --cache {shown(self.cache or 'none')} does not; name a folder or URI"
            )
        if self.cache is not None and self.cache.startswith(REDIS) and self.caches is CachePolicy.COLD:
            raise ConfigError(
                f"--cache {shown(self.cache)} is read while a trial compiles, so none would be cold; add --caches shared, "
                "or auto to measure the front again cold"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; settings as their keys."""
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


def check_count(name: str, count: int) -> None:
    """Refuses a number of trials or workers that cannot run side by side.

    Raises:
        ConfigError: it is below 1 or above `MOST_AT_ONCE`.
    """
    if count < 1:
        raise ConfigError(f"--{_flag(name)} {count} is too few; use 1 or more")
    if count > MOST_AT_ONCE:
        raise ConfigError(f"--{_flag(name)} {count} is too many; use {MOST_AT_ONCE} or fewer")


def check_seed(seed: int) -> None:
    """Refuses a seed that not every generator takes.

    Raises:
        ConfigError: it is below 0 or has more than 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed} is none; use a whole number from 0 to {2**32 - 1}")


def shown(cache: str) -> str:
    """A cache's address without the user and password it may hold."""
    return redact.redact_uri(cache)


def _flag(name: str) -> str:
    return name.replace("_", "-")


Repeated = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""An option that takes several values, given once or more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Measure compile settings of a training workload and report the trade-off."""

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    """quickstart (the default), captioning, grid or another; --list names them."""
    settings: tuple[str, ...] = ()
    """Settings to try instead of a recipe's, each like scope=regional,dynamic=auto; what is left out takes its usual value."""
    vary: tuple[str, ...] = ()
    """Further values of any field to cross the settings with, like group_window=1,100."""
    workload: str | None = None
    """captioning (the default), another that --list names, or package.module:Class for your own."""
    size: str | None = None
    """One of the workload's sizes; by default its first with a GPU and its last without."""
    script: str | None = None
    """A training script to run unchanged in place of a workload; its own arguments follow after --."""
    in_place: bool = False
    """Run the script in its own folder, where what it writes stays, and not in a copy made of links."""
    num_trials: int | None = None
    """At most this many trials: the first settings of the recipe, or what a searcher proposes."""
    searcher: Searcher | None = None
    """Choose what to try next among the settings, of the recipe grid if none is named; by default all of them, in order. gain
    expects hypervolume gained for each second."""
    objective: Repeated = ()
    """What is searched for, like samples_per_s:max; by default throughput, compile time and memory."""
    constraint: Repeated = ()
    """Bounds to keep, like compile_s<=120 or peak_memory_bytes<=40GiB."""
    stop: str | None = None
    """When to end for want of news, like "front stable for 6 trials"."""
    gpu_budget_s: float | None = None
    """Start no trial with which all trials would probably take more than this many GPU-seconds, compile time included."""
    learn_from: Repeated = ()
    """Folders of earlier sweeps whose results the searcher is told of; what they tried is not tried again."""
    learn_anyway: bool = False
    """Take also sweeps of another workload or environment: their best settings are tried first."""
    prune: Literal["on", "off"] | None = None
    """Stop trials that can no longer keep a constraint or add to the front; by default on with --searcher or --constraint."""
    device: Device | None = None
    """cpu or cuda; by default cuda if this machine has a GPU. Say cuda on a cluster whose head has none."""
    pipeline: Pipeline | None = None
    """resident (the default) times the compute on prepared batches; real times it with the workload's own loader."""
    max_concurrent: int | None = None
    """Trials at once; by default one a GPU, or one. They divide a host's cores among themselves."""
    no_confirm: bool = False
    """Do not measure members of the front that other trials disturbed again, alone, at the end."""
    cache: str | None = None
    """Where compiled artifacts are kept: a folder, s3://…, gs://…, redis://host:port, or none; by default the folder `cache`
    beside the sweep's own."""
    caches: CachePolicy | None = None
    """cold (the default): trials begin with nothing. shared: with what others left; cold compile times are then estimated. auto:
    the same, and the front is measured again cold."""
    precompile: bool = False
    """Keep what Dynamo traced as well, so that a warm start does not trace. It checks fewer guards then."""
    no_warm_start: bool = False
    """Do not start members of the front again from their own artifacts, at the end."""
    placement: Placement | None = None
    """pack (the default) fills a cluster's hosts one after the other; spread gives each trial a host to itself."""
    workers_per_trial: int | None = None
    """Train workers of each trial, one GPU each; 1 by default."""
    time_budget_s: float | None = None
    """Start no trial that would probably end later than this many seconds from now."""
    compile_deadline_s: float | None = None
    """Kill a trial that is still compiling or warming up after this; 600 by default."""
    trial_deadline_s: float | None = None
    """Kill a trial that is not done after this; by default the compile deadline and 300 s."""
    seed: int | None = None
    """Decides weights and data; 0 by default."""
    output: Path | None = None
    """The sweep's folder; by default a new one under results/."""
    log_to: Repeated = ()
    """Log trials there as well, as they finish: mlflow:URI, mlflow:DIR, tensorboard:DIR or wandb:PROJECT."""
    storage: str | None = None
    """Where the folder is copied while the sweep runs, and brought back from by --resume: s3://bucket/sweep, gs://…, another
    folder, or none; by default $COMPILE_SWEEP_STORAGE with the folder's name behind it, if that is set."""
    resume: bool = False
    """Go on with the sweep in --output: what is recorded there is not repeated."""
    dry_run: bool = False
    """Print what would run, what would not and why, and how long it would take; start nothing."""
    explain: str | None = None
    """Run one setting, say what the compiler made of it and what to do about it, and record nothing."""
    source: str | None = None
    """Print one setting as Python to paste into a training script; run nothing."""
    list: bool = False
    """Name workloads, recipes and settings, a line each; run nothing."""


GIVEN = "given"
"""What a sweep of `--settings` calls its recipe."""


def chosen(options: Options) -> Path:
    """The sweep's folder.

    Raises:
        ConfigError: nothing says which sweep is to be resumed, or whose home the folder is in.
    """
    if options.output is not None:
        return expanded("--output", options.output)
    if options.resume:
        return Path("results") / _name_of(options.storage)
    name = GIVEN if options.settings else options.recipe or (str(options.searcher) if options.searcher else "quickstart")
    return Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def expanded(option: str, folder: str | Path) -> Path:
    """The folder with `~` as a shell would have it, which leaves the one in `--output=~/x` as it is.

    Raises:
        ConfigError: no user is called so.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ConfigError(f"{option} {folder} is no folder, for no user is called so; name another") from None


def _name_of(storage: str | None) -> str:
    """The folder's name, which is its storage's if it was made under results/."""
    if storage is None:
        raise ConfigError("--resume needs to know which sweep; name its folder with --output, or its --storage")
    name = PurePosixPath(urlsplit(storage).path).name
    if name in ("", ".."):
        raise ConfigError(f"--storage {shown(storage)} does not say what the sweep's folder is called; name it with --output")
    return name
