"""The first step of a training job, cold and restarted from artifacts, each in a new process.

Background: with torch's `load_cache_artifacts`, by hand, the first step came down from 66.0 to 8.6 s. Here a process with empty
caches takes some steps and publishes what it compiled in a folder; another restores that, with the code of a sweep's warm starts
(`artifacts/sharing.py`, `harness/warm_start.py`). A third restores and takes only one step, so that the phases are that
step's. If the goal is missed, a fourth does that under Python's profiler, which slows everything down.

Output: seconds to restore, to build the model and of the first step; cold divided by warm; the error of the warm process's
estimate of the cold time; hits and misses; where the remaining time goes.
"""

import contextlib
import cProfile
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from compile_sweep.harness.diagnostics.torch_logs import without_machine_paths
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device
from orchestrator.environment import fingerprint
from orchestrator.guard import cores
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.run.sweep_folder import write_json
from orchestrator.run.trial_spec import Assignment, TrialPlan

GOAL = 12.0  # goal for the cold first step divided by the warm one, for the whole model with default settings otherwise
LIMIT_S = 600.0  # limit for one process, in seconds

NO_TIME = "no time left"
LOG_TAIL = 500  # number of characters shown of a failed process's log
PROFILE_LINES, SHOWN_LINES = 40, 12  # number of functions in the JSON and in the table


