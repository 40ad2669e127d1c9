"""`--explain`: measures one setting in a fresh process, without Ray, and says what the compiler made of it and what helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from compile_sweep.contract.base import load_workload
from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_measurement
from compile_sweep.schema.outcome import Death, Verdict, judge_death, judge_measurement
from compile_sweep.schema.phases import Phase
from compile_sweep.schema.redact import redact_text
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.guard.scratch_folders import check_temp_folder, compile_cache_env
from orchestrator.guard.watchdog import ATTEMPT_MARKER, kill_marked

COMPILE_DEADLINE_S = 900.0
"""Seconds the warm-up, compiles included, may take: longer than a sweep gives it, since here one setting is all there is."""

DEADLINE_S = 1800.0
"""Seconds the whole measurement may take."""

_POLL_S = 0.2
_LOG_LINES = 15
"""Of the measured process's output, shown when it gave no measurement."""


def explain(settings: CompileSettings, workload_name: str, size: str, seed: int, device: Device, console: Console) -> int:
    """Measures the setting and prints the findings; records nothing.

    Args:
        settings: valid for the workload's lengths.
        workload_name: a built-in workload's name, or `package.module:Class`.
        size: one of the workload's.
        seed: decides weights and data.
        device: what to measure on.
        console: where to print.

    Returns:
        The command's exit code: 0 if there is a measurement, whatever it says of the setting, and 1 if there is none.

    Raises:
        ConfigError: nothing compiles where temporary files go.
    """
    check_temp_folder()
    console.print(f"{settings.label}: {workload_name} ({size}) on {device}", style="bold", markup=False, highlight=False)
    told = {"settings": settings.key, "workload": workload_name, "size": size, "seed": seed, "device": str(device)}
    with tempfile.TemporaryDirectory(prefix="compile-sweep-explain-") as scratch:
        outcome, death = run_alone(told, Path(scratch), console)
        log = (Path(scratch) / "log").read_text(encoding="utf-8", errors="replace")
    if "measurement" not in outcome:
        _say(console, "verdict", [_judged(judge_death(death))])
        _say(console, "the end of its output", log.splitlines()[-_LOG_LINES:])
        return 1
    measurement = outcome["measurement"]
    verdict = judge_measurement(measurement, claims_cudagraphs=settings.claims_cudagraphs)
    _say(console, "verdict", [_judged(verdict)])
    workload = load_workload(workload_name)(size, seed)
    lengths = KnownSizes(settings=settings, max_length=workload.max_length, batch_size=workload.batch_size)
    for section in explain_measurement(measurement, settings, lengths, outcome["targets"]):
        _say(console, section.title, section.lines)
    _say(console, "source", [])
    console.print(measurement["source"], markup=False, highlight=False, soft_wrap=True)  # at the margin, so that it can be pasted
    return 0


def run_alone(told: Mapping[str, Any], scratch: Path, console: Console) -> tuple[dict[str, Any], Death]:
    """Measures in a fresh process with empty caches.

    Args:
        told: what `compile_sweep.harness.run_one` takes.
        scratch: an empty folder; the process's output is in its file `log` afterwards.
        console: where to print the phases.

    Returns:
        What the measuring process left, and, should that be no measurement, what is known of its end.
    """
    (scratch / "assignment").write_text(json.dumps(told), encoding="utf-8")
    marker = f"explain-{uuid.uuid4().hex[:8]}"
    began = reached_at = time.monotonic()
    phase = str(Phase.STARTING)
    with (scratch / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "compile_sweep.harness.run_one", str(scratch / "assignment"), str(scratch / "outcome")],
            env={**os.environ, **_environment(marker, scratch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None and not _is_late(phase, time.monotonic() - reached_at, time.monotonic() - began):
                time.sleep(_POLL_S)
                if (now := _phase(scratch)) != phase:
                    phase, reached_at = now, time.monotonic()
                    console.print(f"[{reached_at - began:7.1f} s] {phase}", markup=False, highlight=False)
        finally:
            process.kill()
            process.wait()
            kill_marked(marker)  # compilers it started outlive it
    written = scratch / "outcome"
    outcome: dict[str, Any] = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    ended = time.monotonic()
    error = {name: outcome[name] for name in ("error_type", "error_text", "error_is_compilers") if name in outcome}
    return outcome, Death(
        phase=phase,
        in_phase_s=ended - reached_at,
        elapsed_s=ended - began,
        compile_deadline_s=COMPILE_DEADLINE_S,
        trial_deadline_s=DEADLINE_S,
        **(error or {"error_text": f"it ended with exit code {process.returncode}"}),
    )


def _environment(marker: str, scratch: Path) -> dict[str, str]:
    """Empty caches of its own, so that everything is compiled and nothing goes unsaid."""
    return {
        ATTEMPT_MARKER: marker,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **compile_cache_env(scratch),
    }


def _is_late(phase: str, in_phase_s: float, elapsed_s: float) -> bool:
    return elapsed_s >= DEADLINE_S or (phase == Phase.WARMING_UP and in_phase_s >= COMPILE_DEADLINE_S)


def _phase(scratch: Path) -> str:
    written = scratch / "phase"
    return written.read_text(encoding="utf-8") if written.exists() else str(Phase.STARTING)


def _judged(verdict: Verdict) -> str:
    return str(verdict.status) if verdict.label is None else f"{verdict.status} ({verdict.label}): {verdict.reason}"


def _say(console: Console, title: str, lines: Any) -> None:
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    for line in lines:
        console.print(f"  {redact_text(line)}" if line else "", markup=False, highlight=False, soft_wrap=True)
