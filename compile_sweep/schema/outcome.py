"""How an attempt ended: its status, its label, what was at fault, and whether to try again.

Pure: takes evidence and returns status, label and a reason. A new label is one line of `Label` and the rule that assigns it.

A fault of the machines says nothing about the setting, so the setting is tried again, after a longer wait each time, because the
machines may need time to recover. A fault of the setting is a result. A worker that died without a message may be either, so it
gets one more try. Where Dynamo's traces are stored (`--precompile`), torch may be at fault, because it cannot store all of them;
the setting then gets one try without.
"""

import re
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Self

from compile_sweep.schema.causes.breaks import advice_on_break, advice_on_fallback
from compile_sweep.schema.causes.errors import MEMORY_ADVICE, advice_on_cudagraph_skip, advice_on_error, advice_on_exception
from compile_sweep.schema.causes.guards import advice_on_limit
from compile_sweep.schema.causes.places import place_in_code
from compile_sweep.schema.part_settings import left_out_in

MAX_DATA_WAIT_SHARE = 0.05
"""Share of a step spent waiting for data above which the figure describes the input pipeline rather than the setting."""

SCRIPT_PIPELINE = "script"
"""Value of `pipeline` where a script makes the batches; no figure includes its wait for them."""

_SENTENCE_LENGTH = 300


class Phase(StrEnum):
    """The phases of an attempt, in order."""

    STARTING = "starting"
    BUILDING = "building"
    WARMING_UP = "warming-up"
    STEADY = "steady"
    CHECKING = "checking"
    EAGER_RUNS = "eager-runs"
    """The eager runs that numbers are compared with, which a sweep makes once."""
    DONE = "done"


class Status(StrEnum):
    """The outcome of an attempt."""

    OK = "ok"
    """Measured, and nothing speaks against using the setting."""

    INFEASIBLE = "infeasible"
    """The setting itself cannot or must not be used: out of memory, wrong numerics, a compile beyond its deadline."""

    FAILED = "failed"
    """The attempt broke for a reason that says nothing certain about the setting: an exception, a dead worker."""

    STOPPED = "stopped"
    """Nothing went wrong: the attempt was stopped because even at best it would not have been worth having."""


class Fault(Enum):
    """What is at fault if an attempt is not ok."""

    SETTING = "the setting"
    MACHINES = "the machines"
    UNCERTAIN = "not certain"
    NOBODY = "nobody"


_SETTING = Status.INFEASIBLE, Fault.SETTING, 1
_MACHINES = Status.FAILED, Fault.MACHINES
_UNCERTAIN = Status.FAILED, Fault.UNCERTAIN


