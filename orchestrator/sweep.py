"""`python -m orchestrator.sweep`: command line and wiring only."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

import analysis
from analysis.formatting import number
from compile_sweep.contract.base import Workload, named_workloads
from compile_sweep.schema import record
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.setting_text import parse_pairs
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.as_workload import ScriptWorkload
from compile_sweep.script.job import ScriptJob
from orchestrator import cli
from orchestrator.config import (
    GIVEN,
    HIDDEN,
    REDIS,
    CachePolicy,
    Device,
    Options,
    Placement,
    SearchConfig,
    SweepConfig,
    check_count,
    check_seed,
    expanded,
)
from orchestrator.config import chosen as chosen_folder
from orchestrator.environment import Environment, fingerprint, git_commit
from orchestrator.guard import scratch_folders
from orchestrator.plan.recipes import find_recipe
from orchestrator.plan.scripts import job_of, script_lines, split_arguments, with_baseline
from orchestrator.plan.space import Choice, Target, build, building, choose, refuse_several_jobs, varied
from orchestrator.run import sweep_folder as folder
from orchestrator.run.stages import Fronts, Stages
from orchestrator.run.sweep_folder import stored_config
from orchestrator.search import Searcher
from orchestrator.search.search_run import learned_for
from orchestrator.storage import mirror
from orchestrator.storage.mirror import Storage
from orchestrator.tracking import Destination, Tracking
from orchestrator.view import printed

NO_CACHE = "none"
"""What `--cache` says for keeping nothing."""

PROG = "python -m orchestrator.sweep"
Value = TypeVar("Value")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return cli.run(lambda: _sweep(*split_arguments(words)))


def _sweep(words: Sequence[str], arguments: Sequence[str] | None) -> int:
    options = cli.parse(Options, PROG, words)
    console = Console(emoji=False)  # a path is printed as it is, whatever stands between two colons
    if options.list:
        from orchestrator.plan.listing import show

        show(console)
        return 0
    environment = fingerprint()
    if options.explain is not None or options.source is not None:
        if options.script is not None:
            raise ConfigError("--explain and --source look at a workload; orchestrator.check --script looks at a script")
        return _one_setting(console, options, environment)
    if not os.environ.get("RAY_ADDRESS"):  # elsewhere workers look at those of their hosts
        scratch_folders.refuse_unfit()
    output = chosen_folder(options)
    kept = _storage(options, output)
    stored = stored_config(output) if options.resume else {}
    device = _device(options, stored, environment)
    job = _job(options, arguments, stored)
    workload = ScriptWorkload(job.seed) if job else _workload(options, stored, device)
    config = _configured(options, stored, workload, device, environment, output)
    if job:
        config = replace(config, script=job.to_dict(), workload=job.name, cache=None, warm_starts=False)
    config = replace(config, storage=kept.uri if kept else None)
    learned = learned_for(config, environment)
    known = (CompileSettings.parse(str(row["settings_key"])) for row in learned.records)
    refuse_several_jobs((*config.settings, *known), workload.job_options)
    if options.dry_run:
        folder.refuse(output, config, environment, to_resume=options.resume)
        done = record.read(output) if options.resume else []
        printed.show_plan(console, config, workload.max_length, done, min_length=workload.min_length)
        return 0
    _check_cache(config)
    tracking = Tracking(config.log_to, output)
    commit = None if job else git_commit(named_workloads().get(config.workload, config.workload))
    with folder.held(output):
        (folder.resume if options.resume else folder.begin)(output, config, environment, commit)
        stages = Stages(
            config=config,
            output=output,
            fronts=_fronts(config),
            max_length=workload.max_length,
            min_length=workload.min_length,
            environment=environment,
            learned=learned,
            tracking=tracking,
        )
        with kept.copying() if kept else nullcontext():
            interrupted = _run(console, config, stages, output, _to_go_on(options, output))
        if kept is not None:
            console.print(f"results: {kept.location}", markup=False, soft_wrap=True)
    return 130 if interrupted else 0


def _to_go_on(options: Options, output: Path) -> str:
    """The command that takes the sweep up again: with what is each run's own, but a budget of time, which did not suffice."""
    words = ["--resume", "--output", str(output)]
    if options.max_concurrent is not None:
        words += ["--max-concurrent", str(options.max_concurrent)]
    left_out = {"--no-confirm": options.no_confirm, "--no-warm-start": options.no_warm_start}
    return f"{PROG} {shlex.join([*words, *(word for word, given in left_out.items() if given)])}"