class Kind(StrEnum):
    """Purpose of a process."""

    COLD = "cold"
    """Starts with empty caches; publishes."""
    WARM = "warm"
    """Restores; takes as many steps as the cold one."""
    PHASES = "phases"
    """Restores; takes one step."""
    PROFILE = "profile"
    """Restores; takes one step under Python's profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Instructions for one process."""

    kind: Kind
    setting: str
    """`CompileSettings.key`."""
    precompile: bool
    workload: str
    size: str
    device: Device
    steps: int
    store: str
    result: str

    def assignment(self) -> Assignment:
        """Returns the assignment that a sweep would give: a cold trial, or a warm start."""
        warm = self.kind is not Kind.COLD
        plan = TrialPlan(
            folder=self.store,
            workload=self.workload,
            size=self.size,
            seed=0,
            num_workers=1,
            use_gpu=self.device is Device.CUDA,
            pipeline="resident",
            workers_at_once=1,
            claimed_cpus=1.0,
            compile_deadline_s=LIMIT_S,
            trial_deadline_s=LIMIT_S,
            cache=self.store,
            precompile=self.precompile,
            restores=warm,
            warm_start=warm,
        )
        return Assignment(plan=plan, trial_id=self.kind, settings=CompileSettings.parse(self.setting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to restart, and how."""

    settings: tuple[CompileSettings, ...]
    precompile: bool  # whether to repeat each setting with Dynamo's traces stored, too
    workload: str
    size: str
    device: Device
    profile: bool  # whether to find out where the rest of the warm first step goes
    steps: int
    budget_s: float  # seconds after which running processes are stopped and missing ones are left out

    def variants(self) -> Iterator[tuple[CompileSettings, bool]]:
        """Yields every setting, then every setting with precompile if requested."""
        yield from ((setting, False) for setting in self.settings)
        if self.precompile:
            yield from ((setting, True) for setting in self.settings)


def restart(output: Path, plan: Plan) -> list[Table]:
    """Runs all processes, one after another, and writes the JSON after each; returns the results as tables."""
    ends_at = time.monotonic() + plan.budget_s
    found: list[dict[str, Any]] = []
    for setting, precompile in plan.variants():
        variant: dict[str, Any] = {"settings_key": setting.key, "label": setting.label, "precompile": precompile, "runs": {}}
        found.append(variant)
        for kind, told in _runs(setting, precompile, plan, ends_at):
            if isinstance(told, str):
                variant["ended"] = f"{kind}: {told}"
            else:
                variant["runs"][str(kind)] = told
                variant |= compared(variant["runs"])
            described = {"workload": plan.workload, "size": plan.size, "steps": plan.steps, "goal": GOAL}
            write_json(output, {"environment": fingerprint().to_dict(), **described, "variants": found})
            print(f"{_named(variant)}: {kind}: {told if isinstance(told, str) else _first_step(told)}", flush=True)
    return [table(found), *(profile_table(variant) for variant in found if Kind.PROFILE in variant["runs"])]


def compared(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns cold divided by warm, as far as both have run.

    `first_step_ratio` is the figure with a goal. `steps_ratio` is that of all steps, and `start_ratio` that of all that a
    restarted job waits for before its second step: restoring, building and the first step. With precompile the latter is the
    relevant one: torch then loads while it builds, and leaves nothing to the first step. `estimate_error` is the error, over all
    steps, of the warm process's estimate of a cold one's time.
    """
    cold, warm = runs.get(Kind.COLD), runs.get(Kind.WARM)
    if cold is None or warm is None:
        return {}
    saved_s = warm["cache_saved_s"]
    return {
        "estimate_error": None if saved_s is None else (warm["warmup_s"] + saved_s) / cold["warmup_s"] - 1,
        "first_step_ratio": cold["first_step_s"] / warm["first_step_s"],
        "steps_ratio": cold["warmup_s"] / warm["warmup_s"],
        "start_ratio": (cold["load_s"] + cold["first_step_s"]) / (warm["restore_s"] + warm["load_s"] + warm["first_step_s"]),
    }


def is_profiled(runs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tells whether the remaining time of the warm first step must be explained."""
    ratio = compared(runs).get("first_step_ratio")
    return ratio is not None and ratio < GOAL


def take(job: Job) -> None:
    """Runs a job in its process: like a sweep's worker, without Ray."""
    began = time.perf_counter()
    cpus = os.sched_getaffinity(0)
    cores.bind_process(cpus)
    import torch  # after binding to cores

    from compile_sweep.contract.base import load_workload
    from compile_sweep.harness.compile_cache.transfer import watch_caches
    from compile_sweep.harness.protocol import Protocol
    from compile_sweep.harness.toolchain import start_compile_workers, warm_cpp_headers
    from compile_sweep.harness.warm_start import restart as start
    from orchestrator.artifacts.sharing import Sharing

    torch.set_num_threads(len(cpus))
    assignment = job.assignment()
    if job.device is Device.CPU:
        warm_cpp_headers()
    elif assignment.settings.mode is not None:
        start_compile_workers()
    imported_s = time.perf_counter() - began
    workload = load_workload(job.workload)(job.size, 0)
    device = torch.device(job.device)
    profile = cProfile.Profile() if job.kind is Kind.PROFILE else None

    def on_phase(phase: Phase) -> None:
        if profile is not None and phase is Phase.WARMING_UP:
            profile.enable()
        elif profile is not None and phase is Phase.DONE:
            profile.disable()

    sharing = Sharing(assignment, workload, 0)
    sharing.restore(LIMIT_S)
    steps = 1 if job.kind in (Kind.PHASES, Kind.PROFILE) else job.steps
    protocol = Protocol(compared_steps=steps, visits=0, cudagraph_visits=0)
    with sharing.watching(), watch_caches() as use:
        started = start(workload, assignment.settings, device=device, protocol=protocol, on_phase=on_phase)
    figures = {**started.to_dict(), "import_s": imported_s, "hits": use.hits, "misses": use.misses}
    if job.kind is Kind.COLD:
        figures |= sharing.publish(LIMIT_S)
    else:
        figures |= sharing.figures(started)
    if profile is not None:
        figures["profile"] = profiled(profile)
    write_json(Path(job.result), figures)


def profiled(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """Returns the functions with the most time of their own, and who called each of them most."""
    stats: Any = pstats.Stats(profile)  # the type stubs leave out its table
    rows = [
        {
            "function": _spelled(function),
            "own_s": own_s,
            "with_calls_s": all_s,
            "calls": calls,
            "mostly_from": _spelled(max(callers, key=lambda caller: callers[caller][2])) if callers else None,
        }
        for function, (_, calls, own_s, all_s, callers) in stats.stats.items()
    ]
    return sorted(rows, key=lambda row: -row["own_s"])[:PROFILE_LINES]


def table(variants: Sequence[dict[str, Any]]) -> Table:
    """Formats variants from the JSON as a table."""
    shown = Table(box=None)
    for title in ("setting", "first step s, cold", "warm", "cold ÷ warm", "restore s", "build s", "restart", "all steps"):
        shown.add_column(title, justify="left" if title == "setting" else "right")
    for title in ("estimate", "hits", "misses"):
        shown.add_column(title, justify="right")
    shown.add_column("the warm first step, s")
    for variant in variants:
        runs = variant["runs"]
        cold, warm, phases = (runs.get(kind, {}) for kind in (Kind.COLD, Kind.WARM, Kind.PHASES))
        ratio, error = variant.get("first_step_ratio"), variant.get("estimate_error")
        parts = sorted(phases.get("compile_phases_s", {}).items(), key=lambda part: -part[1])
        shown.add_row(
            _named(variant),
            _seconds(cold.get("first_step_s")),
            _seconds(warm.get("first_step_s")),
            "–" if ratio is None else f"{ratio:.1f}×",
            _seconds(warm.get("restore_s")),
            _seconds(warm.get("load_s")),
            f"{variant['start_ratio']:.1f}×" if "start_ratio" in variant else "–",
            f"{variant['steps_ratio']:.1f}×" if "steps_ratio" in variant else "–",
            "–" if error is None else f"{error:+.1%}",
            str(warm.get("cache_hits", "–")),
            str(warm.get("cache_misses", "–")),
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts if seconds >= 0.01),
        )
    return shown


def profile_table(variant: Mapping[str, Any]) -> Table:
    """Formats where the profiler saw a variant's warm first step spend its time."""
    shown = Table("own s", "with calls", "calls", "function", "mostly called from", box=None, title=f"{_named(variant)}: profile")
    for row in variant["runs"][Kind.PROFILE]["profile"][:SHOWN_LINES]:
        figures = f"{row['own_s']:.2f}", f"{row['with_calls_s']:.2f}", str(row["calls"])
        shown.add_row(*figures, escape(row["function"]), escape(row["mostly_from"] or "–"))
    return shown


def _runs(setting: CompileSettings, precompile: bool, plan: Plan, ends_at: float) -> Iterator[tuple[Kind, dict[str, Any] | str]]:
    """Yields the figures of each process of a variant; ends with why the next one has none, if it failed or was late."""
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="compile-sweep-restart-") as scratch:
        for kind in Kind:
            if (kind is Kind.PHASES and not plan.profile) or (kind is Kind.PROFILE and not is_profiled(runs)):
                return
            job = Job(
                kind=kind,
                setting=setting.key,
                precompile=precompile,
                workload=plan.workload,
                size=plan.size,
                device=plan.device,
                steps=plan.steps,
                store=f"{scratch}/store",
                result=f"{scratch}/{kind}.json",
            )
            figures = _run(job, Path(scratch) / f"caches-{kind}", ends_at)
            yield kind, figures
            if isinstance(figures, str):
                return
            runs[str(kind)] = figures


def _run(job: Job, caches: Path, ends_at: float) -> dict[str, Any] | str:
    """Returns what the process of a job wrote, or why it wrote nothing."""
    environment = {
        **os.environ,
        **compile_cache_env(caches),
        **({} if job.device is Device.CUDA else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    began = time.monotonic()
    if began >= ends_at:
        return NO_TIME
    command = [sys.executable, "-m", "benchmarks.cache.restart", json.dumps(asdict(job))]
    log = Path(job.result).with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(min(LIMIT_S, ends_at - began))
    except subprocess.TimeoutExpired:
        return NO_TIME
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code:
        return f"ended with code {code}: {without_machine_paths(log.read_text(errors='replace')).strip()[-LOG_TAIL:]}"
    figures: dict[str, Any] = json.loads(Path(job.result).read_text())
    return {**figures, "process_s": time.monotonic() - began}


def job_of(text: str) -> Job:
    """Parses a job that `_run` wrote."""
    job = Job(**json.loads(text))
    return replace(job, kind=Kind(job.kind), device=Device(job.device))


def _named(variant: Mapping[str, Any]) -> str:
    return str(variant["label"]) + (", precompile" if variant["precompile"] else "")


def _spelled(function: tuple[str, int, str]) -> str:
    """Returns a function's name as the profiler gives it, without this machine's folders."""
    file, line, name = function
    if file == "~":
        return name
    short = file.rpartition("site-packages/")[2] if "site-packages/" in file else "/".join(Path(file).parts[-2:])
    return f"{short}:{line} {name}"


def _first_step(figures: Mapping[str, Any]) -> str:
    return f"first step {figures['first_step_s']:.2f} s"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    take(job_of(sys.argv[1]))  # in a process of `_run`