class Label(StrEnum):
    """Why an attempt is not ok, as one word, with its status, what is at fault, how many tries it gets, and its meaning."""

    status: Status
    fault: Fault
    tries: int
    meaning: str

    def __new__(  # the defaults are for mypy, which takes a lookup, Label("nan"), for a call of this
        cls, word: str, status: Status = Status.FAILED, fault: Fault = Fault.UNCERTAIN, tries: int = 1, meaning: str = ""
    ) -> Self:
        label = str.__new__(cls, word)
        label._value_ = word
        label.status, label.fault, label.tries, label.meaning = status, fault, tries, meaning
        return label

    NAN = "nan", *_SETTING, "loss or gradients are not finite where eager's are, or a timed loss is not finite"
    DIVERGES = "diverges", *_SETTING, "further from eager than correct runs are from each other"
    RECOMPILE_LIMIT = "recompile-limit", *_SETTING, "torch reached its recompile limit and runs some of the model eagerly"
    CUDAGRAPHS_SKIPPED = "cudagraphs-skipped", *_SETTING, "CUDA graphs were asked for and not used"
    SILENT_FALLBACK = "silent-fallback", *_SETTING, "torch ran eagerly what it should have compiled, or compiled nothing"
    INPUT_BOUND = "input-bound", *_SETTING, "with `--pipeline real`, waits for data more than 5% of the time"
    OUT_OF_MEMORY = "out-of-memory", *_SETTING, "the device or the host ran out of memory"
    COMPILE_ERROR = "compile-error", *_SETTING, "the compiler raised an exception"
    COMPILE_DEADLINE = "compile-deadline", *_SETTING, "still compiling or warming up at the deadline; killed"
    DEVICE_FAULT = "device-fault", *_SETTING, "an illegal memory access or a device-side assert"
    DOMINATED = (
        "dominated", Status.STOPPED, Fault.NOBODY, 1,
        "stopped early because it could no longer keep the constraints or add to the front",
    )  # fmt: skip
    BUDGET_SPENT = (
        "budget-spent", Status.STOPPED, Fault.NOBODY, 1,
        "still running when the time budget was used up; tried again by `--resume`",
    )  # fmt: skip
    EAGER_UNSTABLE = "eager-unstable", *_UNCERTAIN, 1, "eager itself is not finite on these batches, so nothing can be checked"
    TRIAL_DEADLINE = "trial-deadline", *_UNCERTAIN, 1, "not done at the deadline; killed"
    EXCEPTION = "exception", *_UNCERTAIN, 1, "a worker raised an exception that is not the compiler's"
    CRASHED = "crashed", *_UNCERTAIN, 1, "native code died of a signal"
    GPU_SHARED = "gpu-shared", *_UNCERTAIN, 1, "other processes were on its GPU"
    NOT_WARM = "not-warm", *_UNCERTAIN, 1, "a warm start that could restore nothing, or use nothing of what it restored"
    WORKER_DIED = "worker-died", *_UNCERTAIN, 2, "a worker died without an error message, twice"
    SWEEP_DIED = "sweep-died", *_UNCERTAIN, 1, "the sweep or its host died twice while the setting ran; it is not run again"
    DEVICE_LOST = "device-lost", *_MACHINES, 3, "the GPU failed, or another process had filled it"
    DISK_FULL = "disk-full", *_MACHINES, 3, "a disk was full"
    NOT_STARTED = "not-started", *_MACHINES, 3, "no worker had started at the deadline, as on a host that is too busy"
    NODE_LOST = "node-lost", *_MACHINES, 4, "the host of a worker left the cluster"
    ACTOR_LOST = "actor-lost", *_MACHINES, 4, "an actor or object that the trial needed was gone"
    TRIAL_DIED = "trial-died", *_MACHINES, 4, "the trial's own process failed"


LOST_TO_MACHINES = frozenset({Label.BUDGET_SPENT, *(label for label in Label if label.fault is Fault.MACHINES)})
"""Labels of attempts that the machines ended, or the time budget: the setting is tried again when the sweep is resumed."""

SCRIPT_ERROR = "ScriptError: "
"""How the reason of an attempt begins that the script ended, by an exception or before enough steps."""


def says_nothing(label: str | None, reason: str | None) -> bool:
    """Tells whether an attempt says nothing of its setting because the machines, or its script, ended it."""
    return label in LOST_TO_MACHINES or (label == Label.EXCEPTION and (reason or "").startswith(SCRIPT_ERROR))


RIGHT_BUT_UNUSABLE = frozenset({Label.SILENT_FALLBACK, Label.RECOMPILE_LIMIT, Label.CUDAGRAPHS_SKIPPED})
"""Labels of settings whose numbers hold and that are not what they claim to be."""

OF_PRECOMPILE = frozenset({Label.COMPILE_ERROR, Label.EXCEPTION, Label.CRASHED})
"""Labels of attempts with `--precompile` that torch may have ended because it could not store or load a trace of Dynamo's."""

LOST_TO_PRECOMPILE = "with --precompile: "
"""Prefix of such an attempt's reason. A process that takes over a trial knows only the reasons of its attempts."""

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemory|MemoryError|out of memory|(?:can't|[Cc]annot) allocate memory|low on memory|memory usage threshold"
    r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
)
_HOST_FULL = re.compile(r"low on memory|memory usage threshold")
"""What Ray's memory monitor reports when it ends a worker."""

_GPU_FULL = re.compile(r"CUDA error: out of memory")
"""What CUDA reports when memory lacks even for a process's context, before the setting matters."""

_SLOW_START = re.compile(r"worker group startup timed out")
"""What Ray Train reports when its workers do not come up in time."""

_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_CUT_SHORT = re.compile(
    r"file too short|invalid ELF header|cannot read file data|while reading precompiled header|cannot read (?:PCH|\S+\.gch)"
)
"""What loaders and compilers report of half a file, which a process leaves that is killed while it writes."""

