"""`python -m orchestrator.check WORKLOAD`: does a workload work in a sweep, what is found in it, and what would a sweep cost?

Each scope runs in a fresh process with empty caches, for only a few steps: times are rough, findings are not. If batches differ
in length, dimensions are marked first; if that does not work, the other strategies of a sweep are tried.
"""

if __name__ == "__main__":  # before imports that fail without the extra `run`
    from orchestrator.cli import exit_without_extra

    exit_without_extra("check")

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro
from rich.console import Console

from compile_sweep import command_line
from compile_sweep.command_line import Flag
from compile_sweep.contract.workload_names import find_workload, is_in_users_folder
from compile_sweep.harness.diagnostics.advice import KnownSizes, short_findings
from compile_sweep.schema.causes.slowness import why_not_faster
from compile_sweep.schema.errors import ConfigError, WorkloadError
from compile_sweep.schema.outcome import Label, Status
from compile_sweep.schema.record import TrialRecord, largest_batch_text, largest_fitting
from compile_sweep.schema.settings import CompileSettings, Dynamic, Scope
from compile_sweep.schema.visible_text import ratio_text
from orchestrator.config import Device, Effort, check_seed
from orchestrator.environment import fingerprint
from orchestrator.guard.scratch_folders import check_temp_folder
from orchestrator.plan.describer import Describer
from orchestrator.plan.estimates import expected_s
from orchestrator.plan.recipes import ARGUMENTS_FOLLOW, AUTO_RECIPE, RECIPES, candidates
from orchestrator.plan.resolve import refuse_largest_batch
from orchestrator.plan.scripts import job_of, parse_own, split_arguments
from orchestrator.plan.space import Target, choose
from orchestrator.run.forked_attempt import Servers
from orchestrator.view.explain import DEADLINE_S, Subject, measured_alone
from orchestrator.view.printed import say
from orchestrator.view.script_check import SCRIPT_BUDGET_S, TimeBudget, check_script

PROG = "python -m orchestrator.check"

SHORT = {"compared_steps": 4, "min_passes": 2, "max_passes": 2, "min_window_s": 0.0, "cpu_window_s": 0.0}
"""Fields of `compile_sweep.harness.measure.Protocol`."""

_NOT_OF_LENGTHS = (Label.SILENT_FALLBACK, Label.RECOMPILE_LIMIT)
"""What dynamic=static, which fixes lengths and numbers, does not mend where batches are of one shape."""

