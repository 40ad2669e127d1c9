"""What `python -m orchestrator.check --script train.py -- …` prints: what was found in a script, and what a sweep would cost.

The script runs for a few steps unchanged, and again compiled, and its numbers are compared with eager runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from compile_sweep.contract.workload_facts import SCRIPT_FACTS
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.schema.causes import why_not_faster
from compile_sweep.schema.outcome import Status, judge_measurement
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from orchestrator.config import Device
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.plan.estimates import expected_s
from orchestrator.plan.recipes import AS_WRITTEN, RECIPES
from orchestrator.plan.space import Target, choose

SHORT = {"min_passes": 2, "max_passes": 2, "min_window_s": 0.0, "cpu_window_s": 0.0}
"""Fields of the measuring protocol: times are rough, findings are not."""


_STEADY_S = {Device.CPU: 12.0, Device.CUDA: 4.0}
"""Additional seconds of a sweep's steady window."""


def check_script(job: ScriptJob, device: Device, backend: str | None, console: Console) -> int:
    """Examines a script and prints the findings.

    Args:
        job: The script.
        device: The device to train on.
        backend: Backend of `torch.compile`, instead of Inductor.
        console: Where to print.

    Returns:
        The command's exit code: 0 if the script runs unchanged and compiled, 1 otherwise.
    """
    console.print(f"{job.name} on {device}", style="bold")
    compiled = CompileSettings.from_dict({"scope": "full", "dynamic": "auto", "backend": backend})
    done: list[TrialRecord] = []
    is_well = True
    with tempfile.TemporaryDirectory(prefix="compile-sweep-check-") as made:
        for setting in (CompileSettings.from_dict(AS_WRITTEN), compiled):
            console.print(f"\n{setting.label}", style="bold")
            began = time.monotonic()
            found, error = _measured(job, setting, device, Path(made))
            if found is None:
                console.print(f"  does not work: {error}")
                return 1
            verdict = judge_measurement(found, claims_cudagraphs=setting.claims_cudagraphs)
            is_well = is_well and verdict.label is None
            for line in _lines(found, done[0].step_ms_median if done else None, setting.backend):
                console.print(f"  {line}")
            if verdict.label is not None:
                console.print(f"  do not use: {verdict.label}: {verdict.reason}")
            done.append(_record(setting, found, time.monotonic() - began + _STEADY_S[device]))
    console.print("\na sweep", style="bold")
    target = Target.of(SCRIPT_FACTS, has_gpu=device is Device.CUDA)
    chosen = choose(RECIPES["quickstart"](target), target)
    minutes = sum(expected_s(one, target.max_length, done) for one in chosen.settings) / 60
    console.print(f"  quickstart: {len(chosen.settings)} settings, about {minutes:.0f} min one after another")
    return 0 if is_well else 1


def _measured(job: ScriptJob, setting: CompileSettings, device: Device, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Returns the figures of one setting, or why there are none."""
    from compile_sweep.script.trial import RunFailed, ScriptTrial  # loads torch

    base = folder / ("as-written" if setting.as_written else "compiled")
    base.mkdir()
    trial = ScriptTrial(
        job=job,
        settings=setting,
        base=base,
        references=folder / "references",
        protocol=SHORT,
        environment={**compile_cache_env(base), **({} if device is Device.CUDA else {"CUDA_VISIBLE_DEVICES": ""})},
        shows_output=False,
    )
    try:
        return trial.run(), ""
    except RunFailed as error:
        return None, "\n    ".join([error.sentence, *error.output])


def _lines(found: Mapping[str, Any], as_written_ms: float | None, backend: str | None) -> Iterator[str]:
    if as_written_ms is None:
        yield from found["findings"]
    speedup = None if as_written_ms is None else as_written_ms / found["step_ms_median"]
    speed = "" if speedup is None else f", in these few steps {speedup:.2g} times as fast as the script as written"
    yield f"about {found['step_ms_median']:.3g} ms a step{speed}; compiles for {found['compile_s']:.1f} s"
    yield f"waits for its data {found['data_wait_share']:.0%} of the time"
    yield f"numbers: {found['numerics']['status']} ({found['numerics']['worst']})"
    if found["graphs"]:
        yield f"graphs: {found['graphs']}"
    for reason in why_not_faster(found, speedup, backend):
        yield f"not faster: {reason}"
    yield from short_findings(found)


def _record(setting: CompileSettings, found: Mapping[str, Any], wall_s: float) -> TrialRecord:
    return TrialRecord(
        trial_id=setting.key,
        settings=setting.to_dict(),
        settings_key=setting.key,
        status=Status.OK,
        wall_s=wall_s,
        compile_s=found["compile_s"],
        step_ms_median=found["step_ms_median"],
    )
