"""The options of `python -m orchestrator.sweep`; each one's text is its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from orchestrator.config import CachePolicy, Device, Placement
from orchestrator.search import Searcher
from workloads.vocabulary import Pipeline

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