_DEVICE_LOST = re.compile(
    r"uncorrectable ECC|uncorrectable NVLink|[Dd]evice is lost|GPU is lost|fallen off the bus|no CUDA-capable device"
    r"|No CUDA GPUs are available|with GPUs, no GPUs found"
    r"|devices?(?:\(s\) is/are| are| is) busy or unavailable|CUDA driver initialization failed|system not yet initialized"
)
_DEVICE_FAULT = re.compile(
    r"illegal memory access|misaligned address|device-side assert|unspecified launch failure|illegal instruction was encountered"
    r"|invalid program counter|hardware stack error|invalid address space|launch timed out"
)
_PEERS_GONE = re.compile(
    r"[Cc]onnection (?:closed by|reset by|refused by)|[Bb]roken pipe|remote process (?:has )?exited|communicator was aborted"
    r"|ncclRemoteError|ncclSystemError|[Ss]ocket [Cc]losed|Timed out waiting|DistNetworkError|DistBackendError"
)
"""Patterns of a worker's exception after its peer is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A status, with label and reason if it is not ok."""

    status: Status
    label: Label | None = None
    reason: str | None = None


OK = Verdict(status=Status.OK)

_USUAL_RECOMPILES = 1
"""Number of recompiles that say nothing: torch makes a size dynamic when it sees a second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Evidence about an attempt that returned no measurement."""

    phase: str
    """The last phase a worker reported."""
    in_phase_s: float
    """Seconds since that report."""
    elapsed_s: float
    """Seconds since the trial started."""
    compile_deadline_s: float
    trial_deadline_s: float
    error_type: str | None = None
    """Class name of the exception a worker raised, dotted; None if it died without one."""
    error_text: str = ""
    error_is_compilers: bool = False
    """Whether the compiler raised the exception."""
    num_workers: int = 1
    """Number of the trial's workers."""
    fatal: str | None = None
    """What Python wrote when a signal ended a worker, like "Segmentation fault"; None if it wrote nothing."""
    timed_out: bool = False
    """Whether a worker wrote that its deadline ended it."""
    oom_killed: bool = False
    """Whether the kernel killed a process on a worker's host for lack of memory when the worker ended."""
    has_started: bool = True
    """Whether any worker had started; true if that is not known."""
    nodes_lost: int = 0
    """Number of the trial's hosts that left the cluster."""
    startup_error: str = ""
    """Error of a worker that died before its first line; empty if none did."""
    recompiles: Sequence[str] = ()
    """What torch had compiled again, and why, as in a record's `recompile_reasons`."""


def judge_measurement(measurement: Mapping[str, Any], *, claims_cudagraphs: bool) -> Verdict:
    """Judges a measured attempt: may the setting be used?

    Reasons why a setting is unusable come before reasons why its figure is uncertain. Noise alone is not a reason: the record's
    interval says how uncertain its figure is, and fronts go by the interval's worse end.
    """
    numerics = measurement["numerics"]
    limit = advice = ""
    if hits := measurement["recompile_limit_hits"]:
        advice = advice_on_limit(
            hits[0], measurement.get("recompile_reasons") or (), measurement.get("graph_break_reasons") or ()
        )
        limit = f"torch stopped compiling and runs eagerly, because {_sentence(hits[0])}; {advice}"
    if numerics["status"] != "ok":
        label = Label(numerics["status"].replace("_", "-"))
        reason = _numerics_reason(label, numerics)
        return verdict_of(label, f"{reason}; and {limit}" if limit and advice not in reason else reason)
    if limit:
        return verdict_of(Label.RECOMPILE_LIMIT, limit)
    if fallbacks := measurement["fallbacks"]:
        return verdict_of(Label.SILENT_FALLBACK, reason_of_fallback(fallbacks, measurement.get("graph_break_reasons") or ()))
    if claims_cudagraphs and measurement["cudagraph_skips"]:
        reasons = measurement["cudagraph_skip_reasons"] or ["torch gave no reason"]
        reason = f"CUDA graphs were asked for and not used: {_sentence(reasons[0])}"
        return verdict_of(Label.CUDAGRAPHS_SKIPPED, f"{reason}; {advice_on_cudagraph_skip(reasons[0])}")
    share = measurement["data_wait_share"]
    if (
        share is not None and share > MAX_DATA_WAIT_SHARE and measurement.get("pipeline") != "script"
    ):  # its figures leave this out
        return verdict_of(
            Label.INPUT_BOUND,
            f"waits for data {share:.0%} of the time (allowed {MAX_DATA_WAIT_SHARE:.0%}), so the figure measures the input "
            "pipeline; make the loader faster, or time the compute alone with --pipeline resident",
        )
    if neighbours := measurement.get("gpu_neighbours"):
        return verdict_of(
            Label.GPU_SHARED,
            f"the trial did not have the GPU to itself: {_sentence('; '.join(neighbours))}; measure it again when it does",
        )
    return OK


