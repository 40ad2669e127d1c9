"""What `python -m orchestrator.check --script train.py -- …` prints: what was found in a script, and what a sweep would cost.

The script runs for a few steps unchanged, then compiled by a backend that is quick and finds the same breaks, then compiled as a
sweep would, and its numbers are compared with eager runs: the most valuable findings first, because a time budget ends it. All
runs are forked from one process, which has imported torch and the packages that the script begins with.
"""

import math
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status as ConsoleStatus

from compile_sweep.command_line import USAGE_ERROR
from compile_sweep.contract.workload_facts import SCRIPT_FACTS
from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.schema.causes.slowness import why_not_faster
from compile_sweep.schema.outcome import Phase, Status, judge_measurement, naming_first_break
from compile_sweep.schema.record import TrialRecord
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.schema.visible_text import counted, ratio_text
from compile_sweep.script.job import ScriptJob
from orchestrator.config import Device, Effort
from orchestrator.guard.scratch_folders import compile_cache_env
from orchestrator.plan.estimates import expected_s
from orchestrator.plan.recipes import AS_WRITTEN, AUTO_RECIPE, RECIPES
from orchestrator.plan.scripts import with_baseline
from orchestrator.plan.space import Target, choose
from orchestrator.run.forked_attempt import ForkedScriptRuns
from orchestrator.view.printed import say

SHORT = {
    "compared_steps": 5,
    "min_passes": 2,
    "max_passes": 2,
    "min_window_s": 0.0,
    "cpu_window_s": 0.0,
    "remedy_patience_s": 60.0,  # because there is no other run in which the remedy is tried
}
"""Fields of the measuring protocol: times are rough, findings are not."""

SCRIPT_BUDGET_S = 100.0

QUICK_BACKEND = "aot_eager"  # finds the same graphs and breaks as Inductor, and generates no code
_STEADY_S = {Device.CPU: 12.0, Device.CUDA: 4.0}  # additional seconds of a sweep's steady window
_LEAVING_S = 3.0  # seconds of the budget that are kept for ending processes and removing files

_SMALL_WAIT = 0.005  # share of a step that waits for data, below which its time is given once

_MOST_CORE_WAIT = 0.1
"""Share of the time that a run's threads wait for a core in a pass, above which its speed beside another run's is not told."""

_COMPARING_S = 10.0
"""Least seconds of the budget that a comparison with eager runs is begun with; it imports torch into this process."""


class TimeBudget(NamedTuple):
    """How long a check may take."""

    seconds: float
    ends_at: float  # by `time.monotonic`

    @property
    def used_up(self) -> str:
        """Says that it is used up."""
        return f"the time budget of {self.seconds:g} s was used up"


class _Failed(NamedTuple):
    """A run that produced no figures, in words."""

    sentence: str
    output: tuple[str, ...] = ()


class _Unfinished(NamedTuple):
    """A run that the time budget ended."""

    progress: Mapping[str, Any]


class _Run(NamedTuple):
    """A run with figures."""

    settings: CompileSettings
    outcome: Mapping[str, Any]
    folder: Path

    @property
    def figures(self) -> dict[str, Any]:
        return {**self.outcome["measurement"], "findings": self.outcome["findings"]}


_INDUCTOR_IS_WRONG = f"with backend={QUICK_BACKEND} its numbers are right: code that Inductor generates is at fault"
_INDUCTOR_IS_RIGHT = (
    f"with backend={QUICK_BACKEND} its numbers are not right either: Inductor is not at fault, so its options change nothing; "
    "torch.compiler.disable on the function at fault, or scope=eager, leaves it out"
)


