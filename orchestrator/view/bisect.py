"""`--bisect`: finds the module whose compiled code does not follow eager, in a fresh process, and says what helps."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from compile_sweep.schema.redact import redact_text
from orchestrator.run.forked_attempt import Servers
from orchestrator.view.explain import Subject, measured_alone, print_subject

DEADLINE_S = 3600.0  # seconds that all compiles together may take


def bisect(subject: Subject, console: Console, servers: Servers) -> int:
    """Prints which module is wrong under a setting; returns exit code 0 if there is an answer, otherwise 1."""
    print_subject(subject, console)
    console.print("compiling one part at a time …", markup=False, highlight=False)
    assignment, attempt, _ = measured_alone(subject, servers, trial_deadline_s=DEADLINE_S, bisects=True)
    if attempt.figures is None:
        console.print(str(attempt.verdict(assignment).reason), markup=False, highlight=False, soft_wrap=True)
        return 1
    for line in _lines(attempt.figures):
        console.print(redact_text(line), markup=False, highlight=False, soft_wrap=True)
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    for number, tried in enumerate(found["tried"], start=1):
        yield f"  {number}. {tried}"
    if not found["is_wrong"]:
        yield "the setting follows eager: nothing to look for"
    elif not found["module"]:
        yield f"no module is wrong by itself, only the whole model is: {found['worst']}"
        yield "  → scope=modular or scope=regional, which compile modules by themselves, may be used"
    else:
        yield f"wrong: {found['module']} ({found['class_name']}), by {found['stage']}: {found['worst']}"
        yield (
            f"  → leave it eager: scope=modular with parts.{found['module']}.compile=off where it is a part of the workload, or "
            f"torch.compiler.disable on the forward of {found['class_name']}; and report it to the maintainers of that code"
        )
