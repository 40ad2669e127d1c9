"""`python -m orchestrator.sweep`: command line and wiring only."""

from __future__ import annotations

if __name__ == "__main__":  # before imports that fail without the extra `run`
    from orchestrator.cli import exit_without_extra

    exit_without_extra("sweep")

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from compile_sweep import command_help, command_line
from compile_sweep.command_line import STOPPED
from compile_sweep.contract.workload_names import find_workload, is_in_users_folder
from compile_sweep.own_packages import find_own_packages
from compile_sweep.schema import record
from compile_sweep.schema.errors import ConfigError, SweepFolderError
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from orchestrator.config import AUTO, REDIS, CachePolicy, Device, Run, SearchConfig, SweepCommand, SweepConfig, shown
from orchestrator.environment import Environment, fingerprint, git_commit
from orchestrator.guard import scratch_folders
from orchestrator.guard.machine_state import machine_state
from orchestrator.plan.describer import DEADLINE_S, Describer
from orchestrator.plan.resolve import device_of, folder_of, given, refuse_misspelled, resolve, with_settings
from orchestrator.plan.scripts import findings_lines, job_of, library_equivalents, parse_own, script_facts, split_arguments
from orchestrator.plan.space import Target, refuse_several_jobs
from orchestrator.run import sweep_folder as folder
from orchestrator.run.stages import Fronts, Stages
from orchestrator.run.sweep_folder import record_poison, withdrawn_if_ended_in_order
from orchestrator.search import Searcher
from orchestrator.search.search_run import learned_for, planned_steps
from orchestrator.storage import mirror
from orchestrator.storage.mirror import Storage
from orchestrator.tracking import Tracking
from orchestrator.view import printed
from orchestrator.view.printed import say
from orchestrator.view.report_server import served_report

if TYPE_CHECKING:
    from analysis.final_summary import Ending