@dataclass(slots=True, kw_only=True)
class _ScriptCheck:
    """One check of a script."""

    job: ScriptJob
    device: Device
    backend: str | None
    budget: TimeBudget
    console: Console
    runs: ForkedScriptRuns
    folder: Path  # an empty folder
    is_well: bool = True
    done: list[TrialRecord] = field(default_factory=list)
    _num_runs: int = 0
    _core_wait: float = 0.0
    """Share of the time that the threads of the script as it is waited for a core."""
    _advised: list[str] = field(default_factory=list)
    """Advice that was printed."""

    def check(self) -> int:
        """Looks at the script and prints the findings, as `check_script` says."""
        as_written = self._look(CompileSettings.from_dict(AS_WRITTEN), "as the script has it", self._lines)
        if as_written is None:
            return USAGE_ERROR
        if isinstance(as_written, _Run):
            compiles = self._compiled(has_blocks=as_written.outcome["has_blocks"])
            self._say_costs(compiles=compiles)
        else:
            self._say_unknown("breaks, and what a sweep would cost")
            self.is_well = False
        return 0 if self.is_well else 1

    def _compiled(self, *, has_blocks: bool) -> bool:
        """Looks at the breaks of each scope by a quick backend, and at the whole model as a sweep compiles it.

        Returns:
            Whether a compiled run worked, or may work: False if each that was tried failed.
        """
        quick = self.backend or QUICK_BACKEND
        blocks = None
        full = CompileSettings.from_dict({"scope": "full", "dynamic": "auto", "backend": quick})
        found = quickly = self._look(full, f"compiled as a whole ({full.label})", self._lines if self.backend else self._breaks)
        if has_blocks and self.device is Device.CPU:
            blocks = self._look_at_blocks(quick)
        if found is not None and self.backend is None:
            final = CompileSettings.from_dict({"scope": "full", "dynamic": "auto"})
            found = self._look(final, f"compiled as a whole ({final.label})", self._lines)
        if isinstance(found, _Run) and time.monotonic() < self.budget.ends_at - _COMPARING_S:
            self._say_numbers(found, quickly if isinstance(quickly, _Run) and quickly is not found else None)
        elif isinstance(found, _Run):
            self._say_unknown("whether its numbers are those of eager runs")
        if has_blocks and self.device is Device.CUDA:
            blocks = self._look_at_blocks(quick)
        return found is not None or blocks is not None

    def _look_at_blocks(self, backend: str) -> _Run | _Unfinished | None:
        regional = CompileSettings.from_dict({"scope": "regional", "dynamic": "auto", "backend": backend})
        return self._look(regional, f"its repeated blocks compiled ({regional.label})", self._breaks)

    def _look(
        self, settings: CompileSettings, heading: str, lines: Callable[[CompileSettings, _Run], Iterator[str]]
    ) -> _Run | _Unfinished | None:
        """Runs the script under a setting and prints what was found; returns None if it does not work."""
        self.console.print(f"\n{heading}", style="bold")
        began = time.monotonic()
        with self.console.status(f"{heading} …") as status:
            found = (
                self._run(settings, _showing(status, heading)) if began < self.budget.ends_at - _LEAVING_S else _Unfinished({})
            )
        if isinstance(found, _Failed):
            self.is_well = False
            for line in (f"does not work: {found.sentence}", *(f"  {line}" for line in found.output)):
                self._say(line)
            return None
        if isinstance(found, _Unfinished):
            self._say_unfinished(settings, found.progress)
            return found
        verdict = judge_measurement(found.figures, claims_cudagraphs=settings.claims_cudagraphs)
        losses = found.outcome.get("losses", [])
        has_lost = settings.as_written and bool(losses) and not math.isfinite(losses[-1])
        self.is_well = self.is_well and verdict.label is None and not has_lost
        for line in lines(settings, found):
            self._say(line)
        if verdict.label is not None:
            self._say(f"do not use: {verdict.label}: {verdict.reason}")
        if lines == self._lines:
            self.done.append(_record(settings, found.figures, time.monotonic() - began + _STEADY_S[self.device]))
        return found

    def _run(self, settings: CompileSettings, on_phase: Callable[[Phase], None]) -> _Run | _Failed | _Unfinished:
        from compile_sweep.script.trial import OutOfTime, RunFailed  # loads torch

        self._num_runs += 1
        base = self.folder / f"run-{self._num_runs}"
        folder = base / "run"
        folder.mkdir(parents=True)
        try:
            return _Run(settings, self._trial(settings, base, on_phase).run_once(folder), folder)
        except RunFailed as error:
            return _Failed(error.sentence, tuple(error.output))
        except OutOfTime as error:
            return _Unfinished(error.progress)

    def _trial(self, settings: CompileSettings, base: Path, on_phase: Callable[[Phase], None]) -> Any:
        from compile_sweep.script.trial import ScriptTrial  # loads torch

        return ScriptTrial(
            job=self.job,
            settings=settings,
            base=base,
            references=self.folder / "references",
            protocol=SHORT,
            environment={**compile_cache_env(base), **_environment(self.device)},
            shows_output=False,
            start=self.runs.start,
            side_by_side=False,
            ends_at=self.budget.ends_at - _LEAVING_S,
            on_phase=on_phase,
        )

    def _lines(self, settings: CompileSettings, run: _Run) -> Iterator[str]:
        found = run.figures
        before_ms = self.done[0].step_ms_median if self.done else None
        if before_ms is None:
            yield from found["findings"]
        speedup = None if before_ms is None else before_ms / found["step_ms_median"]
        core_wait = run.outcome.get("core_wait_share", 0.0)
        if before_ms is None:
            self._core_wait = core_wait
        waited = max(core_wait, self._core_wait)
        disturbed = waited if waited > _MOST_CORE_WAIT else None
        yield from _step_time(found["step_ms_median"], found["data_wait_share"], speedup if disturbed is None else None)
        if disturbed is not None and speedup is not None:
            yield (
                f"not known: how fast that is beside the script as it is; other processes had the cores for up to "
                f"{disturbed:.0%} of the time that one of the two could have run: check again when the machine is idle"
            )
        if found["graphs"]:
            yield f"compiling took {found['compile_s']:.1f} s: {_graphs(found)}"
        yield from _short_findings(found)
        if disturbed is not None:
            return
        for reason in why_not_faster({**found, "data_wait_share": None}, speedup, settings.backend):
            yield f"not faster: {reason}"

    def _breaks(self, settings: CompileSettings, run: _Run) -> Iterator[str]:
        yield _graphs(run.figures)
        yield from _short_findings(run.figures)

    def _say_numbers(self, run: _Run, quickly: _Run | None) -> None:
        """Compares the run's numbers with eager runs, and says how far they are apart, and which part of torch is at fault.

        Args:
            quickly: The run of the same scope by the quick backend, if there was one.
        """
        from compile_sweep.script.trial import OutOfTime, RunFailed  # loads torch

        with self.console.status("comparing its numbers with those of eager runs …"):
            trial = self._trial(run.settings, run.folder.parent, lambda phase: None)
            findings: list[str] = []
            try:
                numbers = trial.judge_numbers(run.folder, run.outcome, findings)
            except RunFailed as error:
                self.is_well = False
                self._say(f"an eager run, which its numbers are compared with, does not work: {error.sentence}")
                return
            except OutOfTime:
                self._say_unknown("whether its numbers are those of eager runs")
                return
        for line in findings:
            self._say(line)
        numerics = numbers["numerics"]
        self._say(f"its numbers beside those of eager runs: {numerics['status']} ({numerics['worst']})")
        stage = None
        if quickly is not None and numerics["status"] == "diverges":
            with suppress(OutOfTime, RunFailed):
                trial = self._trial(quickly.settings, quickly.folder.parent, lambda phase: None)
                lesser = trial.judge_numbers(quickly.folder, quickly.outcome, [])["numerics"]
                stage = _INDUCTOR_IS_WRONG if lesser["status"] == "ok" else _INDUCTOR_IS_RIGHT
                if stage is _INDUCTOR_IS_RIGHT:
                    numerics |= {"advice": lesser["advice"]}
        verdict = judge_measurement({**run.figures, **numbers}, claims_cudagraphs=False)
        if verdict.label is not None and numerics["status"] != "ok":
            self.is_well = False
            self._say(f"do not use: {verdict.label}: {verdict.reason}")
        if stage is not None:
            self._say(stage)

    def _say_unfinished(self, settings: CompileSettings, progress: Mapping[str, Any]) -> None:
        """Says what a run that the time budget ended had found, and what it had not."""
        if settings.as_written:
            for line in progress.get("findings", ()):
                self._say(line)
            if progress.get("not_finite"):
                self._say(progress["not_finite"])
            if "early" in progress:
                for line in _step_time(progress["early"]["step_ms_median"], progress["data_wait_share"], None):
                    self._say(line)
            else:
                unknown = "" if "findings" in progress else "what the script trains, "
                self._say_unknown(f"{unknown}how long a step takes, what it waits for")
        elif settings.backend == QUICK_BACKEND:
            self._say_unknown(f"breaks under {settings.scope}")
        else:
            self._say_unknown("how long compiling takes, what it gains, whether its numbers are those of eager runs")

    def _say_unknown(self, what: str) -> None:
        self._say(f"not known: {what}; {self.budget.used_up}")

    def _say_costs(self, *, compiles: bool) -> None:
        self.console.print("\na sweep", style="bold")
        if not compiles:
            effort = Effort.STANDARD if self.device is Device.CUDA else Effort.QUICK
            self._say(
                f"no compiled setting works as long as that does not; {AUTO_RECIPE}, the default, also tries settings that "
                f"compile nothing, for {effort.seconds / 60:.0f} min or as long as --effort says"
            )
            self._say_command(AUTO_RECIPE)
            return
        target = Target.of(SCRIPT_FACTS, has_gpu=self.device is Device.CUDA)
        settings = with_baseline(choose(RECIPES["quickstart"](target), target)).settings
        minutes = sum(expected_s(one, target, self.done) for one in (*settings, settings[0])) / 60
        usual = "" if len(self.done) > 1 else ", if it compiles as fast as other models; how long it compiles is not known"
        self._say(f"quickstart: {len(settings)} settings, then the script as it is again, about {minutes:.0f} min{usual}")
        self._say_command("quickstart")

    def _say_command(self, recipe: str) -> None:
        words = ["compile-sweep", "sweep", recipe, "--script", self.job.shown]
        self.console.print(f"  {shlex.join([*words, *(['--', *self.job.arguments] if self.job.arguments else [])])}")

    def _say(self, line: str) -> None:
        """Prints a line below a heading, without advice that stands above; on a terminal, what is too long goes on further in."""
        for advice in self._advised:
            line = line.replace(f"→ {advice}", "→ as above")
            for mark in (":", ";"):
                line = line.replace(f"{mark} {advice}", "; what helps stands above")
        if line.startswith("  → "):
            self._advised.append(line.removeprefix("  → "))
        say(self.console, f"  {line.rstrip()}", hanging=2)