def reason_of_fallback(fallbacks: Sequence[str], breaks: Sequence[str]) -> str:
    """Returns a sentence on what runs eagerly that should be compiled, with what to do.

    Args:
        fallbacks: A record's `fallbacks`, at least one.
        breaks: The record's `graph_break_reasons`.
    """
    others = f" (and {len(fallbacks) - 1} more)" if len(fallbacks) > 1 else ""
    advised = naming_first_break(advice_on_fallback(fallbacks[0], breaks) or "", breaks)
    reason = f"torch did not compile all that it should: {_sentence(fallbacks[0])}{others}"
    return f"{reason}; {advised}" if advised else reason


_HEADLINE_LENGTH = 80  # characters of what torch says of a break, where advice names it
_UNNAMED_BREAK = re.compile(r"fix the break inside (it|the loop) first(?=;|$)")


def naming_first_break(advice: str, breaks: Sequence[str]) -> str:
    """Returns the advice and, where it says to fix a break inside something first, which one that is: the first of the others.

    Args:
        advice: What helps, or a line that ends with it.
        breaks: A record's `graph_break_reasons`.
    """
    if unnamed := _UNNAMED_BREAK.search(advice):
        for text in breaks:
            if (own := advice_on_break(text)) is None or not _UNNAMED_BREAK.search(own):
                place, _, headline = text.partition("\n")[0].partition(": ")
                which = f"{textwrap.shorten(headline, _HEADLINE_LENGTH, placeholder=' …')} at {place}"
                return f"{advice[: unnamed.end()]}, {which}{advice[unnamed.end() :]}"
    return advice


def judge_warm_start(start: Mapping[str, Any]) -> Verdict:
    """Judges a warm start: was it warm? Figures of caches are missing if they could not be watched."""
    if start.get("cache_hits"):
        return OK
    if not start.get("cache_restored"):
        return verdict_of(Label.NOT_WARM, "none of its artifacts could be restored, so this was a cold start; see its log")
    return verdict_of(Label.NOT_WARM, "the compiler found nothing it could use among its artifacts, so this was a cold start")


def _numerics_reason(label: Label, numerics: Mapping[str, Any]) -> str:
    if label is Label.EAGER_UNSTABLE:
        what = "eager itself is not finite or not reproducible on these batches, so the numbers cannot be checked"
        return f"{what}: {_sentence(numerics['worst'])}"
    if label is Label.DIVERGES:
        since = "" if numerics["first_bad_step"] is None else f" from step {numerics['first_bad_step']} on"
        advice = f"; {numerics['advice']}" if numerics.get("advice") else ""
        if (numerics.get("gradient_check") or {}).get("outcome") == "wrong":
            return f"{_sentence(numerics['worst'])}{advice}"
        return f"does not follow eager on the same batches{since}: {_sentence(numerics['worst'])}{advice}"
    if numerics["first_bad_step"] is not None:
        return f"loss or gradients are not finite from step {numerics['first_bad_step']} on; eager is, on the same batches"
    bad = numerics["first_bad_steady_step"]
    if numerics.get("last_loss") is not None:
        return f"the loss of timed step {bad} is not finite, although training goes on"
    return f"the loss is not finite from timed step {bad} on"


def judge_death(death: Death) -> Verdict:
    """Judges an attempt without a measurement: what ended it?"""
    return _judge_silence(death) if death.error_type is None else _judge_exception(death, death.error_type)


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an exception says that the device or the host ran out of memory, whichever library raised it."""
    return _OUT_OF_MEMORY.search(f"{type(error).__name__} {error}") is not None


@contextmanager
def may_run_out_of_memory(*, unless: bool = False) -> Iterator[None]:
    """Ends the block, and nothing else, where the device's or the host's memory does not suffice."""
    try:
        yield
    except Exception as error:
        if unless or not is_out_of_memory(error):
            raise


def is_let_down(error_type: str, text: str) -> bool:
    """Tells whether a worker's exception says only that another worker of its group was gone."""
    return _PEERS_GONE.search(f"{error_type} {text}") is not None


