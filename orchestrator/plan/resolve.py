"""Fills in what a sweep's configuration leaves open, from the machine, the workload, the sweep's folder and an earlier run."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import ConfigError, SettingsError
from compile_sweep.schema.redact import redact_uri
from compile_sweep.schema.setting_text import parse_pairs, quote_value
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.schema.short_names import resolve_name
from compile_sweep.schema.visible_text import visible
from orchestrator.config import (
    AUTO,
    HIDDEN,
    NONE,
    REDIS,
    Device,
    Effort,
    Run,
    RunnerKind,
    SearchConfig,
    SweepConfig,
    expanded,
    shown,
)
from orchestrator.environment import Environment
from orchestrator.plan.recipes import AUTO_RECIPE, candidates, find_recipe
from orchestrator.plan.scripts import with_baseline
from orchestrator.plan.space import Candidate, Choice, Target, candidate_text, choose, refuse_several_jobs, varied
from orchestrator.search import Searcher
from orchestrator.storage import mirror
from orchestrator.tracking import Destination

GIVEN = "given"  # name of the recipe of a sweep with `--settings`


def device_of(config: SweepConfig, environment: Environment, *, only_plans: bool = False) -> Device:
    """Returns what trials train on; raises ConfigError if a GPU is requested, and there is none."""
    device = config.device or (Device.CUDA if environment.gpu else Device.CPU)
    if device is Device.CUDA and not environment.gpu and not only_plans and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            "--device cuda needs a GPU, and none is visible; use cpu, plan with --dry-run, or run on a cluster that has one"
        )
    return device


def folder_of(config: SweepConfig, run: Run) -> Path:
    """Returns the sweep's folder; raises ConfigError if nothing says which sweep to resume, or `~` names an unknown user."""
    if run.output is not None:
        output = expanded("--output", run.output)
        if str(output).startswith("-") or visible(str(output)) != str(output):  # commands and a terminal would take it for others
            raise ConfigError(f"--output {quote_value(str(output))} begins with a dash or has control characters; name another")
        return output
    if run.resume:
        return Path("results") / _name_of(run.storage)
    name = GIVEN if run.settings else config.recipe or config.search.searcher or _recipe(config, run)
    return Path("results") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _name_of(storage: str | None) -> str:
    """Returns the folder's name, which is its storage's if it was created under results/."""
    if storage is None or storage in (AUTO, NONE):
        raise ConfigError("--resume needs to know which sweep; name its folder with --output, or its --storage")
    name = PurePosixPath(urlsplit(storage).path).name
    if name in ("", ".."):
        raise ConfigError(f"--storage {shown(storage)} does not say what the sweep's folder is called; name it with --output")
    return name


def _recipe(config: SweepConfig, run: Run) -> str:
    if run.settings:
        return GIVEN
    return config.recipe or ("grid" if config.search.searcher else AUTO_RECIPE)