_STEADY_S = {Device.CPU: 15.0, Device.CUDA: 8.0}  # additional seconds of a sweep's window and comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Run a training script or a workload eagerly and under each scope; say what was found and what a sweep would cost."""

    workload: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="WORKLOAD")] = None
    """A built-in workload's name, or package.module:Class or path/to/file.py:Class for your own."""
    script: str | None = None
    """A training script, or a module as for python -m, to check instead of a workload; its arguments follow after --."""
    in_place: Flag = False
    """Run the script in its own folder, which keeps the files that it writes, instead of in a copy made of links."""
    size: str | None = None
    """One of the workload's sizes; by default the first one with a GPU and the last one without."""
    device: Device | None = None
    """cpu or cuda; by default cuda if this machine has a GPU."""
    scopes: tuple[Scope, ...] = (Scope.EAGER, Scope.FULL, Scope.REGIONAL, Scope.MODULAR)
    """Scopes to try."""
    backend: str | None = None
    """A torch.compile backend other than Inductor; aot_eager is quick and still finds breaks and recompiles."""
    time_budget_s: float | None = None
    """Seconds to spend on a script, 100 by default; the output says what was left out."""
    largest_batch: Flag = False
    """Only look for the largest batch that fits the GPU's memory, eagerly and with scope=full, or under the scopes named."""
    seed: int = 0
    """Seed for weights and data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The result of one setting."""

    settings: CompileSettings
    wall_s: float
    verdict: str  # empty if nothing is wrong
    label: Label | None = None
    measurement: Mapping[str, Any] | None


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code: 0 if every scope works under some strategy for lengths, else 1."""
    own, arguments = split_arguments(command_line.words_of(arguments))
    own = [word.removeprefix("--workload=") for word in own if word != "--workload"]  # as a sweep takes the name
    return command_line.run(lambda: _check(parse_own(Options, prog, own, arguments), arguments))


def _check(options: Options, arguments: Sequence[str] | None) -> int:
    began = time.monotonic()
    console = Console(soft_wrap=True, markup=False, highlight=False)
    environment = fingerprint()
    device = options.device or (Device.CUDA if environment.gpu else Device.CPU)
    if device is Device.CUDA and not environment.gpu:
        raise ConfigError("--device cuda needs a GPU, and none is visible; use cpu")
    check_seed(options.seed)
    check_temp_folder()
    if (job := job_of(options.script, arguments, in_place=options.in_place, seed=options.seed)) is not None:
        if options.largest_batch:
            raise ConfigError("--largest-batch looks at a workload, and a script makes its own batches; leave it out")
        if options.workload is not None:
            hint = ARGUMENTS_FOLLOW.format(word=options.workload) if arguments is None else "leave one of them out"
            raise ConfigError(f"--script takes the place of the workload {options.workload}; {hint}")
        budget_s = SCRIPT_BUDGET_S if options.time_budget_s is None else options.time_budget_s
        if not 0 < budget_s < float("inf"):
            raise ConfigError(f"--time-budget-s {budget_s:g} is not an amount of time; use a number of seconds above 0")
        return check_script(job, device, options.backend, TimeBudget(budget_s, began + budget_s), console)
    if options.time_budget_s is not None:
        raise ConfigError("--time-budget-s is for a script; name one with --script FILE, or leave it out")
    if options.workload is None:
        raise ConfigError("name a workload, or a script with --script FILE")
    find_workload(options.workload)
    with Describer(with_current_folder=is_in_users_folder(options.workload)) as describer:
        describer.start()
        about: dict[str, Any] = {"workload": options.workload, "seed": options.seed, "has_gpu": device is Device.CUDA}
        target = Target.of(describer.facts(size=options.size, **about), has_gpu=device is Device.CUDA, torch=describer)
        _to_try(options, target, has_regions=target.has_blocks is not False, pads=True)  # refuses what cannot be tried at all
        console.print(f"{options.workload} ({target.size}) on {device}", style="bold")
        if options.largest_batch:
            return _show_largest_batch(options, describer, target, about, device, console)
        describer.ask("first_step", size=target.size, **about)
        model = describer.ask("model", size=target.size, **about)
        _say_below(console, model["lines"])
        padding_lines, works = _padding(describer, target, about)
        _say_below(console, padding_lines)
        said = {*model["lines"], *padding_lines}
        to_try = _to_try(options, target, has_regions=model["has_regions"], pads=works)
        recipes = _recipes(target)  # asks the describer, which would otherwise start again after the trials
    tried: list[Tried] = []
    with closing(Servers(imports_workload=True)) as servers:
        for strategies in to_try:
            of_scope: list[Tried] = []
            for settings in strategies:
                console.print(f"\n{settings.label}", style="bold")
                with console.status("starting") as status:  # moves on a terminal, and prints nothing elsewhere
                    of_scope.append(_try(settings, options, target, device, servers, status.update))
                found = _findings(of_scope[-1], target, of_scope[:-1])
                _say_below(console, [line for line in found if line not in said])
                if of_scope[-1].verdict == "" or (target.has_one_shape and of_scope[-1].label in _NOT_OF_LENGTHS):
                    break
            tried += of_scope
            works = works and of_scope[-1].verdict == ""
            if len(of_scope) > 1:
                _say_below(console, [f"scope={of_scope[0].settings.scope}: {_which_works(of_scope)}"])
    console.print("\na sweep", style="bold")
    _say_below(console, _costs(recipes, tried, target, device))
    return 0 if works else 1


def _say_below(console: Console, lines: Iterable[str]) -> None:
    """Prints lines below a heading; on a terminal, they break between words and go on further in."""
    say(console, *(f"  {line}" for line in lines), hanging=2)


def _show_largest_batch(
    options: Options, describer: Describer, target: Target, about: Mapping[str, Any], device: Device, console: Console
) -> int:
    """Looks for the largest batch that fits; returns the command's exit code, 0 if some size fits under every scope."""
    refuse_largest_batch(device, target)
    scopes = options.scopes if options.scopes != Options().scopes else (Scope.EAGER, Scope.FULL)
    to_try = _to_try(replace(options, scopes=scopes), target, has_regions=target.has_blocks is not False, pads=True)
    all_fit = True
    for strategies in to_try:
        settings = strategies[-1]
        console.print(f"\n{settings.label}", style="bold")
        tried = describer.ask("largest_batch", size=target.size, settings=settings.key, device=str(device), **about)
        peaks = {str(one["batch_size"]): one["peak_memory_bytes"] for one in tried}
        _say_below(console, [largest_batch_text(peaks, target.batch_size)])
        all_fit = all_fit and largest_fitting(peaks) is not None
    return 0 if all_fit else 1


def _padding(describer: Describer, target: Target, about: Mapping[str, Any]) -> tuple[Sequence[str], bool]:
    """Returns what to say of padding, and whether it leaves the training result unchanged."""
    try:
        return describer.ask("padding", size=target.size, **about), True
    except WorkloadError as error:
        rest = "a sweep refuses this workload; what follows is tried on batches as they come"
        return [f"not right: {error}", rest], False


def _which_works(tried: Sequence[Tried]) -> str:
    refused = " and ".join(str(one.settings.dynamic) for one in tried if one.verdict)
    if tried[-1].verdict:
        return f"works with none of dynamic={refused}"
    return f"works with dynamic={tried[-1].settings.dynamic}, not with {refused}"