def _judge_exception(death: Death, error_type: str) -> Verdict:
    where = f"in phase {death.phase}"
    text = f"{error_type.rpartition('.')[2]}: {_sentence(death.error_text)}"
    everything = f"{error_type} {death.error_text}"
    if death.nodes_lost:
        return _node_lost(death, where)
    if lost := _device_lost(death, everything, text):
        return lost
    if _OUT_OF_MEMORY.search(everything):
        return verdict_of(Label.OUT_OF_MEMORY, f"out of memory {where}: {text}; {MEMORY_ADVICE}")
    if _NO_ROOM.search(everything):
        return verdict_of(Label.DISK_FULL, f"a disk was full {where}: {text}")
    if _DEVICE_FAULT.search(everything):
        return verdict_of(Label.DEVICE_FAULT, f"the GPU stopped a faulty kernel {where}: {text}")
    if _CUT_SHORT.search(everything):
        half = "a process that was killed left half of that file, which is no fault of the setting: remove it, and try again"
        return verdict_of(Label.EXCEPTION, f"{text} ({where}); {half}")
    if error_type.startswith("ray."):
        return verdict_of(Label.ACTOR_LOST, f"an actor or object that the trial needed was gone {where}: {text}")
    if death.num_workers > 1 and is_let_down(error_type, death.error_text):
        return verdict_of(Label.WORKER_DIED, f"a worker died without an exception {where}; another one says {text}")
    if error_type.endswith(".FailOnRecompileLimitHit") and death.recompiles:
        last = death.recompiles[-1]
        limit = f"with fullgraph=on, torch fails at its recompile limit: {_sentence(last)}"
        return verdict_of(Label.RECOMPILE_LIMIT, f"{limit}; {advice_on_limit(last, death.recompiles)}")
    if error_type.endswith(".FellBackError"):
        return verdict_of(Label.SILENT_FALLBACK, death.error_text)
    if not death.error_is_compilers:
        advice, label = advice_on_exception(death.error_text), Label.EXCEPTION
    else:
        advice, label = advice_on_error(death.error_text, left_out_in(death.error_text)), Label.COMPILE_ERROR
        stack = re.split(r"from user code:|User stack:", death.error_text, maxsplit=1)[1:]  # the latter of a length it fixes
        lines = re.findall(r'File "([^"]+)", line (\d+), in ', "".join(stack))
        if place := place_in_code([(path, int(line)) for path, line in lines]):
            text = f"{text.rstrip('.')}, at {place}"
    return verdict_of(label, f"{text} ({where}){f'; {advice}' if advice else ''}")


def _judge_silence(death: Death) -> Verdict:
    where = f"in phase {death.phase}"
    if death.nodes_lost:
        return _node_lost(death, where)
    if lost := _device_lost(death, death.error_text, _sentence(death.error_text)):
        return lost
    if death.oom_killed or _HOST_FULL.search(death.error_text):
        by = "the kernel" if death.oom_killed else "Ray"
        return verdict_of(Label.OUT_OF_MEMORY, f"the host ran out of memory {where}, and {by} ended a worker")
    if _OUT_OF_MEMORY.search(death.error_text):
        return verdict_of(Label.OUT_OF_MEMORY, f"out of memory {where}: {_sentence(death.error_text)}")
    if death.fatal is not None:
        return verdict_of(Label.CRASHED, f"{_sentence(death.fatal)} {where}, outside Python; the stacks are in the trial's log")
    if _NO_ROOM.search(death.error_text):
        return verdict_of(Label.DISK_FULL, f"a disk was full {where}: {_sentence(death.error_text)}")
    in_time, said = death.elapsed_s < death.trial_deadline_s, _died_early(death.startup_error)
    if death.phase == Phase.WARMING_UP and (death.in_phase_s >= death.compile_deadline_s or (death.timed_out and in_time)):
        late = f"still compiling or warming up after {death.compile_deadline_s:g} s; killed by the deadline"
        if len(again := death.recompiles) > _USUAL_RECOMPILES:
            late += f"; torch had compiled {len(again)} times anew, lately {_sentence(again[-1])}"
            late += f"; {advice_on_limit(again[-1], again)}"
        return verdict_of(Label.COMPILE_DEADLINE, late)
    if not death.has_started and (death.timed_out or not in_time or _SLOW_START.search(death.error_text)):
        return _not_in_time(death.elapsed_s, said)
    if death.timed_out or not in_time:
        late = f"not done after {death.trial_deadline_s:g} s, {where}; killed by the deadline"
        return verdict_of(Label.TRIAL_DEADLINE, f"{late}{said}")
    return verdict_of(Label.WORKER_DIED, f"a worker died without an exception {where}: {_sentence(death.error_text)}{said}")