PROG = "python -m orchestrator.sweep"


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code."""
    find_own_packages("analysis")

    def swept() -> int:
        with command_line.optional_output():  # the results are in the sweep's folder
            return _sweep(prog, *split_arguments(command_line.words_of(arguments)))

    return command_line.run(swept)


def _sweep(prog: str, words: Sequence[str], arguments: Sequence[str] | None) -> int:
    console = Console(emoji=False)  # prints paths unchanged, whatever is between two colons
    begun = (
        _begun(command_line.parse_known(Run, prog, words))
        if "--resume" in words and not set(command_help.WORDS).intersection(words)
        else None
    )
    default = SweepCommand(sweep=begun.config.to_resume()) if begun and begun.config else None
    command = parse_own(SweepCommand, prog, words, arguments, default=default)
    config, run = command.sweep, command.run
    if run.list:
        from orchestrator.plan.listing import show

        with Describer() as describer:
            show(console, describer)
        return 0
    environment = fingerprint()
    if _asked(run) is not None:
        if run.script is not None:
            raise ConfigError(f"--{_asked(run)} looks at a workload; orchestrator.check --script looks at a script")
        return _one_setting(console, command, environment)
    if not os.environ.get("RAY_ADDRESS"):  # in a cluster, workers check those of their hosts
        scratch_folders.check_temp_folder()
    output = begun.output if begun else folder_of(config, run)
    kept = begun.storage if begun else _storage(run.storage, output)
    device = device_of(config, environment, only_plans=run.dry_run)
    before = begun.config if begun else None
    job = _job(command, arguments, before)
    if before is not None and job is None:  # before another workload is asked for what only this one has
        folder.refuse_other(output, "workload", config.workload, before.workload)
    config = resolve(config, run, before=before, environment=environment, output=output)
    with _describer(config, job, console) as describer:
        if kept is not None and not run.resume and not run.dry_run:
            kept.refuse_another()
        target = _target(describer, config, device, job)
        config = with_settings(config, run, before=before, target=target)
        if job:
            config = replace(config, script=job.to_dict(), workload=job.name, cache=_cache_of_scripts(config), warm_starts=False)
        elif not run.dry_run:
            about = {"workload": config.workload, "size": target.size, "seed": config.seed, "has_gpu": device is Device.CUDA}
            describer.ask("first_step", **about)
            policies = (setting.shape_policy(target.max_length) for setting in config.settings)
            if any(policy.padded(target.min_length) > target.min_length for policy in policies):
                say(console, *describer.ask("padding", **about))
        config = replace(config, storage=kept.uri if kept else None)
        learned = learned_for(config, environment)
        known = (CompileSettings.parse(str(row["settings_key"])) for row in learned.records)
        refuse_several_jobs((*config.settings, *known), target.job_options)
    if run.dry_run:
        done = folder.refuse(output, config, environment, to_resume=run.resume)
        printed.show_plan(console, config, target, done)
        if config.search.searcher is Searcher.LEVERS:
            printed.show_steps(console, planned_steps(config, target, done))
        return 0
    _check_cache(config)
    tracking = Tracking(config.log_to, output)
    commit = None if target.folder is None else git_commit(target.folder)
    with folder.held(output):
        (folder.resume if run.resume else folder.begin)(output, config, environment, commit)
        say(console, *record.recover(output), *record_poison(output, config))
        if not os.environ.get("RAY_ADDRESS"):  # in a cluster, trials run on other hosts
            printed.show_warnings(console, machine_state(output, use_gpu=device is Device.CUDA).warnings())
        stages = Stages(
            config=config,
            output=output,
            fronts=_fronts(config),
            facts=target,
            environment=environment,
            learned=learned,
            tracking=tracking,
        )
        serving = served_report(output, partial(say, console, whole=True)) if run.serve else nullcontext()
        with kept.copying() if kept else nullcontext(), withdrawn_if_ended_in_order(output), serving:
            interrupted = _run(console, config, stages, output, _to_go_on(prog, command.sweep, output))
        if kept is not None:
            console.print(f"results: {kept.location}", markup=False, soft_wrap=True)
    return STOPPED if interrupted else 0


def _describer(config: SweepConfig, job: ScriptJob | None, console: Console) -> Describer:
    """Starts the process that answers questions about the workload, and says so, because it takes seconds."""
    if job:
        say(console, f"planning a sweep of {job.given} …")
        return Describer()
    find_workload(config.workload)
    deadline_s = max(config.whole_trial_s, DEADLINE_S)
    describer = Describer(with_current_folder=is_in_users_folder(config.workload), deadline_s=deadline_s)
    describer.start()
    say(console, f"reading workload {config.workload} …")
    return describer


def _target(describer: Describer, config: SweepConfig, device: Device, job: ScriptJob | None) -> Target:
    has_gpu = device is Device.CUDA
    machine: dict[str, Any] = {"has_gpu": has_gpu, "num_workers": config.workers_per_trial, "torch": describer}
    if job:
        return Target.of(script_facts(job), **machine)
    size = None if config.size == AUTO else config.size
    facts = describer.facts(config.workload, size, config.seed, has_gpu=has_gpu)
    about = {"workload": config.workload, "size": facts.size, "seed": config.seed, "has_gpu": has_gpu}
    return Target.of(facts, **machine, foreach_map_refusal=lambda: describer.ask("foreach_map_refusal", **about))


def _job(command: SweepCommand, arguments: Sequence[str] | None, before: SweepConfig | None) -> ScriptJob | None:
    config, run = command.sweep, command.run
    usual = before or SweepConfig()
    words = command_line.flags(SweepConfig)
    return job_of(
        run.script,
        arguments,
        in_place=run.in_place,
        compile_loss=run.compile_loss,
        batch_argument=run.batch_arg,
        seed=config.seed,
        stored=before.script if before else None,
        not_for_scripts={
            words[name]: getattr(config, name) != getattr(usual, name)
            for name in ("workload", "size", "pipeline", "precompile", "largest_batch")
        },
    )


class _Begun(NamedTuple):
    """A sweep to continue."""

    output: Path
    storage: Storage | None  # the copy of its folder, from which missing files have been copied back
    config: SweepConfig | None  # None if neither the folder nor its copy has a sweep yet


def _begun(run: Run) -> _Begun | None:
    if _asked(run) is not None or run.list:  # these start no sweep
        return None
    output = folder_of(SweepConfig(), run)
    before = folder.stored_config(output)
    location = before.storage if run.storage == AUTO and before is not None else run.storage
    kept = _storage(location, output)
    if kept is not None:
        kept.bring_back()
        before = folder.stored_config(output)
    elif before is None:  # a job that copies its results may be restarted before it had any
        raise SweepFolderError(
            f"--resume continues the sweep in {output}, and there is none; name its folder with --output, or leave --resume "
            "out to start one"
        )
    return _Begun(output, kept, before)


def _storage(location: str | None, output: Path) -> Storage | None:
    chosen = mirror.chosen(location, output)
    return None if chosen is None else Storage(chosen, output)


def _to_go_on(prog: str, asked: SweepConfig, output: Path) -> str:
    """Returns the command that resumes the sweep, with the options of this run except a time budget, which did not suffice."""
    words = ["--resume", "--output", str(output)]
    if asked.max_concurrent:
        words += ["--max-concurrent", str(asked.max_concurrent)]
    left_out = {"--no-confirm": not asked.confirm, "--no-warm-start": not asked.warm_starts}
    return f"{prog} {shlex.join([*words, *(word for word, given in left_out.items() if given)])}"


def _run(console: Console, config: SweepConfig, stages: Stages, output: Path, again: str) -> bool:
    """Runs the sweep, writes its report and prints the results; returns whether a person stopped it."""
    search, description = stages.search(), (output / record.SWEEP_FILE).read_bytes()
    try:
        interrupted = stages.run(console, search)
    except Exception:
        printed.show_warnings(console, stages.tracking.finish())
        raise
    printed.show_warnings(console, folder.put_back(output, description))
    import analysis  # a user's package of that name no longer hides it
    from analysis.final_summary import ending

    report = analysis.write_report(output)
    if (failure := stages.script_failure) is not None:
        printed.show_warnings(console, stages.tracking.finish(report))
        raise ConfigError(
            f"{config.workload} cannot be measured as it is, and so with no setting: {failure}; its whole output is in "
            f"{output / folder.LOGS}"
        )
    trials = analysis.load(output)
    ended = ending(output)
    slow = [f"not faster: {why}" for why in analysis.why_none_is_faster(trials)]
    remarks = [*analysis.unused_gains(trials), *slow, *analysis.noisy_steps(trials), *analysis.cache_faults(trials)]
    printed.show_ending(console, ended.sentences, ended.named, analysis.summary(trials).counts, remarks=remarks)
    if search is not None:
        say(console, *filter(None, (search.outcome(), search.complaint())))
    if config.script is not None:
        say(console, *findings_lines(dict(zip(trials["settings_key"], trials["findings"], strict=True))))
    undone = stages.undone(interrupted=interrupted)
    if undone or (search is not None and stages.left()):
        printed.show_rest(console, undone, again)
    printed.show_warnings(console, stages.tracking.finish(report))
    printed.show_commands(console, _next(config, output, ended, again))
    say(console, f"report: {report}")
    return interrupted


def _next(config: SweepConfig, output: Path, ended: Ending, again: str) -> dict[str, str]:
    """Returns commands for the next steps that work with what the sweep found, by purpose."""
    folder = shlex.quote(str(output))
    commands: dict[str, str] = {}
    if ended.settings_key is not None:
        if ended.training_command is None:
            commands["this setting as a program"] = f"compile-sweep export {folder}"
        else:
            commands["trains with this setting"] = ended.training_command
            commands |= library_equivalents(ScriptJob.from_dict(config.script or {}), ended.settings_key)
    if ended.finer_check is not None:
        commands["compares its gradients with eager's, which its random numbers hide"] = (
            f"{again} --settings {shlex.quote(ended.finer_check)}"
        )
    if ended.is_known:
        commands["for another length of the job"] = f"compile-sweep recommend {folder} --steps 1M"
    return commands | {"as a page, also while a sweep runs": f"compile-sweep report {folder} --watch"}


def _cache_of_scripts(config: SweepConfig) -> str | None:
    """Returns where the artifacts of a script's trials are kept."""
    if config.cache is None or not config.cache.startswith(REDIS):
        return config.cache
    if config.caches is not CachePolicy.COLD:
        raise ConfigError(f"--cache-store {shown(config.cache)} is for workloads; for a script, name a folder, s3://… or gs://…")
    return None