def _to_try(options: Options, target: Target, *, has_regions: bool, pads: bool) -> list[Sequence[CompileSettings]]:
    """Returns, for each scope, the strategies for lengths that a sweep would try, until one works."""
    to_try: list[Sequence[CompileSettings]] = []
    known: set[str] = set()
    for scope in options.scopes:
        if scope in (Scope.REGIONAL, Scope.NESTED) and not has_regions:
            continue
        compiled = scope is not Scope.EAGER
        backend = {"backend": options.backend} if compiled and options.backend else {}
        as_they_come = {"pad_multiple": 1} if not pads else {}
        if not compiled:
            strategies = [{"padding": "longest", **as_they_come}] if not pads else [{}]
        else:
            strategies = [{"dynamic": name, **as_they_come} for name in _strategies(target, pads=pads)]
        chosen = choose([{"scope": scope, **strategy, **backend} for strategy in strategies], target)
        if not chosen.settings:
            raise ConfigError(f"{chosen.excluded[0].candidate}: {chosen.excluded[0].reason}")
        if chosen.settings[0].key not in known:  # if a workload steps by itself, several scopes can be the same
            to_try.append(chosen.settings)
        known |= {one.key for one in chosen.settings}
    return to_try


def _strategies(target: Target, *, pads: bool) -> list[str]:
    if target.has_one_shape:
        return ["auto", "static"]
    return ["mark", "auto", *(["static"] if pads and target.unpadded_reason is None else [])]


def _try(
    settings: CompileSettings,
    options: Options,
    target: Target,
    device: Device,
    servers: Servers,
    on_phase: Callable[[str], None],
) -> Tried:
    began = time.monotonic()
    subject = Subject(settings=settings, workload_name=str(options.workload), workload=target, seed=options.seed, device=device)
    assignment, attempt, _ = measured_alone(
        subject,
        servers,
        on_phase=lambda elapsed_s, phase: on_phase(f"{phase}, {elapsed_s:.0f} s in"),
        trial_deadline_s=DEADLINE_S,
        protocol=SHORT,
    )
    verdict = attempt.verdict(assignment)
    reason = verdict.reason or "" if attempt.figures is None else f"{verdict.label}: {verdict.reason}"
    return Tried(
        settings=settings,
        wall_s=time.monotonic() - began,
        verdict=reason if verdict.label is not None else "",
        label=verdict.label,
        measurement=attempt.figures,
    )


def _findings(tried: Tried, target: Target, failed: Sequence[Tried] = ()) -> Iterator[str]:
    found = tried.measurement
    if found is None:
        yield f"does not work: {tried.verdict}"
        return
    yield "works" if not tried.verdict else f"do not use: {tried.verdict}"
    speed = f", {ratio_text(found['speedup_eager'])} times as fast as eager" if found["speedup_eager"] else ""
    compiles = "" if tried.settings.scope is Scope.EAGER else f"; compiles for {found['compile_s']:.1f} s"
    yield f"about {found['step_ms_median']:.3g} ms a step{speed}{compiles}"
    yield from found["findings"]
    if tried.settings.scope is Scope.EAGER:
        return
    yield f"graphs: {found['graphs']}"
    for reason in why_not_faster(found, found["speedup_eager"], tried.settings.backend):
        yield f"not faster: {reason}"
    sizes = KnownSizes(
        settings=tried.settings,
        max_length=target.max_length,
        batch_size=target.batch_size,
        mark_fails=any(one.settings.dynamic is Dynamic.MARK for one in failed),
    )
    for line in short_findings(found, sizes):
        if line.removeprefix("  → ") == line or line.removeprefix("  → ") not in tried.verdict:  # the verdict has said it
            yield line


def _recipes(target: Target) -> dict[str, Sequence[CompileSettings]]:
    """Returns the settings of each recipe that suits the workload but `auto`, which tries a few candidates within its time."""
    unsuited = {AUTO_RECIPE, *(("inference", "generation") if target.trains else ())}
    unsuited |= {"captioning"} if target.workload != "Captioning" else set()
    unsuited |= {"vision"} if target.memory_format is None else set()
    return {name: choose(candidates(name, target), target).settings for name in RECIPES if name not in unsuited}


def _costs(
    recipes: Mapping[str, Sequence[CompileSettings]], tried: Sequence[Tried], target: Target, device: Device
) -> Iterator[str]:
    """Yields the estimated duration of each recipe, based on the scopes that were tried, the default one first."""
    effort = Effort.STANDARD if device is Device.CUDA else Effort.QUICK
    yield f"{AUTO_RECIPE}, the default: what is worth trying here, for {effort.seconds / 60:.0f} min or as long as --effort says"
    done = [
        TrialRecord(
            trial_id=str(one.settings.scope),
            settings=one.settings.to_dict(),
            settings_key=one.settings.key,
            status=Status.OK,
            wall_s=one.wall_s + _STEADY_S[device],
            compile_s=one.measurement["compile_s"],
        )
        for one in tried
        if one.measurement is not None
    ]
    for name, chosen in recipes.items():
        minutes = sum(expected_s(settings, target, done) for settings in chosen) / 60
        words = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
        yield f"{name}: {len(chosen)} setting{'s' if len(chosen) != 1 else ''}, about {words} one after another"


if __name__ == "__main__":
    sys.exit(main())