def _run(console: Console, config: SweepConfig, stages: Stages, output: Path, again: str) -> bool:
    """Runs the sweep, writes its report and tells how it went; returns whether a person stopped it."""
    search = stages.search()
    try:
        interrupted = stages.run(console, search)
    except Exception:
        printed.show_warnings(console, stages.tracking.finish())
        raise
    report = analysis.write_report(output)
    trials = analysis.load(output)
    found = analysis.summary(trials)
    remarks = [*analysis.noisy_steps(trials), *analysis.cache_faults(trials)]
    printed.show_summary(console, _rows(found), found.counts, remarks=remarks)
    if search is not None:
        printed.show_search(console, search.outcome(), search.complaint(), again if stages.left() else None)
    say = partial(console.print, markup=False, soft_wrap=True)  # a path may hold brackets
    if config.script is not None:
        for line in script_lines(ScriptJob.from_dict(config.script), output, [list(row) for row in trials["findings"]]):
            say(line)
    if undone := stages.undone(interrupted=interrupted):
        say(f"{undone}; go on with: {again}")
    printed.show_warnings(console, stages.tracking.finish(report))
    say(f"report: {report}")
    return interrupted


def _storage(options: Options, output: Path) -> Storage | None:
    """The copy of the sweep's folder, which a sweep taken up again is brought back from; None for none."""
    before = stored_config(output) if options.resume else {}
    location = mirror.chosen(options.storage, before, output)
    if location is None:
        return None
    kept = Storage(location, output)
    if options.resume:
        kept.bring_back()
    elif not options.dry_run:
        kept.refuse_another()
    return kept


def _rows(found: analysis.Summary) -> list[printed.SummaryRow]:
    named = {
        "best throughput": found.best,
        "least compile time": found.quickest,
        "knee": found.knee,
        "best eager": found.best_eager,
    }
    return [
        printed.SummaryRow(
            what=what,
            setting=choice.trial["settings_label"],
            samples_per_s=choice.trial["samples_per_s"],
            compile_s=number(choice.trial["compile_s"]),
            cold_equivalent_s=number(choice.trial["cold_equivalent_s"]),
            warm_start_s=number(choice.trial["warm_start_s"]),
            speedup=choice.speedup,
        )
        for what, choice in named.items()
        if choice is not None
    ]


def _device(options: Options, stored: dict[str, Any], environment: Environment) -> Device:
    device = Device(_first(options.device, stored.get("device"), Device.CUDA if environment.gpu else Device.CPU))
    if device is Device.CUDA and not environment.gpu and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError("--device cuda needs a GPU, and none is visible; use cpu, or run on a cluster that has one")
    return device


def _job(options: Options, arguments: Sequence[str] | None, stored: dict[str, Any]) -> ScriptJob | None:
    return job_of(
        options.script,
        arguments,
        in_place=options.in_place,
        seed=_first(options.seed, stored.get("seed"), 0),
        stored=stored.get("script"),
        not_for_scripts={
            "--workload": options.workload,
            "--size": options.size,
            "--pipeline": options.pipeline,
            "--caches": options.caches not in (None, CachePolicy.COLD),
            "--precompile": options.precompile,
        },
    )


def _workload(options: Options, stored: dict[str, Any], device: Device) -> Workload:
    name: str = _first(options.workload, stored.get("workload"), "captioning")
    seed: int = _first(options.seed, stored.get("seed"), 0)
    check_seed(seed)
    size = stored.get("size") if options.size is None else options.size
    return build(name, size, seed, has_gpu=device is Device.CUDA)


