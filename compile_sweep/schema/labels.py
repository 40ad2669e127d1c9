"""What became of an attempt, decided purely: evidence in, status and label and reason out.

Which attempts are repeated, how often and after how long. Pure.

A fault of the machines says nothing about the setting, so the setting is tried again, later each time: what failed may need time
to come back. A fault of the setting is a result. A worker that went without a word may be either, and gets one more chance.
Where traced functions are kept, torch may be at fault, which can do that for some only, so the setting gets a chance without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from compile_sweep.schema.phases import Phase
from compile_sweep.schema.record import LOST_TO_MACHINES, Status

MAX_DATA_WAIT_SHARE = 0.05
"""Share of a step that may be waiting for data before the figure is the input pipeline's rather than the setting's."""

_SENTENCE_LENGTH = 300


class Label(StrEnum):
    """Why an attempt is not ok."""

    NAN = "nan"
    DIVERGES = "diverges"
    EAGER_UNSTABLE = "eager-unstable"
    RECOMPILE_LIMIT = "recompile-limit"
    CUDAGRAPHS_SKIPPED = "cudagraphs-skipped"
    SILENT_FALLBACK = "silent-fallback"
    INPUT_BOUND = "input-bound"
    OUT_OF_MEMORY = "out-of-memory"
    COMPILE_ERROR = "compile-error"
    COMPILE_DEADLINE = "compile-deadline"
    TRIAL_DEADLINE = "trial-deadline"
    EXCEPTION = "exception"
    CRASHED = "crashed"
    DEVICE_FAULT = "device-fault"
    DEVICE_LOST = "device-lost"
    DISK_FULL = "disk-full"
    GPU_SHARED = "gpu-shared"
    NODE_LOST = "node-lost"
    ACTOR_LOST = "actor-lost"
    WORKER_DIED = "worker-died"
    TRIAL_DIED = "trial-died"
    NOT_WARM = "not-warm"
    DOMINATED = "dominated"


_INFEASIBLE = {
    Label.NAN,
    Label.DIVERGES,
    Label.RECOMPILE_LIMIT,
    Label.CUDAGRAPHS_SKIPPED,
    Label.SILENT_FALLBACK,
    Label.INPUT_BOUND,
    Label.OUT_OF_MEMORY,
    Label.COMPILE_ERROR,
    Label.COMPILE_DEADLINE,
    Label.DEVICE_FAULT,
}
"""Labels that are a property of the setting; the others say nothing certain about it."""

INFRASTRUCTURE = frozenset(map(Label, LOST_TO_MACHINES))
"""Labels that are a property of the machines: the setting is tried again, and again when the sweep is resumed."""

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemory|MemoryError|out of memory|(?:can't|[Cc]annot) allocate memory|low on memory|memory usage threshold"
)
_HOST_FULL = re.compile(r"low on memory|memory usage threshold")
"""What Ray's memory monitor says of a worker that it ended."""

_GPU_FULL = re.compile(r"CUDA error: out of memory")
"""What CUDA says to a process that finds no room for its context, of which the setting is no part yet."""

_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
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
"""What a worker's exception says that was only let down by another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Status, and why if it is not ok."""

    status: Status
    label: Label | None = None
    reason: str | None = None


