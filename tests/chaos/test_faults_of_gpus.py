"""Faults of a GPU: no memory, kernels with invalid accesses, and other processes. No fault affects the next trial."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from arena import Arenas, setting, when
from fault_table import FaultTable, Row, described
from samples import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.gpu, pytest.mark.timeout(600)]

STRANGER = (
    "import time, torch; held = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print('up', flush=True); time.sleep(600)"
)
SLACK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """A fault of a trial, and its expected outcome."""

    name: str
    kind: str
    phase: str
    label: str
    status: str
    how: str


FAULTS = {
    2: GpuFault(
        name="device out of memory",
        kind="device-memory",
        phase="building",
        label="out-of-memory",
        status="infeasible",
        how="allocates a tensor of 4 TiB",
    ),
    3: GpuFault(
        name="illegal memory access",
        kind="illegal-access",
        phase="steady",
        label="device-fault",
        status="infeasible",
        how="a Triton kernel writes 4 TiB past its tensor, between timed steps",
    ),
    4: GpuFault(
        name="device-side assert",
        kind="device-assert",
        phase="warming-up",
        label="device-fault",
        status="infeasible",
        how="an index out of bounds, while warming up",
    ),
}
SHARED = 5


def used_bytes() -> int:
    """Returns the memory in use on the GPUs this process sees, according to the driver; the host may have other GPUs."""
    import pynvml

    pynvml.nvmlInit()
    try:
        told = os.environ.get("CUDA_VISIBLE_DEVICES")
        indices = range(pynvml.nvmlDeviceGetCount()) if told is None else map(int, told.split(","))
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, indices)
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def test_faults_of_a_gpu_reach_no_other_trial_and_strangers_are_noticed(arenas: Arenas, fault_table: FaultTable) -> None:
    faults = {multiple: {"kind": fault.kind, "phase": fault.phase} for multiple, fault in FAULTS.items()}
    arena = arenas({**faults, SHARED: {"kind": "pause", "phase": "building"}}, further={"pause_s": 30.0})
    before_bytes = used_bytes()
    multiples = [0, *FAULTS, 1, SHARED]  # 1 comes right after an unusable context
    words = ("--device", "cuda", "--cache-store", "none", "--no-confirm", "--max-concurrent", "1", "--settings")
    running = arena.start(*words, *map(setting, multiples))
    when(lambda: arena.has_begun(SHARED) or running.poll() is not None)
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "up\n"
        when(lambda: len(arena.records()) == len(multiples) or running.poll() is not None)
    finally:
        stranger.kill()
        stranger.communicate()
    done = arena.finish(running)
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=len(multiples), measured={0, 1})
    for multiple, fault in FAULTS.items():
        record = arena.record(multiple)
        assert (record["label"], record["status"], record["phase"]) == (fault.label, fault.status, fault.phase), record
        row = Row(
            name=fault.name,
            how=fault.how,
            outcome=described(record),
            tries=record["tries"],
            recovery_s=arena.recovery_s(multiple),
        )
        fault_table.tell(row)
    shared = arena.record(SHARED)
    assert shared["gpu_neighbours"], shared
    assert (shared["label"], shared["phase"]) == ("gpu-shared", "done"), shared
    assert shared["samples_per_s"] > 0
    fault_table.tell(
        Row(
            name="another process on the GPU",
            how="holds 1 GiB from before the first step on",
            outcome=f"measured and flagged: {described(shared)}",
            tries=shared["tries"],
            recovery_s=None,
        )
    )
    wait_until(lambda: used_bytes() < before_bytes + SLACK_BYTES, 10)


def test_a_killed_worker_leaves_no_memory_on_the_gpu(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({2: {"kind": "hang", "phase": "steady", "times": 1}})
    before_bytes = used_bytes()
    words = ("--device", "cuda", "--cache-store", "none", "--no-confirm", "--max-concurrent", "1", "--settings")
    running = arena.start(*words, *map(setting, (0, 2)))
    when(lambda: any(event["what"] == "fault" for event in arena.events()) or running.poll() is not None)
    assert used_bytes() > before_bytes
    began = time.monotonic()
    running.kill()
    running.communicate(timeout=60)
    arena.check_nothing_is_left()
    wait_until(lambda: used_bytes() < before_bytes + SLACK_BYTES, 10)
    freed_s = time.monotonic() - began
    again = arena.sweep("--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    arena.check_records(total=2, measured={0, 2})
    fault_table.tell(
        Row(
            name="driver killed while a worker holds the GPU",
            how="SIGKILL between timed steps, then `--resume`",
            outcome=f"the GPU's memory is free again after {freed_s:.1f} s; the trial in flight runs again",
            tries=2,
            recovery_s=None,
        )
    )