def _configured(
    options: Options, stored: dict[str, Any], workload: Workload, device: Device, environment: Environment, output: Path
) -> SweepConfig:
    default = "grid" if options.searcher else "quickstart"
    recipe: str = _first(GIVEN if options.settings else options.recipe, stored.get("recipe"), default)
    search = _search(options, stored.get("search", {}))
    workers: int = _first(options.workers_per_trial, stored.get("workers_per_trial"), 1)
    target = Target.of(workload, has_gpu=device is Device.CUDA, num_workers=workers)
    if options.settings:
        if options.recipe is not None:
            raise ConfigError(f"--settings replaces a recipe's settings; leave out {options.recipe} or --settings")
        chosen = _given("--settings", options.settings, options.vary, target)
    elif options.recipe is None and "settings" in stored:
        if options.vary:
            raise ConfigError("--vary goes with a recipe or --settings; name the one that the sweep to resume began with")
        kept = tuple(CompileSettings.parse(str(key)) for key in stored["settings"])
        if (options.num_trials or 0) > len(kept) == stored.get("search", {}).get("num_trials") and not search.searcher:
            more = f"--num-trials {options.num_trials} is more than the {len(kept)} settings that the sweep kept"
            raise ConfigError(f"{more}; name its recipe or --settings again")
        chosen = Choice(settings=kept, excluded=())
    else:
        chosen = choose(varied(find_recipe(recipe)(target), _axes(options.vary)), target)
    if target.is_script:
        chosen = with_baseline(chosen)
    before = map(CompileSettings.parse, map(str, stored.get("settings", ())))
    refuse_several_jobs((*chosen.settings, *before), workload.job_options)
    pipeline = Pipeline(_first(options.pipeline, stored.get("pipeline"), Pipeline.RESIDENT))
    if pipeline is Pipeline.REAL and type(workload).loader is Workload.loader:
        raise ConfigError(f"--pipeline real needs a loader, and {type(workload).__name__} has none; write one, or use resident")
    num_gpus = environment.num_gpus if device is Device.CUDA else 0
    compile_deadline_s = _first(options.compile_deadline_s, stored.get("compile_deadline_s"), 600.0)
    config = SweepConfig(
        recipe=recipe,
        workload=_first(options.workload, stored.get("workload"), "captioning"),
        size=workload.size,
        settings=chosen.settings if search.searcher else chosen.settings[: options.num_trials],
        excluded=chosen.excluded,
        seed=workload.seed,
        device=device,
        pipeline=pipeline,
        workers_per_trial=workers,
        placement=Placement(_first(options.placement, stored.get("placement"), Placement.PACK)),
        max_concurrent=_first(options.max_concurrent, max(1, num_gpus // max(1, workers))),
        confirm=not options.no_confirm,
        cache=_cache(options, stored, output),
        caches=CachePolicy(_first(options.caches, stored.get("caches"), CachePolicy.COLD)),
        precompile=options.precompile or stored.get("precompile", False),
        warm_starts=not options.no_warm_start,
        time_budget_s=options.time_budget_s,
        compile_deadline_s=compile_deadline_s,
        trial_deadline_s=_trial_deadline_s(options, stored, compile_deadline_s),
        search=search,
        log_to=_log_to(options, stored),
    )
    if num_gpus and workers > num_gpus and not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"--workers-per-trial {workers} needs as many GPUs, and {num_gpus} are visible")
    return config


def _trial_deadline_s(options: Options, stored: dict[str, Any], compile_deadline_s: float) -> float:
    """As asked; as before, unless compiling may take otherwise long now; or what leaves five minutes beside compiling."""
    before: float | None = stored.get("trial_deadline_s") if options.compile_deadline_s is None else None
    return _first(options.trial_deadline_s, before, compile_deadline_s + 300.0)


def _log_to(options: Options, stored: dict[str, Any]) -> tuple[str, ...]:
    """Where trials are logged to, as it means the same in any folder."""
    asked = tuple(chain(*options.log_to)) or tuple(stored.get("log_to", ()))
    return tuple(Destination.parse(text).spelled for text in asked)


def _search(options: Options, stored: dict[str, Any]) -> SearchConfig:
    """How settings are chosen: as asked, or else as the sweep to resume did."""
    asked: dict[str, Any] = {
        "searcher": options.searcher,
        "objectives": tuple(chain(*options.objective)),
        "constraints": tuple(chain(*options.constraint)),
        "stop": options.stop,
        "num_trials": options.num_trials,
        "gpu_budget_s": options.gpu_budget_s,
        "learn_from": tuple(str(expanded("--learn-from", folder).absolute()) for folder in chain(*options.learn_from)),
        "learn_anyway": options.learn_anyway,
    }
    before = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    chosen = {name: before.get(name, value) if value in (None, ()) or value is False else value for name, value in asked.items()}
    if not chosen["searcher"] and (named := [name for name, value in chosen.items() if value and name != "num_trials"]):
        chosen["searcher"] = Searcher.GRID  # their order is kept
        if "learn_from" in named or "learn_anyway" in named:
            raise ConfigError("--learn-from teaches a searcher; name one with --searcher")
    by_default = before.get("prune", bool(options.searcher or options.constraint))
    prune = by_default if options.prune is None else options.prune == "on"
    searcher = Searcher(chosen.pop("searcher")) if chosen["searcher"] else chosen.pop("searcher")
    return SearchConfig(**chosen, searcher=searcher, prune=bool(prune))


def _cache(options: Options, stored: dict[str, Any], output: Path) -> str | None:
    """Where artifacts are kept, as it means the same in any folder; None for nowhere."""
    if options.cache is None and HIDDEN in str(stored.get("cache")):
        raise ConfigError(f"the password of {stored['cache']} was not written down; give --cache again")
    if options.cache is None and "cache" in stored:
        return None if stored["cache"] is None else str(stored["cache"])
    if options.cache is None:
        base = os.environ.get(mirror.VARIABLE)
        return mirror.below(mirror.normalized(base), "cache") if base else str(output.absolute().parent / "cache")
    if not options.cache.strip():
        raise ConfigError(f"--cache {options.cache!r} is no place; name a folder or a URI, or {NO_CACHE}")
    if options.cache == NO_CACHE or options.cache.startswith(REDIS):
        return None if options.cache == NO_CACHE else options.cache
    from orchestrator.artifacts.object_store import normalized, refuse_no_folder  # which loads pyarrow

    location = normalized(options.cache)
    if "://" not in location:
        refuse_no_folder(location)
    return location


def _check_cache(config: SweepConfig) -> None:
    """Refuses a store that does not answer, where trials are to begin with what is in it; others only lose what they made.

    Raises:
        CacheError: it does not, or there is no key to tell by what is ours.
    """
    if config.caches is CachePolicy.COLD or config.cache is None:
        return
    if config.cache.startswith(REDIS):
        from orchestrator.artifacts.redis import environment_for

        environment_for(config.cache)
    else:
        from orchestrator.artifacts import open_store

        open_store(config.cache).manifests()


def _axes(vary: Sequence[str]) -> dict[str, list[str]]:
    """Values by field, from words like `group_window=1,100`."""
    axes: dict[str, list[str]] = {}
    for word in vary:
        name, equals, values = word.partition("=")
        if not (equals and name and all(values.split(","))):
            raise ConfigError(f"--vary {word} is no field with values; write it like group_window=1,100")
        if name in axes:
            raise ConfigError(f"--vary {name} is given twice; give all its values at once")
        axes[name] = values.split(",")
    return axes


def _given(option: str, spelled: Sequence[str], vary: Sequence[str], target: Target) -> Choice:
    if not all(map(str.strip, spelled)):
        raise ConfigError(f"{option} '' is no setting; write it like scope=regional,dynamic=auto")
    chosen = choose(varied((dict(parse_pairs(setting)) for setting in spelled), _axes(vary)), target)
    if chosen.excluded:
        raise ConfigError(f"{option} {chosen.excluded[0].candidate}: {chosen.excluded[0].reason}")
    return chosen


_ALSO_WITH = {"explain": (), "source": ("workers_per_trial",)}
"""Further options that go with looking at one setting."""


def _one_setting(console: Console, options: Options, environment: Environment) -> int:
    """What `--explain` and `--source` do instead of a sweep."""
    spelled, asked = (options.explain, "explain") if options.explain is not None else (options.source, "source")
    for option in fields(Options):
        given = getattr(options, option.name) != option.default
        if given and option.name not in (asked, "workload", "size", "seed", "device", *_ALSO_WITH[asked]):
            word = options.recipe if option.name == "recipe" else f"--{option.name.replace('_', '-')}"
            raise ConfigError(f"--{asked} looks at one setting and runs no sweep; leave out {word}")
    device = _device(options, {}, environment)
    workload = _workload(options, {}, device)
    workers = _first(options.workers_per_trial, 1)
    check_count("workers_per_trial", workers)
    target = Target.of(workload, has_gpu=device is Device.CUDA, num_workers=workers)
    (setting,) = _given(f"--{asked}", [str(spelled)], (), target).settings
    if asked == "source":
        from compile_sweep.harness.prepare import prepare  # torch only where it is needed

        with building():
            model = workload.build_model()
        print(prepare(workload, setting, device, num_workers=workers).source(model), end="")
        return 0
    from orchestrator.view.explain import explain  # only here: a sweep does without

    return explain(setting, _first(options.workload, "captioning"), workload.size, workload.seed, device, console)


def _fronts(config: SweepConfig) -> Fronts:
    """A sweep whose trials share artifacts takes estimates of cold compile times for what they stand for."""
    front_of = analysis.pareto_front if config.caches is CachePolicy.COLD else analysis.expected_front

    def present(output: Path) -> list[str]:
        return list(front_of(analysis.load(output))["settings_key"])

    def hopeful(output: Path) -> list[str]:
        trials = analysis.load(output)
        status = trials["status"].mask(trials["label"] == Label.GPU_SHARED, str(Status.OK))
        return list(front_of(trials.assign(status=status, stable=True))["settings_key"])

    return Fronts(present=present, hopeful=hopeful)


def _first(*values: Value | None) -> Value:
    return next(value for value in values if value is not None)


if __name__ == "__main__":
    sys.exit(main())