OK = Verdict(status=Status.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What is known of an attempt that returned no measurement."""

    phase: str
    """The last phase a worker reported."""
    in_phase_s: float
    """Seconds since it did."""
    elapsed_s: float
    """Seconds since the trial began."""
    compile_deadline_s: float
    trial_deadline_s: float
    error_type: str | None = None
    """Class name of the exception a worker raised, dotted; None if it died without one."""
    error_text: str = ""
    error_is_compilers: bool = False
    """Whether the exception came out of the compiler."""
    num_workers: int = 1
    """Of the trial."""
    fatal: str | None = None
    """What Python wrote when a signal ended a worker, like "Segmentation fault"; None if it wrote nothing."""
    timed_out: bool = False
    """Whether a worker wrote that its deadline ended it."""
    oom_killed: bool = False
    """Whether the kernel ended a process of a worker's host for want of memory as the worker went."""
    nodes_lost: int = 0
    """Hosts of the trial's workers that left the cluster."""


def judge_measurement(measurement: Mapping[str, Any], *, claims_cudagraphs: bool) -> Verdict:
    """A measured attempt: is the setting fit to be used?

    What makes a setting unusable comes before what only makes its figure uncertain. Noise alone is no reason: the record's
    interval says how uncertain its figure is, and fronts go by the interval's worse end.

    Args:
        measurement: `compile_sweep.harness.measure.Measurement.to_dict()`.
        claims_cudagraphs: whether the settings say that CUDA graphs are used.
    """
    numerics = measurement["numerics"]
    if numerics["status"] != "ok":
        label = Label(numerics["status"].replace("_", "-"))
        return _verdict(label, _numerics_reason(label, numerics))
    if hits := measurement["recompile_limit_hits"]:
        advice = "use fewer lengths, dynamic=mark, or a higher recompile_limit"
        return _verdict(Label.RECOMPILE_LIMIT, f"runs some sizes eagerly, because {_sentence(hits[0])}; {advice}")
    if fallbacks := measurement["fallbacks"]:
        others = f" (and {len(fallbacks) - 1} more)" if len(fallbacks) > 1 else ""
        return _verdict(Label.SILENT_FALLBACK, f"not all is compiled that should be: {_sentence(fallbacks[0])}{others}")
    if claims_cudagraphs and measurement["cudagraph_skips"]:
        reasons = measurement["cudagraph_skip_reasons"] or ["torch gave no reason"]
        return _verdict(Label.CUDAGRAPHS_SKIPPED, f"CUDA graphs were asked for and not used: {_sentence(reasons[0])}")
    share = measurement["data_wait_share"]
    if share is not None and share > MAX_DATA_WAIT_SHARE:
        return _verdict(
            Label.INPUT_BOUND,
            f"waits for data {share:.0%} of the time (allowed {MAX_DATA_WAIT_SHARE:.0%}), so the figure is the input pipeline's; "
            "make the loader faster, or time the compute alone with --pipeline resident",
        )
    if neighbours := measurement.get("gpu_neighbours"):
        return _verdict(
            Label.GPU_SHARED,
            f"the GPU was not the trial's alone: {_sentence('; '.join(neighbours))}; measure it again when it is",
        )
    return OK


def judge_warm_start(start: Mapping[str, Any]) -> Verdict:
    """A start from artifacts: was it one?

    Args:
        start: figures of a `WarmStart`.
    """
    if start["cache_hits"]:
        return OK
    if not start["cache_restored"]:
        return _verdict(Label.NOT_WARM, "none of its artifacts could be had, so this was a cold start; see its log")
    return _verdict(Label.NOT_WARM, "the compiler found nothing it could use among its artifacts, so this was a cold start")


def _numerics_reason(label: Label, numerics: Mapping[str, Any]) -> str:
    if label is Label.EAGER_UNSTABLE:
        what = "eager itself is not finite or not reproducible on these batches, so the numbers cannot be checked"
        return f"{what}: {_sentence(numerics['worst'])}"
    if label is Label.DIVERGES:
        since = "" if numerics["first_bad_step"] is None else f" from step {numerics['first_bad_step']} on"
        return f"does not follow eager on the same batches{since}: {_sentence(numerics['worst'])}"
    if numerics["first_bad_step"] is not None:
        return f"loss or gradients are not finite from step {numerics['first_bad_step']} on; eager is, on the same batches"
    return f"the loss is not finite from timed step {numerics['first_bad_steady_step']} on"


def judge_death(death: Death) -> Verdict:
    """An attempt without a measurement: what ended it?"""
    return _judge_silence(death) if death.error_type is None else _judge_exception(death, death.error_type)


def is_let_down(error_type: str, text: str) -> bool:
    """Whether a worker's exception says only that another worker of its group was gone."""
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
        return _verdict(Label.OUT_OF_MEMORY, f"out of memory {where}: {text}")
    if _NO_ROOM.search(everything):
        return _verdict(Label.DISK_FULL, f"a disk was full {where}: {text}")
    if _DEVICE_FAULT.search(everything):
        return _verdict(Label.DEVICE_FAULT, f"a kernel did what the GPU forbids {where}: {text}")
    if error_type.startswith("ray."):
        return _verdict(Label.ACTOR_LOST, f"an actor or object that the trial needed was gone {where}: {text}")
    if death.num_workers > 1 and is_let_down(error_type, death.error_text):
        return _verdict(Label.WORKER_DIED, f"a worker died without an exception {where}; another one says {text}")
    return _verdict(Label.COMPILE_ERROR if death.error_is_compilers else Label.EXCEPTION, f"{text} ({where})")


def _judge_silence(death: Death) -> Verdict:
    where = f"in phase {death.phase}"
    if death.nodes_lost:
        return _node_lost(death, where)
    if lost := _device_lost(death, death.error_text, _sentence(death.error_text)):
        return lost
    if death.oom_killed or _HOST_FULL.search(death.error_text):
        by = "the kernel" if death.oom_killed else "Ray"
        return _verdict(Label.OUT_OF_MEMORY, f"the host ran out of memory {where}, and {by} ended a worker")
    if _OUT_OF_MEMORY.search(death.error_text):
        return _verdict(Label.OUT_OF_MEMORY, f"out of memory {where}: {_sentence(death.error_text)}")
    if death.fatal is not None:
        return _verdict(Label.CRASHED, f"{_sentence(death.fatal)} {where}, outside Python; the stacks are in the trial's log")
    if _NO_ROOM.search(death.error_text):
        return _verdict(Label.DISK_FULL, f"a disk was full {where}: {_sentence(death.error_text)}")
    in_time = death.elapsed_s < death.trial_deadline_s
    if death.phase == Phase.WARMING_UP and (death.in_phase_s >= death.compile_deadline_s or (death.timed_out and in_time)):
        return _verdict(
            Label.COMPILE_DEADLINE, f"still compiling or warming up after {death.compile_deadline_s:g} s; killed by the deadline"
        )
    if death.timed_out or not in_time:
        return _verdict(Label.TRIAL_DEADLINE, f"not done after {death.trial_deadline_s:g} s, {where}; killed by the deadline")
    return _verdict(Label.WORKER_DIED, f"a worker died without an exception {where}: {_sentence(death.error_text)}")


def _device_lost(death: Death, everything: str, text: str) -> Verdict | None:
    """Where no process can work on the GPU, whatever it is to do."""
    if death.phase == Phase.STARTING and _GPU_FULL.search(everything):
        return _verdict(Label.DEVICE_LOST, f"the GPU was full before anything of the setting was on it: {text}")
    if _DEVICE_LOST.search(everything):
        return _verdict(Label.DEVICE_LOST, f"the GPU failed in phase {death.phase}, which no setting can make it: {text}")
    return None


def _node_lost(death: Death, where: str) -> Verdict:
    lost = "the host of a worker" if death.nodes_lost == 1 else f"{death.nodes_lost} hosts of workers"
    return _verdict(Label.NODE_LOST, f"{lost} left the cluster {where}")


def judge_trial_death(elapsed_s: float, trial_deadline_s: float, error_text: str) -> Verdict:
    """A trial whose own process ended before it could write its record.

    Args:
        elapsed_s: seconds since it began, or had a host.
        trial_deadline_s: after which it ends itself if its workers cannot be ended.
        error_text: what Tune says of it.
    """
    if elapsed_s >= trial_deadline_s:
        return _verdict(Label.TRIAL_DEADLINE, f"not done after {trial_deadline_s:g} s and its workers did not end; killed")
    return _verdict(Label.TRIAL_DIED, f"the trial's own process failed: {_sentence(error_text)}")


def judge_stop(label: Label, reason: str) -> Verdict:
    """A trial that was stopped because going on was not worth it."""
    return _verdict(label, reason)


def _verdict(label: Label, reason: str) -> Verdict:
    if label is Label.DOMINATED:
        return Verdict(status=Status.STOPPED, label=label, reason=reason)
    return Verdict(status=Status.INFEASIBLE if label in _INFEASIBLE else Status.FAILED, label=label, reason=reason)


def _sentence(text: str) -> str:
    """The first line that says something, cut to a readable length."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= _SENTENCE_LENGTH else line[:_SENTENCE_LENGTH] + "…"


FIRST_BACKOFF_S = 2.0
LONGEST_BACKOFF_S = 30.0

MOST_ATTEMPTS = {
    Label.NODE_LOST: 4,
    Label.ACTOR_LOST: 4,
    Label.TRIAL_DIED: 4,
    Label.DEVICE_LOST: 3,
    Label.DISK_FULL: 3,
    Label.WORKER_DIED: 2,
}
"""Attempts in all, by what ended the latest; a label that is not here is not tried again."""

OF_PRECOMPILE = frozenset({Label.COMPILE_ERROR, Label.EXCEPTION, Label.CRASHED})
"""What ends an attempt that keeps traced functions where torch cannot keep or load one of them."""

LOST_TO_PRECOMPILE = "with --precompile: "
"""What the reason of such an attempt begins with: a process that goes on with a trial knows only reasons of its attempts."""


def was_lost_to_precompile(failed: Sequence[str]) -> bool:
    """Whether one of a trial's attempts, given their reasons, was ended by keeping traced functions."""
    return any(reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)


def backoff_s(label: Label | None, failed: Sequence[str]) -> float | None:
    """Seconds to wait before the next attempt; None if there is to be none.

    Args:
        label: of the latest attempt; None if it was ok.
        failed: why each attempt before it failed. One lost to keeping traced functions does not count.
    """
    attempts = 1 + sum(not reason.startswith(LOST_TO_PRECOMPILE) for reason in failed)
    if label is None or attempts >= MOST_ATTEMPTS.get(label, 1):
        return None
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempts - 1)))
