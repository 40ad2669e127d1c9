"""What the sweep's command prints before and after the trials."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import wrapped
from orchestrator.config import CachePolicy, Placement, SweepConfig, shown
from orchestrator.environment import Environment
from orchestrator.plan.estimates import expected_s
from orchestrator.run import remaining
from orchestrator.search.lever_search import Step

_AFTERWARDS = {
    CachePolicy.COLD: "",
    CachePolicy.SHARED: ": compile times are warm, cold ones estimated",
    CachePolicy.AUTO: ": compile times are warm, and the front is measured again cold",
}


def say(console: Console, *lines: str, style: str | None = None, whole: bool = False, hanging: int = 0) -> None:
    """Prints lines, in which text in brackets is no markup; on a terminal, breaks them between words.

    Args:
        whole: Leaves wrapping to the terminal, from which a command is then copied as one line.
        hanging: How much further in a broken line goes on.
    """
    for line in lines:
        shown = "\n".join(wrapped(line, console.width, hanging)) if console.is_terminal and not whole else line
        console.print(shown, style=style, markup=False, highlight=False, soft_wrap=True)


def machine(environment: Environment) -> str:
    """Describes a machine's processors in a few words."""
    if environment.gpu is None:
        return f"{environment.cores} CPU cores"
    return environment.gpu if environment.num_gpus == 1 else f"{environment.num_gpus} × {environment.gpu}"


