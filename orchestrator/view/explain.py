"""`--explain`, `--bisect`: run a setting in a fresh process, without Ray, and say what the compiler made of it and what helps."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_measurement
from compile_sweep.schema.outcome import Verdict
from compile_sweep.schema.redact import redact_text
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.run.forked_attempt import Servers
from orchestrator.run.local_runner import attempt_alone, plan_alone
from orchestrator.run.trial import Attempt
from orchestrator.run.trial_spec import Assignment
from orchestrator.view.printed import say

COMPILE_DEADLINE_S = 900.0
"""Seconds that the warm-up, compiles included, may take: more than in a sweep, since there is only one setting."""

DEADLINE_S = 1800.0  # seconds that the whole measurement may take
_LOG_LINES = 15  # number of lines of the measured process's output that are shown if it returned no measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One setting to look at, outside any sweep."""

    settings: CompileSettings
    workload_name: str
    workload: WorkloadFacts
    seed: int
    device: Device


def explain(subject: Subject, console: Console, servers: Servers) -> int:
    """Measures the setting and prints the findings; returns exit code 0 if there is a measurement, otherwise 1."""
    print_subject(subject, console)
    measured = partial(
        measured_alone,
        subject,
        servers,
        on_phase=partial(_say_phase, console),
        trial_deadline_s=DEADLINE_S,
        explains=True,
    )
    assignment, attempt, log = measured(spares_repeats=True)
    if (found := attempt.figures) is not None and found["graphs_without_code"] and not found["recompile_limit_hits"]:
        console.print(
            "graphs that repeat others are in use; measuring again, with code for them …", markup=False, highlight=False
        )
        assignment, attempt, log = measured()
    told = [_judged(attempt.verdict(assignment))]
    _say(console, "verdict", told)
    if attempt.figures is None:
        _say(console, "the end of its output", log.splitlines()[-_LOG_LINES:])
        return 1
    settings, facts = subject.settings, subject.workload
    sizes = KnownSizes(settings=settings, max_length=facts.max_length, batch_size=facts.batch_size)
    for section in explain_measurement(attempt.figures, settings, sizes, attempt.figures["targets"]):
        _say(console, section.title, _each_advice_once(section.lines, told))
    _say(console, "source", ["the setting as Python: the same command with --source in place of --explain"])
    return 0


def print_subject(subject: Subject, console: Console) -> None:
    """Prints what is measured."""
    title = f"{subject.settings.label}: {subject.workload_name} ({subject.workload.size}) on {subject.device}"
    console.print(title, style="bold", markup=False, highlight=False)


def measured_alone(
    subject: Subject,
    servers: Servers,
    *,
    on_phase: Callable[[float, str], None],
    **own: Any,
) -> tuple[Assignment, Attempt, str]:
    """Makes one attempt and removes everything it leaves behind; returns the assignment, the result and the log."""
    with tempfile.TemporaryDirectory(prefix="compile-sweep-alone-") as scratch:
        plan = plan_alone(
            Path(scratch),
            subject.workload_name,
            subject.workload.size,
            subject.seed,
            use_gpu=subject.device is Device.CUDA,
            compile_deadline_s=COMPILE_DEADLINE_S,
            **own,
        )
        assignment = Assignment(plan=plan, trial_id="alone", settings=subject.settings)
        attempt = attempt_alone(assignment, on_phase, servers)
        return assignment, attempt, assignment.log_file(0).read_text(encoding="utf-8", errors="replace")


def _say_phase(console: Console, elapsed_s: float, phase: str) -> None:
    console.print(f"[{elapsed_s:7.1f} s] {phase}", markup=False, highlight=False)


def _judged(verdict: Verdict) -> str:
    return str(verdict.status) if verdict.label is None else f"{verdict.status} ({verdict.label}): {verdict.reason}"


def _each_advice_once(lines: Sequence[str], told: list[str]) -> Iterator[str]:
    """Yields the lines, and a short one for advice that is in what was told before; what is new is added to that."""
    for line in lines:
        advice = line.removeprefix("  → ")
        yield "  → as above" if advice != line and any(advice in earlier for earlier in told) else line
        told.append(line)


def _say(console: Console, title: str, lines: Any) -> None:
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    for line in lines:
        say(console, f"  {redact_text(line)}" if line else "")


BISECT_DEADLINE_S = 3600.0  # seconds that all compiles together may take


def bisect(subject: Subject, console: Console, servers: Servers) -> int:
    """Prints which module is wrong under a setting; returns exit code 0 if there is an answer, otherwise 1."""
    print_subject(subject, console)
    console.print("compiling one part after another, each for some steps beside eager ones …", markup=False, highlight=False)
    assignment, attempt, _ = measured_alone(
        subject, servers, on_phase=partial(_say_phase, console), trial_deadline_s=BISECT_DEADLINE_S, bisects=True
    )
    if attempt.figures is None:
        say(console, str(attempt.verdict(assignment).reason))
        return 1
    found = attempt.figures
    _say(console, "compiled, and the largest difference", (f"{n}. {tried}" for n, tried in enumerate(found["tried"], start=1)))
    _say(console, "found", bisect_lines(found))
    return 0


def bisect_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a bisection found, and what helps."""
    module, class_name = found["module"], found["class_name"]
    if not found["is_wrong"]:
        yield "the setting follows eager: nothing to look for"
        return
    if found["without_regions"]:
        yield f"scope=nested is wrong, and scope=full is right: {found['worst']}"
        advice = "use scope=full or scope=regional"
    elif not module:
        yield f"no module is wrong by itself, so it is the loss, or how the modules are compiled together: {found['worst']}"
        advice = "try scope=modular or scope=regional, which compile modules by themselves and leave the loss eager"
    else:
        own = "; none of its parts is, so it is its own code, or how its parts are compiled together" if found["is_whole"] else ""
        yield f"{module} ({class_name}) is wrong where it alone is compiled{own}: {found['worst']}"
        yield "an error goes on through the backward, so the layers named there may be others"
        how = "torch.compiler.disable(recursive=False)" if found["is_whole"] else "torch.compiler.disable"
        kept = ", which still compiles your own modules inside" if found["is_whole"] else ""
        advice = f"leave it eager: put @{how} on the forward of {class_name}{kept}; and report it to its maintainers"
    if found["advice"]:
        advice = f"{found['advice']}; or {advice}"
    yield f"at fault: {found['stage']}"
    yield f"  → {advice}"