def _check_cache(config: SweepConfig) -> None:
    """Refuses a store that does not answer if trials start from its contents; other trials only lose what they made."""
    if config.caches is CachePolicy.COLD or config.cache is None:
        return
    if config.cache.startswith(REDIS):
        from orchestrator.artifacts.redis import environment_for

        environment_for(config.cache)
    else:
        from orchestrator.artifacts import open_store

        open_store(config.cache).manifests()


_ALSO_WITH = {"explain": (), "bisect": (), "source": ("workers_per_trial",)}
"""Options that look at one setting, and the other options allowed with each."""


def _asked(run: Run) -> str | None:
    return next((option for option in _ALSO_WITH if getattr(run, option) is not None), None)


def _one_setting(console: Console, command: SweepCommand, environment: Environment) -> int:
    config, run = command.sweep, command.run
    asked = _asked(run) or ""
    spelled = getattr(run, asked)
    allowed = (asked, "workload", "size", "seed", "device", *_ALSO_WITH[asked])
    for said, usual in ((config, SweepConfig()), (config.search, SearchConfig()), (run, Run())):
        for name in (field.name for field in fields(said) if field.name not in (*allowed, "search")):
            if getattr(said, name) != getattr(usual, name):
                word = config.recipe if name == "recipe" else command_line.flags(type(said))[name]
                raise ConfigError(f"--{asked} looks at one setting and runs no sweep; leave out {word}")
    device = device_of(config, environment)
    refuse_misspelled(f"--{asked}", [str(spelled)], ())
    if asked != "source":
        scratch_folders.check_temp_folder()
    else:  # the output is to be pasted, so only a person at a terminal sees the wait
        console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with ExitStack() as undo:
        describer = undo.enter_context(_describer(config, None, console))
        if asked == "source":
            target, setting = _given_one(describer, config, device, asked, spelled)
            about = {"workload": config.workload, "size": target.size, "seed": config.seed, "has_gpu": target.has_gpu}
            spelled_out = {"settings": setting.key, "device": str(device), "num_workers": config.workers_per_trial}
            print(describer.ask("source", **about, **spelled_out), end="")
            return 0
        from orchestrator.run.local_runner import server_alone  # imported here, because a sweep does not need these
        from orchestrator.view.explain import Subject, bisect, explain

        servers = undo.enter_context(closing(server_alone(config.workload, use_gpu=device is Device.CUDA)))
        target, setting = _given_one(describer, config, device, asked, spelled)
        describer.close()
        look = bisect if asked == "bisect" else explain
        subject = Subject(settings=setting, workload_name=config.workload, workload=target, seed=config.seed, device=device)
        return look(subject, console, servers)


def _given_one(
    describer: Describer, config: SweepConfig, device: Device, asked: str, spelled: object
) -> tuple[Target, CompileSettings]:
    target = _target(describer, config, device, None)
    (setting,) = given(f"--{asked}", [str(spelled)], (), target).settings
    return target, setting


def _fronts(config: SweepConfig) -> Fronts:
    """Returns front functions; a sweep whose trials share artifacts trusts estimates of cold compile times."""
    import analysis

    front_of = analysis.pareto_front if config.caches is CachePolicy.COLD else analysis.expected_front

    def present(output: Path) -> list[str]:
        return list(front_of(analysis.load(output))["settings_key"])

    def hopeful(output: Path) -> list[str]:
        trials = analysis.load(output)
        status = trials["status"].mask(trials["label"] == Label.GPU_SHARED, str(Status.OK))
        return list(front_of(trials.assign(status=status, stable=True))["settings_key"])

    return Fronts(present=present, hopeful=hopeful, baseline=lambda output: analysis.baseline_key(analysis.load(output)))


if __name__ == "__main__":
    sys.exit(main())