def resolve(config: SweepConfig, run: Run, *, before: SweepConfig | None, environment: Environment, output: Path) -> SweepConfig:
    """Fills in everything except what the workload decides, so that the configuration means the same in any folder."""
    device = device_of(config, environment, only_plans=run.dry_run)
    if config.largest_batch:
        refuse_largest_batch(device)
    if run.settings and config.recipe is not None:
        raise ConfigError(f"--settings replaces a recipe's settings; leave out {config.recipe} or --settings")
    recipe = None if before is not None and config.recipe is None and not run.settings else _recipe(config, run)
    if recipe not in (None, GIVEN):
        find_recipe(recipe, has_script=run.script is not None)
    is_auto = (recipe or (before and before.recipe)) == AUTO_RECIPE
    search = _search(config.search, is_auto=is_auto)
    time_budget_s = _time_budget_s(config, device, None if is_auto else _words_of(recipe, before))
    refuse_misspelled("--settings", run.settings, run.vary)
    num_gpus = environment.num_gpus if device is Device.CUDA else 0
    if num_gpus and config.workers_per_trial > num_gpus and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"--workers-per-trial {config.workers_per_trial} needs as many GPUs, and {num_gpus} are visible")
    at_once = 1 if config.runner is RunnerKind.LOCAL else max(1, num_gpus // config.workers_per_trial)
    return replace(
        config,
        recipe=recipe,
        device=device,
        max_concurrent=config.max_concurrent or at_once,
        cache=_cache(config.cache, output),
        search=search,
        time_budget_s=time_budget_s,
        compile_deadline_s=_compile_deadline_s(config, time_budget_s if is_auto else None),
        log_to=tuple(Destination.parse(text).spelled for text in config.log_to),
    )


def refuse_largest_batch(device: Device, target: Target | None = None) -> None:
    """Refuses a search for the largest batch on a CPU, which has no limit, or for a workload that takes no batch size."""
    if device is Device.CPU:
        raise ConfigError("--largest-batch needs a GPU: without one, what takes too much memory is killed by the system")
    if target is not None and (excluded := choose([{"scope": Scope.EAGER, "batch_size": 1}], target).excluded):
        raise ConfigError(excluded[0].reason)


def with_settings(config: SweepConfig, run: Run, *, before: SweepConfig | None, target: Target) -> SweepConfig:
    """Adds the workload's size and the settings to try to what `resolve` returned; raises ConfigError if none is left."""
    recipe, chosen = _chosen(config, run, before, target)
    if target.is_script:
        chosen = with_baseline(chosen, compile_loss=run.compile_loss)
    refuse_several_jobs((*chosen.settings, *(before.settings if before else ())), target.job_options)
    if not chosen.settings:
        reason = f": {chosen.excluded[0].reason}" if chosen.excluded else ""
        raise ConfigError(f"recipe {recipe} leaves no setting to try here{reason}")
    if config.largest_batch:
        refuse_largest_batch(config.device or Device.CUDA, target)
    if config.pipeline is Pipeline.REAL and not target.has_loader:
        raise ConfigError(f"--pipeline real needs a loader, and {target.workload} has none; write one, or use resident")
    return replace(
        config,
        recipe=recipe,
        size=target.size,
        settings=chosen.settings if config.search.searcher else chosen.settings[: config.search.num_trials],
        excluded=chosen.excluded,
    )


def _time_budget_s(config: SweepConfig, device: Device, other_recipe: str | None) -> float | None:
    effort, search = config.effort, config.search
    ends = {
        "--time-budget-s": config.time_budget_s,
        "--num-trials": search.num_trials,
        "--gpu-budget-s": search.gpu_budget_s,
    }
    said = [option for option, value in ends.items() if value is not None]
    if effort is not None and other_recipe is not None:
        raise ConfigError(
            f"--effort {effort} is for recipe auto, and this sweep tries {other_recipe}; leave it out, or use --time-budget-s"
        )
    if effort is not None and said:
        raise ConfigError(f"--effort {effort} and {said[0]} both say when to end; leave one of them out")
    if said or other_recipe is not None:
        return config.time_budget_s
    return (effort or (Effort.STANDARD if device is Device.CUDA else Effort.QUICK)).seconds


def _words_of(recipe: str | None, before: SweepConfig | None) -> str:
    name = recipe or str(before and before.recipe)
    return "settings of its own" if name == GIVEN else name


_LEAST_DEADLINE_S = 120.0  # minimum seconds that recipe auto lets a setting compile, however little time there is


def _compile_deadline_s(config: SweepConfig, budget_s: float | None) -> float:
    """Returns the compile deadline: in a search with a budget, at most half of the budget, unless another is given."""
    if budget_s is None or config.compile_deadline_s != SweepConfig().compile_deadline_s:
        return config.compile_deadline_s
    return min(config.compile_deadline_s, max(_LEAST_DEADLINE_S, budget_s / 2))


def _learned_from(folder: str) -> str:
    if "://" in folder:
        raise ConfigError(f"--learn-from {redact_uri(folder)} is an address; name the folder of a sweep on this host")
    return str(expanded("--learn-from", folder).absolute())


def _search(asked: SearchConfig, *, is_auto: bool = False) -> SearchConfig:
    if is_auto and asked.searcher in (None, Searcher.LEVERS):
        asked = replace(asked, searcher=Searcher.LEVERS, objectives=asked.objectives or ("samples_per_s:max",))
    if asked.searcher is None and asked.learn_from:
        raise ConfigError("--learn-from teaches a searcher; name one with --searcher")
    is_search = asked.searcher or asked.objectives or asked.constraints or asked.stop or asked.gpu_budget_s
    return replace(
        asked,
        searcher=asked.searcher or (Searcher.GRID if is_search else None),  # which keeps the settings' order
        learn_from=tuple(map(_learned_from, asked.learn_from)),
        prune=bool(asked.searcher or asked.constraints) if asked.prune is None else asked.prune,
    )


def _chosen(config: SweepConfig, run: Run, before: SweepConfig | None, target: Target) -> tuple[str, Choice]:
    if run.settings:
        return GIVEN, given("--settings", run.settings, run.vary, target)
    if config.recipe is None:
        assert before is not None
        if run.vary:
            raise ConfigError("--vary goes with a recipe or --settings; name the one that the sweep to resume began with")
        wanted, kept = config.search.num_trials or 0, len(before.settings)
        if wanted > kept == before.search.num_trials and config.search.searcher is None:
            raise ConfigError(
                f"--num-trials {wanted} is more than the {kept} settings that the sweep kept; name its recipe or --settings again"
            )
        return str(before.recipe), Choice(settings=before.settings, excluded=())
    return config.recipe, choose(varied(candidates(config.recipe, target), _axes(run.vary)), target)


def refuse_misspelled(option: str, spelled: Sequence[str], vary: Sequence[str]) -> None:
    """Refuses settings that are wrong for any workload; `given` checks whether the others can be tried."""
    for candidate in _candidates(option, spelled, vary):
        if "num_buckets" not in candidate:  # buckets depend on the workload's lengths
            try:
                CompileSettings.from_dict(candidate)
            except SettingsError as error:
                raise ConfigError(f"{option} {candidate_text(candidate)}: {error}") from None


def given(option: str, spelled: Sequence[str], vary: Sequence[str], target: Target) -> Choice:
    """Returns the settings of an option, crossed with the values of `--vary`; raises ConfigError if one cannot be tried here."""
    chosen = choose(_candidates(option, spelled, vary), target)
    if chosen.excluded:
        raise ConfigError(f"{option} {chosen.excluded[0].candidate}: {chosen.excluded[0].reason}")
    return chosen


def _candidates(option: str, spelled: Sequence[str], vary: Sequence[str]) -> Iterable[Candidate]:
    if not all(map(str.strip, spelled)):
        raise ConfigError(f"{option} '' is not a setting; write it like scope=regional,dynamic=auto")
    return varied((dict(parse_pairs(resolve_name(setting))) for setting in spelled), _axes(vary))


def _axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Parses words such as `group_window=1,100` to values by field."""
    axes: dict[str, list[str]] = {}
    for word in vary:
        name, equals, values = word.partition("=")
        if not (equals and name and all(values.split(","))):
            raise ConfigError(f"--vary {word} is not a field with values; write it like group_window=1,100")
        if name in axes:
            raise ConfigError(f"--vary {name} is given twice; give all its values at once")
        axes[name] = values.split(",")
    return axes


def _cache(asked: str | None, output: Path) -> str | None:
    if HIDDEN in str(asked):
        raise ConfigError(f"the password of {asked} was not written down; give --cache-store again")
    if asked == AUTO:
        base = os.environ.get(mirror.VARIABLE)
        return mirror.below(mirror.normalized(base), "cache") if base else str(output.absolute().parent / "cache")
    if asked is None or asked.startswith(REDIS):
        return asked
    if not asked.strip():
        raise ConfigError(f"--cache-store {asked!r} is not a place; name a folder or a URI, or none")
    from orchestrator.artifacts.object_store import normalized, refuse_no_folder  # loads pyarrow

    location = normalized(asked)
    if "://" not in location:
        refuse_no_folder(location)
    return location
