"""`--bisect`: finds the module whose compiled code does not follow eager, in a fresh process, and says what helps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.redact import redact_text
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.run.local_runner import attempt_alone, plan_alone
from orchestrator.run.trial_spec import Assignment
from orchestrator.view.explain import COMPILE_DEADLINE_S

DEADLINE_S = 3600.0
"""Seconds that all compiles together may take."""


def bisect(
    settings: CompileSettings, workload_name: str, workload: WorkloadFacts, seed: int, device: Device, console: Console
) -> int:
    """Looks for the module that is wrong under a setting and prints it; arguments as those of `explain`.

    Returns:
        The command's exit code: 0 if the question has an answer, whatever it is, and 1 if not.
    """
    title = f"{settings.label}: {workload_name} ({workload.size}) on {device}"
    console.print(title, style="bold", markup=False, highlight=False)
    console.print("compiling part after part …", markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="compile-sweep-bisect-") as scratch:
        plan = plan_alone(
            Path(scratch),
            workload_name,
            workload.size,
            seed,
            use_gpu=device is Device.CUDA,
            compile_deadline_s=COMPILE_DEADLINE_S,
            trial_deadline_s=DEADLINE_S,
            bisects=True,
        )
        assignment = Assignment(plan=plan, trial_id="bisect", settings=settings)
        attempt = attempt_alone(assignment)
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
        yield f"no module is wrong by itself, only the whole: {found['worst']}"
        yield "  → scope=modular or scope=regional, which compile modules by themselves, may be used"
    else:
        yield f"wrong: {found['module']} ({found['class_name']}), by {found['stage']}: {found['worst']}"
        yield (
            f"  → leave it eager: scope=modular with parts.{found['module']}.compile=off where it is a part of the workload, or "
            f"torch.compiler.disable on the forward of {found['class_name']}; and report it to whose code that is"
        )
