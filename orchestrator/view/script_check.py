"""What `python -m orchestrator.check --script train.py -- …` prints: what was found in a script, and what a sweep would cost.

The script runs for a few steps unchanged, and again compiled, and its numbers are compared with eager runs.
"""

from __future__ import annotations

import shlex
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status as ConsoleStatus

from compile_sweep.contract.workload_facts import SCRIPT_FACTS
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.schema.causes import why_not_faster
from compile_sweep.schema.outcome import Phase, Status, judge_measurement
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.job import ScriptJob
from orchestrator.config import Device
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.plan.estimates import expected_s
from orchestrator.plan.recipes import AS_WRITTEN, RECIPES
from orchestrator.plan.space import Target, choose

if TYPE_CHECKING:
    from compile_sweep.script.trial import RunFailed  # loads torch

SHORT = {"compared_steps": 5, "min_passes": 2, "max_passes": 2, "min_window_s": 0.0, "cpu_window_s": 0.0}
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
            heading = setting.label if setting.as_written else f"compiled as a whole ({setting.label})"
            console.print(f"\n{heading}", style="bold")
            began = time.monotonic()
            with console.status(f"{heading} …") as status:
                found = _measured(job, setting, device, Path(made), _showing(status, heading))
            if not isinstance(found, dict):
                for line in (f"does not work: {found.sentence}", *(f"  {line}" for line in found.output)):
                    _say(line, console)
                return 1
            verdict = judge_measurement(found, claims_cudagraphs=setting.claims_cudagraphs)
            is_well = is_well and verdict.label is None
            for line in _lines(found, done[0].step_ms_median if done else None, setting.backend):
                _say(line, console)
            if verdict.label is not None:
                _say(f"do not use: {verdict.label}: {verdict.reason}", console)
            done.append(_record(setting, found, time.monotonic() - began + _STEADY_S[device]))
    console.print("\na sweep", style="bold")
    target = Target.of(SCRIPT_FACTS, has_gpu=device is Device.CUDA)
    chosen = choose(RECIPES["quickstart"](target), target)
    minutes = sum(expected_s(one, target.max_length, done) for one in chosen.settings) / 60
    _say(f"quickstart: {len(chosen.settings)} settings, about {minutes:.0f} min one after another", console)
    words = [
        "python",
        "-m",
        "orchestrator.sweep",
        "quickstart",
        "--script",
        job.shown,
        *(["--", *job.arguments] if job.arguments else []),
    ]
    console.print(f"  {shlex.join(words)}")
    return 0 if is_well else 1


def _showing(status: ConsoleStatus, heading: str) -> Callable[[Phase], None]:
    return lambda phase: status.update(f"{heading}: {phase} …")


def _say(line: str, console: Console) -> None:
    """Prints a line below a heading; on a terminal, what is too long goes on further in."""
    width = console.width if console.is_terminal else len(line) + 2
    inside = "  " + " " * (len(line) - len(line.lstrip()))
    console.print(textwrap.fill(line.strip(), width, initial_indent=inside, subsequent_indent=f"{inside}  "))


def _measured(
    job: ScriptJob, setting: CompileSettings, device: Device, folder: Path, on_phase: Callable[[Phase], None]
) -> dict[str, Any] | RunFailed:
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
        on_phase=on_phase,
    )
    try:
        return trial.run()
    except RunFailed as error:
        return error


def _lines(found: Mapping[str, Any], as_written_ms: float | None, backend: str | None) -> Iterator[str]:
    if as_written_ms is None:
        yield from found["findings"]
    step_ms = found["step_ms_median"]
    speedup = None if as_written_ms is None else as_written_ms / step_ms
    speed = "" if speedup is None else f", which is {speedup:.2g} times as fast as the script as it is, in these few steps"
    yield f"a step takes about {step_ms:.3g} ms{speed}" if step_ms < 1000 else f"a step takes about {step_ms / 1e3:.3g} s{speed}"
    yield f"of that it waits for its data {found['data_wait_share']:.0%}"
    if found["graphs"]:
        breaks = len(set(found["graph_break_reasons"]))
        graphs = f"{_number(found['graphs'], 'graph')}, {_number(breaks, 'graph break') if breaks else 'no graph breaks'}"
        yield f"compiling took {found['compile_s']:.1f} s: {graphs}"
    numerics = found["numerics"]
    yield f"its numbers beside those of eager runs: {numerics['status']} ({numerics['worst']})"
    for reason in why_not_faster(found, speedup, backend):
        yield f"not faster: {reason}"
    yield from short_findings(found)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


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