def show_plan(console: Console, config: SweepConfig, facts: WorkloadFacts, done: Sequence[TrialRecord]) -> None:
    """Prints what would run, what would not and why, and an estimate."""
    left = remaining.left(config, done)
    if config.largest_batch:
        say(console, "each trial also looks for the largest batch; estimates leave that out")
    if config.search.searcher is not None:
        _show_search(console, config, len(left))
        return
    recorded = len({record.settings_key for record in done} - {setting.key for setting in left})
    loader = " with its own loader" if config.pipeline is Pipeline.REAL else ""
    console.print(f"recipe {config.recipe}: {config.workload} ({config.size}){loader}, {len(left)} settings", highlight=False)
    table = Table("setting", "graphs", "expected", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    seconds, alone_s = 0.0, 0.0
    for setting in left:
        seconds += (expected := expected_trial_s(config, setting, facts, done))
        table.add_row(escape(setting.label), str(setting.num_graphs(facts.max_length, facts.min_length)), f"{expected:.0f} s")
    for setting in remaining.baseline_to_repeat(config, done):
        alone_s += (expected := expected_trial_s(config, setting, facts, done))
        table.add_row(f"{escape(setting.label)}, again at the end", "0", f"{expected:.0f} s")
    console.print(table)
    if recorded:
        console.print(f"{recorded} already recorded", highlight=False)
    for reason, count in Counter(excluded.reason for excluded in config.excluded).most_common():
        example = next(excluded.candidate for excluded in config.excluded if excluded.reason == reason)
        say(console, f"excluded {count}, for example {example}: {reason}")
    budget = f", within a budget of {config.time_budget_s:g} s" if config.time_budget_s else ""
    confirming = ", then contended members of the front again, alone" if config.confirm and config.max_concurrent > 1 else ""
    caches = f"starts {config.caches}, artifacts in {shown(config.cache)}" if config.cache else "artifacts are not kept"
    say(console, f"{caches}{_AFTERWARDS[config.caches]}")
    if config.storage:
        say(console, f"results are copied to {shown(config.storage)}")
    if config.placement is Placement.SPREAD:
        console.print("each trial has a host to itself", highlight=False)
    minutes = (seconds / min(config.max_concurrent, max(1, len(left))) + alone_s) / 60
    say(console, f"estimate: {minutes:.1f} min, {_at_once(config)}{confirming}{budget}")


def expected_trial_s(config: SweepConfig, setting: CompileSettings, facts: WorkloadFacts, done: Sequence[TrialRecord]) -> float:
    """Estimates the seconds of a trial before it begins, at most its deadline."""
    return min(expected_s(setting, facts, done, cold=config.caches is CachePolicy.COLD), config.whole_trial_s)


def _at_once(config: SweepConfig) -> str:
    return "one at a time" if config.max_concurrent == 1 else f"{config.max_concurrent} at once"


def _show_search(console: Console, config: SweepConfig, num_left: int) -> None:
    search = config.search
    budgets = [
        f"{search.num_trials} trials" if search.num_trials else "",
        f"{config.time_budget_s:g} s" if config.time_budget_s else "",
        f"{search.gpu_budget_s:g} GPU-seconds" if search.gpu_budget_s else "",
        search.stop or "",
    ]
    aims = search.aims
    told = f", within {', '.join(map(str, search.constraints))}" if search.constraints else ""
    say(
        console,
        f"recipe {config.recipe}: {config.workload} ({config.size}), {num_left} of {len(config.settings)} settings left to "
        "choose from",
        f"searcher {search.searcher}: {', '.join(map(str, aims.objectives))}{told}",
        f"until {' or '.join(filter(None, budgets)) or 'all have been tried'}, {_at_once(config)}, trials are "
        f"{'' if search.prune else 'not '}stopped early",
    )


def show_steps(console: Console, steps: Sequence[Step]) -> None:
    """Prints the settings that a search would try first, with the reason for each and the seconds it would take."""
    table = Table("first", "expected", "why", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for step in steps:
        table.add_row(escape(step.setting.label), f"{step.seconds:.0f} s", escape(step.reason))
    console.print(table)
    seconds = sum(step.seconds for step in steps)
    console.print(f"estimate: {seconds / 60:.1f} min for these; later ones depend on their results", highlight=False)


def show_ending(
    console: Console,
    sentences: Sequence[str],
    settings: Sequence[tuple[str, ...]],
    counts: Mapping[Status, int],
    *,
    remarks: Sequence[str] = (),
) -> None:
    """Prints what to do, the settings worth naming, how many trials ended how, and further remarks."""
    first, *others = sentences
    console.print()
    say(console, first, style="bold")
    say(console, *others)
    if settings:
        console.print()
        _show_named(console, settings)
        console.print()
    always = (Status.OK, Status.INFEASIBLE, Status.FAILED)
    ended = ", ".join(f"{counts.get(status, 0)} {status}" for status in Status if status in always or counts.get(status))
    console.print(f"trials: {ended}", highlight=False)
    say(console, *remarks)


def _show_named(console: Console, settings: Sequence[tuple[str, ...]]) -> None:
    headings = ("", "setting", "saves (95%)", "compile", "memory")
    widths = [max(map(len, cells)) for cells in zip(headings, *settings, strict=True)]
    if sum(widths) + 2 * len(widths) <= console.width:
        table = Table(*headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for row in settings:
            table.add_row(*map(escape, row))
        console.print(table)
        return
    names = ("saves", "compiles in", "memory")
    for what, setting, *figures in settings:
        known = [f"{name} {figure}" for name, figure in zip(names, figures, strict=True) if figure != "—"]
        say(console, f"{what}: {setting}", f"  {', '.join(known)}")


def show_commands(console: Console, commands: Mapping[str, str]) -> None:
    """Prints what to do next: each command to copy, and what it is for, above it if there is no room beside it."""
    width = max(map(len, commands.values()), default=0)
    fits = width + max(map(len, commands), default=0) + 6 <= console.width
    console.print("next:", highlight=False)
    for purpose, command in commands.items():
        lines = [f"  {command:{width}}  # {purpose}"] if fits else [f"  # {purpose}", f"  {command}"]
        say(console, *lines, whole=True)


def show_rest(console: Console, undone: str | None, again: str) -> None:
    """Prints the command that continues, and what it would do first if that is not the search that was just described."""
    words = f"{undone or 'some settings were not tried'}; go on with:"
    if console.is_terminal and len(words) + len(again) >= console.width:
        say(console, words)
        say(console, f"  {again}", whole=True)
    else:
        say(console, f"{words} {again}", whole=True)


def show_warnings(console: Console, complaints: Iterable[str]) -> None:
    """Prints problems that did not end the sweep, with brackets escaped, since libraries and paths may contain them."""
    for complaint in complaints:
        say(console, f"warning: {complaint}")
