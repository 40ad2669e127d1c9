"""One trial of a script: the measured run and the eager ones that it is compared with, each in a fresh process.

Background: the eager runs depend on the script, not on the settings, so a sweep makes them once and keeps them in a folder. The
first trial makes them, and others wait.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from compile_sweep.child_process import kill_session
from compile_sweep.schema.causes.errors import advice_on_error, advice_on_exception
from compile_sweep.schema.outcome import Phase
from compile_sweep.schema.settings import CompileSettings, MatmulPrecision, Scope
from compile_sweep.script import sandbox
from compile_sweep.script.job import SEE_OUTPUT, FellBackError, ScriptJob, needs_launcher

if TYPE_CHECKING:
    from compile_sweep.harness.compile_cache.artifact import Artifact
    from compile_sweep.harness.numerics.gradient_check import GradientCheck
    from compile_sweep.harness.numerics.references import References

POLL_S = 0.1

BUNDLE = "bundle"  # file in a run's folder with what torch compiled

TRAINED_ELSEWHERE = "trained-elsewhere"
"""File in a run's folder with the sentence about a process of the script's that trains."""

MOST_RUNS_AT_ONCE = 5
"""Maximum number of eager runs side by side, on a GPU with room for them: most of each is starting and building the model. A
script that draws random numbers has five.
"""

MAX_WRITTEN_BYTES = 50 * 2**30  # maximum bytes that a script may write in a trial

_OF_THE_GROUP = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_TORCH_DEVICE",
}  # fmt: skip
"""Variables of the worker's own process group, which do not belong to the script."""

_LOG_LINES = 20

_LOOKS_EVERY_S = 10.0  # seconds between two checks of how much it wrote


class RunFailed(Exception):
    """A run of a script produced no result.

    Args:
        error_type: Dotted name of the exception's class; None if the process ended without one.
        output: The last lines that the script printed, unless they are in a log or do not matter. What helps against the
            exception follows, if that is known and the compiler did not raise it.
        spares: The setting that leaves the module eager whose compiled code raised the exception, if others are compiled, too.
    """

    def __init__(
        self,
        error_type: str | None,
        text: str,
        from_compiler: bool = False,
        output: Sequence[str] = (),
        at: str = "",
        spares: str | None = None,
    ) -> None:
        super().__init__(error_type, text, from_compiler, output, at, spares)
        self.error_type, self.text, self.from_compiler, self.at, self.spares = error_type, text, from_compiler, at, spares
        self.output = output if error_type is None or not self._is_ours or SEE_OUTPUT in text else ()
        if self.output and not from_compiler and (advice := advice_on_exception(text)):
            self.output = (*self.output, f"→ {advice}")

    def __str__(self) -> str:
        return self.text

    @property
    def fell_back(self) -> bool:
        """Whether the run ended because something runs eagerly that should be compiled."""
        return (self.error_type or "").endswith(f".{FellBackError.__name__}")

    @property
    def _is_ours(self) -> bool:
        return self.fell_back or (self.error_type or "ScriptError").rpartition(".")[2] in ("ScriptError", "SettingsError")

    @property
    def sentence(self) -> str:
        """The error's text. An exception that is not ours is attributed to the script or, with what helps, to the compiler."""
        if self._is_ours:
            return self.text
        name = (self.error_type or "").rpartition(".")[2]
        if not self.from_compiler:
            said = f"the script raised {name}{f' at {self.at}' if self.at else ''}"
            return f"{said}: {self.text}" if self.text else said
        advice = advice_on_error(self.text, self.spares)
        return f"the compiler raised {name}: {self.text}{f'; {advice}' if advice else ''}"


class OutOfTime(Exception):
    """The time for a run was used up before its end; `progress` has its phase, `findings` and `early` figures."""

    def __init__(self, progress: Mapping[str, Any]) -> None:
        super().__init__(progress)
        self.progress = progress


class Running(Protocol):
    """A run's process."""

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        ...

    def end(self) -> None:
        """Ends it and everything in its session."""
        ...


