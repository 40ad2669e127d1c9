"""A toy workload that breaks on purpose: the file named by CHAOS_PLAN says what happens to which setting.

Settings are identified by their pad multiple. Every worker that begins, and every fault, adds a line to the plan's file of
events.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toy_workloads import Brief, make_known

from compile_sweep.contract.base import Batch
from compile_sweep.schema.shapes import PadToLongest, ShapePolicy

PLAN = "CHAOS_PLAN"
FOREVER_S = 600


def plan() -> dict[str, Any]:
    """Returns `faults`, by pad multiple; `events`, a file; optionally `tiny`, a small disk, and `cgroup`, with little memory."""
    return dict(json.loads(Path(os.environ[PLAN]).read_text()))


def events(path: Path) -> list[dict[str, Any]]:
    """Returns what happened so far, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(path: Path, what: str, multiple: int) -> None:
    """Adds an event; the clock is the host's, the same for all its processes."""
    line = json.dumps({"what": what, "multiple": multiple, "at": time.monotonic(), "pid": os.getpid()})
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)


class Chaotic(Brief):
    """Sound, except for its faults."""

    def __init__(self, size: str, seed: int) -> None:
        super().__init__(size, seed)
        make_known("chaos_stuck", _compiles_for_ever)

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        self._multiple = (policy.multiple or 0) if isinstance(policy, PadToLongest) else 0
        self._is_sabotaged = False
        if rank == 0:
            note(Path(plan()["events"]), "begun", self._multiple)
        self._break("building", rank)
        return super().pool(policy, rank=rank, device=device)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if hasattr(self, "_multiple") and str(self._multiple) in plan()["faults"]:
            if self._is_sabotaged:  # built again, for a reference or the check
                self._break(_phase(), 0)
            else:  # the first model after the pool is the measured one
                self._is_sabotaged = True
                model.register_forward_pre_hook(lambda module, inputs: self._break(_phase(), 0))
        return model

    def _break(self, phase: str, rank: int) -> None:
        chosen = plan()
        fault = chosen["faults"].get(str(self._multiple))
        if fault is None or fault["phase"] != phase or fault.get("rank", 0) != rank:
            return
        path = Path(chosen["events"])
        before = self._how_many("fault", path)
        while rank > 0 and self._how_many("begun", path) <= before:  # the first worker announces the others, and may be late
            time.sleep(0.05)
        if before < fault.get("times", 1_000):
            note(path, "fault", self._multiple)
            FAULTS[fault["kind"]](chosen)

    def _how_many(self, what: str, path: Path) -> int:
        return sum(event["what"] == what and event["multiple"] == self._multiple for event in events(path))


def _phase() -> str:
    """Returns the phase this worker is in, from its own log."""
    log = Path(os.readlink("/proc/self/fd/1")).read_text(errors="replace")
    phases = [
        line.split(" ", 1)[1]
        for line in log.splitlines()
        if re.match(r"\S+ (building|warming-up|steady|checking|eager-runs)$", line)
    ]
    return phases[-1] if phases else "starting"


def _raise(chosen: dict[str, Any]) -> None:
    raise RuntimeError("this workload does not like it here")


def _exit(chosen: dict[str, Any]) -> None:
    os._exit(3)


def _segfault(chosen: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _abort(chosen: dict[str, Any]) -> None:
    os.abort()


def _kill(chosen: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(chosen: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _pause(chosen: dict[str, Any]) -> None:
    time.sleep(float(chosen.get("pause_s", 10.0)))


def _hang(chosen: dict[str, Any]) -> None:
    _start_a_child()
    time.sleep(FOREVER_S)


def _hold_the_interpreter(chosen: dict[str, Any]) -> None:
    _start_a_child()
    # Unlike CDLL, PyDLL keeps the GIL during a call. A loop would hold it just as well, and take a core from other tests.
    ctypes.PyDLL(None).sleep(FOREVER_S)


def _exhaust_the_address_space(chosen: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    torch.empty(1 << 33, dtype=torch.uint8)


def _exhaust_a_cgroup(chosen: dict[str, Any]) -> None:
    (Path(chosen["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
    _hog(1 << 34)


def _fill_a_disk(chosen: dict[str, Any]) -> None:
    with open(Path(chosen["tiny"]) / f"{os.getpid()}", "wb") as file:
        file.write(b"x" * (1 << 26))


def _exhaust_the_device(chosen: dict[str, Any]) -> None:
    torch.empty(1 << 42, dtype=torch.uint8, device="cuda")


def _write_far(chosen: dict[str, Any]) -> None:
    from illegal_kernel import write_far

    write_far()


def _assert_on_the_device(chosen: dict[str, Any]) -> None:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()


def _hog(number: int) -> None:
    """Allocates this many bytes and touches them, so that they are really used."""
    step = 1 << 26
    held = []
    for _ in range(number // step):
        area = mmap.mmap(-1, step)
        area.write(b"x" * step)
        held.append(area)
        time.sleep(0.02)
    threading.current_thread().held = held  # type: ignore[attr-defined]  # for as long as this thread lives


def _start_a_child() -> None:
    """Starts a child like a compile worker: in a session of its own, outside the worker's group."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"], start_new_session=True)


FAULTS = {
    "exception": _raise,
    "exit": _exit,
    "segfault": _segfault,
    "abort": _abort,
    "kill": _kill,
    "stop": _stop,
    "pause": _pause,
    "hang": _hang,
    "stuck": _hold_the_interpreter,
    "address-space": _exhaust_the_address_space,
    "cgroup": _exhaust_a_cgroup,
    "disk": _fill_a_disk,
    "device-memory": _exhaust_the_device,
    "illegal-access": _write_far,
    "device-assert": _assert_on_the_device,
}


def _compiles_for_ever(graph: object, inputs: object) -> None:
    note(Path(plan()["events"]), "fault", -1)
    _hold_the_interpreter(plan())