def check_script(job: ScriptJob, device: Device, backend: str | None, budget: TimeBudget, console: Console) -> int:
    """Looks at a script as long as the budget allows, and prints the findings; exit code 1 unless all that was seen is right."""
    console.print(f"{job.name} on {device}", style="bold")
    with (
        tempfile.TemporaryDirectory(prefix="compile-sweep-check-", ignore_cleanup_errors=True) as folder,
        closing(ForkedScriptRuns(job, _environment(device), use_gpu=device is Device.CUDA)) as runs,
    ):
        return _ScriptCheck(
            job=job, device=device, backend=backend, budget=budget, console=console, runs=runs, folder=Path(folder)
        ).check()


def _environment(device: Device) -> dict[str, str]:
    return {} if device is Device.CUDA else {"CUDA_VISIBLE_DEVICES": ""}


def _showing(status: ConsoleStatus, heading: str) -> Callable[[Phase], None]:
    return lambda phase: status.update(f"{heading}: {phase} …")


def _step_time(compute_ms: float, wait_share: float, speedup: float | None) -> Iterator[str]:
    """Yields how long a step takes with its wait for data, which settings do not change, and without it."""
    speed = (
        "" if speedup is None else f", which is {ratio_text(speedup)} times as fast as the script as it is, in these few steps"
    )
    if wait_share < _SMALL_WAIT:
        yield f"a step takes about {_time(compute_ms)}{speed}"
        if wait_share > 0:  # without a loader, nothing is waited for
            yield f"of that it waits for its data {wait_share:.0%}"
    else:
        yield f"a step takes about {_time(compute_ms / (1 - wait_share))}; of that it waits for its data {wait_share:.0%}"
        yield f"without the wait, it takes {_time(compute_ms)}{speed}"


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.3g} s"


def _graphs(found: Mapping[str, Any]) -> str:
    breaks = len(set(found["graph_break_reasons"]))
    return f"{counted(found['graphs'], 'graph')}, {counted(breaks, 'graph break') if breaks else 'no graph breaks'}"


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


def _short_findings(found: Mapping[str, Any]) -> Iterator[str]:
    return (naming_first_break(line, found["graph_break_reasons"]) for line in short_findings(found))