def _device_lost(death: Death, everything: str, text: str) -> Verdict | None:
    """Returns a verdict if no process can use the GPU, whatever its work; None otherwise."""
    if death.phase == Phase.STARTING and _GPU_FULL.search(everything):
        return verdict_of(Label.DEVICE_LOST, f"the GPU was full before the trial used it: {text}")
    if _DEVICE_LOST.search(everything):
        return verdict_of(Label.DEVICE_LOST, f"the GPU failed in phase {death.phase}, which no setting can cause: {text}")
    return None


def _node_lost(death: Death, where: str) -> Verdict:
    lost = "the host of a worker" if death.nodes_lost == 1 else f"{death.nodes_lost} hosts of workers"
    return verdict_of(Label.NODE_LOST, f"{lost} left the cluster {where}")


def _died_early(startup_error: str) -> str:
    return f"; a worker died before its first line: {_sentence(startup_error)}" if startup_error else ""


def _not_in_time(elapsed_s: float, said: str) -> Verdict:
    """Returns the verdict on a trial none of whose workers had started, which says nothing about its setting."""
    why = said or ", as on a host that is too busy"
    return verdict_of(Label.NOT_STARTED, f"no worker had started after {elapsed_s:.0f} s, which is no fault of the setting{why}")


def judge_trial_death(
    elapsed_s: float, trial_deadline_s: float, error_text: str, startup_error: str = "", *, has_started: bool = True
) -> Verdict:
    """Judges a trial whose own process ended, after `elapsed_s` with a host, before it could write its record."""
    said = _died_early(startup_error)
    if elapsed_s >= trial_deadline_s and not has_started:
        return _not_in_time(elapsed_s, said)
    if elapsed_s >= trial_deadline_s:
        late = f"not done after {trial_deadline_s:g} s and its workers did not end; killed"
        return verdict_of(Label.TRIAL_DEADLINE, f"{late}{said}")
    return verdict_of(Label.TRIAL_DIED, f"the trial's own process failed: {_sentence(error_text)}{said}")


def verdict_of(label: Label, reason: str) -> Verdict:
    """Returns the verdict for a label."""
    return Verdict(status=label.status, label=label, reason=reason)


def _sentence(text: str) -> str:
    """Returns the first informative line, cut to a readable length.

    `backend='inductor' raised:` only introduces the next one, and an operator's own error ends the line after Dynamo's.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    if said := re.search(r"making fake tensor call\n.*: got \w+\(['\"](.*)['\"]\)$", text, re.MULTILINE):
        lines = [f"{lines[0]}: {said[1]}"]
    line = " ".join(lines[:2]) if lines[0].endswith(" raised:") else lines[0]
    return line if len(line) <= _SENTENCE_LENGTH else line[:_SENTENCE_LENGTH] + "…"


FIRST_BACKOFF_S = 2.0
LONGEST_BACKOFF_S = 30.0


def was_lost_to_precompile(failed: Sequence[str]) -> bool:
    """Tells whether `--precompile` ended one of these failed attempts, given by their reasons."""
    return any(reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)


def backoff_s(label: Label | None, failed: Sequence[str]) -> float | None:
    """Returns the seconds to wait before the next attempt, after those that `failed` by themselves; None for no more."""
    attempts = 1 + sum(not reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)
    if label is None or attempts >= label.tries:
        return None
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempts - 1)))


def exit_text(code: int) -> str:
    """Describes how a process ended, such as `exit code 3` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