StartRun = Callable[[Path, str, Mapping[str, str], Path | None], Running]
"""Starts a run, given its assignment's file, its working directory, its environment and the file that it prints to, if any."""


class FreshProcess:
    """A run in a new process, which leads a session of its own; a `StartRun`."""

    def __init__(self, assignment: Path, folder: str, environment: Mapping[str, str], log: Path | None) -> None:
        with ExitStack() as files:
            output = None if log is None else files.enter_context(log.open("wb"))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "compile_sweep.script.run_one", str(assignment)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        kill_session(self._process.pid)
        self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTrial:
    """What to run, and where."""

    job: ScriptJob
    settings: CompileSettings
    base: Path
    """An empty folder for this trial."""
    references: Path
    """A folder for the eager runs, the same for all trials of a sweep."""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Protocol` that differ from the defaults."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the processes, in addition to this process's."""
    shows_output: bool = True
    """Whether the script's output goes to this process's output, such as a trial's log; otherwise only its end is kept."""
    watches: Sequence[Artifact] | None = None
    """Artifacts in the trial's compile caches, so that those it uses are known; None if nobody asks for what it compiles."""
    is_first: bool = True
    """Whether this is worker 0, which judges the numbers."""
    rendezvous: Callable[[], Mapping[str, str]] = dict
    """Returns variables by which a run's workers find each other, new for every run; all workers must call it together."""
    agree: Callable[[bool], bool] = bool
    """Returns worker 0's answer in every worker."""
    start: StartRun = FreshProcess
    side_by_side: bool = True
    """Whether `start` may be called while other runs go on."""
    ends_at: float = math.inf
    """When a run that has not ended is ended, by `time.monotonic`."""
    eager_runs_end_at: float = math.inf
    """The same for the eager runs of the script as it is, without which it is measured all the same."""
    on_phase: Callable[[Phase], None] = lambda phase: None
    on_early: Callable[[dict[str, float]], None] = lambda early: None

    def run(self) -> dict[str, Any]:
        """Measures the settings; returns fields of a `Measurement` and `findings`.

        If it watches its caches, `cache_use` is a `CacheUsage` as a mapping, and `bundle` has what torch compiled.

        Raises:
            RunFailed: The script produced no result.
            OutOfTime: The time for it was used up.
        """
        with tempfile.TemporaryDirectory(dir=self.base, prefix="run-") as folder:
            outcome = self.run_once(Path(folder))
            measurement: dict[str, Any] = {**outcome["measurement"], "findings": list(outcome["findings"])}
            if "cache_use" in outcome:
                measurement |= {"cache_use": outcome["cache_use"], "bundle": (Path(folder) / BUNDLE).read_bytes()}
            measurement |= self._judge_in_time(Path(folder), outcome, measurement["findings"])
        self.on_phase(Phase.DONE)
        return measurement

    def _judge_in_time(self, folder: Path, outcome: Mapping[str, Any], findings: list[str]) -> dict[str, Any]:
        """Returns the same as `judge_numbers`; of the script as it is, nothing but that the time was used up if it was."""
        if not self.settings.as_written or outcome["measurement"]["graphs"]:
            return self.judge_numbers(folder, outcome, findings)
        try:
            return replace(self, ends_at=min(self.ends_at, self.eager_runs_end_at)).judge_numbers(folder, outcome, findings)
        except OutOfTime:
            if time.monotonic() < self.eager_runs_end_at or not all(map(math.isfinite, outcome["losses"])):
                raise
        findings.append(
            "the time budget was used up before the eager runs that other settings are compared with; give more, --time-budget-s"
        )
        return {}

    def judge_numbers(self, folder: Path, outcome: Mapping[str, Any], findings: list[str]) -> dict[str, Any]:
        """Compares a run with eager runs, which are made if they are missing; returns `numerics`, or nothing unless `is_first`.

        Raises:
            RunFailed: An eager run produced no result.
            OutOfTime: The time for it was used up.
        """
        from compile_sweep.harness.numerics.references import MORE_PERTURBED

        with self._only_one():
            at_once = outcome["runs_at_once"] if self.side_by_side and not self.job.in_place else 1
            if at_once == 1 and self.settings.as_written and not outcome["measurement"]["graphs"]:
                self._keep(folder, "eager-0")  # what an eager run would repeat; those side by side have fewer threads
            self._make_references(outcome["facts"]["draws"], at_once=at_once)
            if self.agree(self.is_first and _references(self._eager_runs, outcome).eager.random):
                self._make_references(True, at_once=at_once)
            judged = _judged(folder, self._eager_runs, self.settings, outcome, findings) if self.is_first else {}
            if self.agree(self.is_first and _is_doubtful(judged["numerics"])):
                self._make_references(True, at_once=at_once, more=MORE_PERTURBED)
                judged = _judged(folder, self._eager_runs, self.settings, outcome, []) if self.is_first else {}
        return judged

    def run_once(self, folder: Path) -> dict[str, Any]:
        """Measures the settings without judging their numbers; returns the outcome. The recording stays in `folder`."""
        outcome = self._once(folder, "measured", self.settings, tell=True)
        if self.settings.as_written and self.is_first and outcome["as_it_is"]:
            self._eager_runs.mkdir(parents=True, exist_ok=True)
            (self._eager_runs / AS_IT_IS).write_text(json.dumps(outcome["as_it_is"]), encoding="utf-8")
        return outcome

    def _once(
        self,
        folder: Path,
        kind: str,
        settings: CompileSettings,
        *,
        forward_seed: int = 0,
        tell: bool = False,
        side_by_side: int = 1,
    ) -> dict[str, Any]:
        """Runs the script once, one of so many runs side by side; its recording is in the folder afterwards."""
        base = folder / "files"
        base.mkdir()
        place = sandbox.prepare(self.job, base)
        assignment = {
            "job": self.job.under(self.settings).to_dict(),
            "kind": kind,
            "settings": settings.key,
            "protocol": dict(self.protocol),
            "forward_seed": forward_seed,
            "side_by_side": side_by_side,
            "script": place.script,
            "base": str(base),
        }
        if kind == "measured" and (known := self._eager_runs / AS_IT_IS).exists():
            assignment["protocol"] = {**self.protocol, **json.loads(known.read_text(encoding="utf-8"))}
        if kind == "measured" and self.watches is not None:
            assignment["restored"] = [[artifact.kind, artifact.key, artifact.cost_s] for artifact in self.watches]
        (folder / "assignment").write_text(json.dumps(assignment), encoding="utf-8")
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_GROUP}
        environment = {**inherited, **self.environment, **place.environment, **(self.rendezvous() or self._alone())}
        environment.setdefault("PYTHONHASHSEED", str(self.job.seed))
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [environment.get("PYTHONPATH"), str(Path(__file__).resolve().parents[2])])
        )
        environment["PYTHONFAULTHANDLER"] = "1"
        log = None if self.shows_output else folder / "log"
        process = self.start(folder / "assignment", place.folder, environment, log)
        try:
            code = self._wait(process, folder, base, tell=tell)
        finally:
            process.end()
        output = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:] if log and log.exists() else []
        if (elsewhere := folder / TRAINED_ELSEWHERE).exists():
            raise RunFailed("ScriptError", elsewhere.read_text(encoding="utf-8"))
        written = folder / "outcome"
        if not written.exists():
            raise RunFailed(None, _how_it_ended(code), output=output)
        outcome: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        if "error_type" in outcome:
            error = (outcome["error_type"], outcome["error_text"], outcome["error_is_compilers"])
            raise RunFailed(*error, output, outcome["error_at"], outcome["error_spares"])
        shutil.rmtree(base, ignore_errors=True)
        return outcome

    def _alone(self) -> Mapping[str, str]:
        """Returns what torchrun would set for one worker, for a script that needs it."""
        if not needs_launcher(Path(self.job.path).read_text(encoding="utf-8", errors="replace")):
            return {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def _wait(self, process: Running, folder: Path, base: Path, *, tell: bool) -> int:
        """Waits for the end of a run; returns its exit code."""
        phases, has_told_early, looked_at = list(Phase)[1:], False, time.monotonic()
        code: int | None = None
        while code is None:
            code = process.poll()  # before progress is read, so that its last part is not missed
            if code is None:
                time.sleep(POLL_S)
                if (folder / TRAINED_ELSEWHERE).exists():
                    return 1
                if time.monotonic() > self.ends_at:
                    raise OutOfTime(_progress(folder))
            if not self.job.in_place and time.monotonic() - looked_at > _LOOKS_EVERY_S:
                if sandbox.size_bytes(base) > MAX_WRITTEN_BYTES:
                    limit = MAX_WRITTEN_BYTES // 2**30
                    raise RunFailed("ScriptError", f"the script wrote more than {limit} GiB; have it save less often")
                looked_at = time.monotonic()
            if not tell:
                continue
            news = _progress(folder)
            while phases and Phase(news["phase"]) in phases:  # a short phase may begin and end between two checks
                self.on_phase(phases.pop(0))
            if "early" in news and not has_told_early:
                has_told_early = True
                self.on_early(news["early"])
        return code

    @property
    def _eager_runs(self) -> Path:
        """Returns the folder of the eager runs with this batch size."""
        size = self.settings.batch_size
        return self.references if size is None else self.references / f"batch-size-{size}"

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """Allows only one trial of the host at a time to make eager runs."""
        self._eager_runs.mkdir(parents=True, exist_ok=True)
        with (self._eager_runs / "lock").open("a") as lock:
            if self.is_first:
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_references(self, draws: bool, *, at_once: int, more: int = 0) -> None:
        """Makes missing eager runs.

        Args:
            draws: Whether the forward draws random numbers.
            at_once: Number that may run side by side; any that fails then runs again alone.
            more: Number of runs with other random numbers beyond the usual ones.
        """
        from compile_sweep.script.numerics import EAGER_RUNS

        runs = [_EagerRun(kind, number) for kind, count in EAGER_RUNS.items() for number in range(count(draws))]
        precision = self.settings.matmul_precision
        runs += [_EagerRun("perturbed", EAGER_RUNS["perturbed"](draws) + number, precision) for number in range(more)]
        missing = [run for run in runs if self.agree(not (self._eager_runs / run.file).exists())]
        if missing:
            self.on_phase(Phase.EAGER_RUNS)
        if at_once > 1:
            with ThreadPoolExecutor(at_once) as pool:
                ended = [pool.submit(self._eager_run, run, min(at_once, len(missing))) for run in missing]
            missing = [run for run, one in zip(missing, ended, strict=True) if one.exception() is not None]
        for run in missing:
            self._eager_run(run)

    def _eager_run(self, run: _EagerRun, side_by_side: int = 1) -> None:
        with tempfile.TemporaryDirectory(dir=self.base, prefix="eager-") as folder:
            seed = 0 if run.kind != "perturbed" else run.number + 1
            settings = CompileSettings(scope=Scope.EAGER, matmul_precision=run.precision)
            self._once(Path(folder), run.kind, settings, forward_seed=seed, side_by_side=side_by_side)
            self._keep(Path(folder), run.file)

    def _keep(self, folder: Path, name: str) -> None:
        """Keeps a run's recording as that of an eager run."""
        if self.is_first:
            new = self._eager_runs / f"new-{name}"
            shutil.copyfile(folder / "trajectory", new)
            os.replace(new, self._eager_runs / name)


class _EagerRun(NamedTuple):
    """An eager run that a sweep keeps."""

    kind: str
    number: int
    precision: MatmulPrecision | None = None
    """Precision of float32 products, if not the script's own: that of settings whose rounding such runs are to show."""

    @property
    def file(self) -> str:
        return "-".join(str(part) for part in (self.kind, self.precision, self.number) if part is not None)


_NEAR = 3.0
"""Multiple of its tolerance within which a figure of a deterministic run is judged again by more eager runs, each as long as the
script's start.
"""


def _is_doubtful(numerics: Mapping[str, Any]) -> bool:
    from compile_sweep.harness.numerics.check import may_be_chance

    return may_be_chance(numerics, within=math.inf if numerics["random"] else _NEAR)


def _judged(
    folder: Path, references: Path, settings: CompileSettings, outcome: Mapping[str, Any], findings: list[str]
) -> dict[str, Any]:
    from compile_sweep.harness.numerics.check import judge
    from compile_sweep.script import numerics

    found = _references(references, outcome, settings.matmul_precision)
    if apart := numerics.distance(found.eager, numerics.load(references / "again-0")):
        findings.append(
            f"not deterministic: two eager runs are {100 * apart:.2g}% apart in loss or gradients after the first steps; "
            "compiled runs are allowed as much"
        )
    losses = outcome["losses"]
    if num_skipped := _skipped_by_itself(losses, settings, references / SKIPS, has_compiled=outcome["measurement"]["graphs"] > 0):
        steps = f"{num_skipped} timed step{'s' if num_skipped > 1 else ''}"
        findings.append(
            f"the loss of {steps} of {len(losses)} was not finite, as happens with the script as it is, and training goes on"
        )
        losses = [loss for loss in losses if math.isfinite(loss)]
    judged = judge(
        numerics.load(folder / "trajectory"),
        found,
        losses,
        gradient_check=_gradient_check(outcome["gradient_check"]),
        settings=settings,
        is_script=True,
        recompiles=outcome["measurement"]["recompile_reasons"],
        unsynchronized=outcome["unsynchronized_kernels"],
        changed_in_classes=outcome["changed_in_classes"],
        on_gpu=outcome["measurement"]["device"] != "cpu",
    )
    return {"numerics": judged.to_dict()}


AS_IT_IS = "as-it-is"
"""Name of the file, beside the eager runs, that has what the protocol of other settings takes from the script as it is."""

SKIPS = "skips-steps"
"""Name of the file, beside the eager runs, that is there if the script as it is goes on after losses that are not finite."""


def _skipped_by_itself(losses: Sequence[float], settings: CompileSettings, mark: Path, *, has_compiled: bool) -> int:
    """Returns the number of losses that are not finite and that the script does not learn from, as of a batch without labels.

    They count as the script's own if there are any in eager training. If it learned from one, its weights and all later losses
    would not be finite.
    """
    num_bad = sum(not math.isfinite(loss) for loss in losses)
    if not num_bad or not math.isfinite(losses[-1]):
        return 0
    if settings.as_written and not has_compiled:
        mark.touch()
    return num_bad if mark.exists() else 0


def _references(folder: Path, outcome: Mapping[str, Any], precision: MatmulPrecision | None = None) -> References:
    """Loads the eager runs, further ones in that precision. If they differ from the first step on, they count as random.

    They do so with data that no seed fixes.
    """
    from compile_sweep.harness.numerics.check import differs
    from compile_sweep.script import numerics

    eager, again = (numerics.load(folder / f"{kind}-0") for kind in ("eager", "again"))
    perturbed = [numerics.load(path) for path in sorted(folder.glob("perturbed-[0-9]*"))]
    further = [numerics.load(path) for path in sorted(folder.glob(f"perturbed-{precision}-*"))] if precision else []
    found = numerics.references(eager, again, perturbed, outcome["facts"]["rounding"], further=further)
    return found if differs(found) is None else replace(found, eager=replace(eager, random=True))


def _gradient_check(values: Mapping[str, Any] | None) -> GradientCheck | None:
    from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome

    return None if values is None else GradientCheck(**{**values, "outcome": Outcome(values["outcome"])})


def _progress(folder: Path) -> dict[str, Any]:
    """Returns what a run has reported so far."""
    try:
        news: dict[str, Any] = json.loads((folder / "progress").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing
        return {"phase": str(Phase.STARTING)}
    return news


def _how_it_ended(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"the script's process was ended by {signal.Signals(-code).name}"
    return (
        f"the script's process ended with exit code {code}, by os._exit or in native code, and nothing was measured; {SEE_OUTPUT}"
    )
