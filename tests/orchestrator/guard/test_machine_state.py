"""What a sweep says before its first trial about a machine that is not idle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.guard import machine_state as module
from orchestrator.guard.machine_state import GpuState, MachineState, machine_state

GIB = 2**30
IDLE = MachineState(
    load=0.4,
    cores=16,
    available_memory_bytes=100 * GIB,
    free_disk_bytes={"/data": 500 * GIB},
    gpus=(GpuState(index=0, used_bytes=GIB // 2, total_bytes=80 * GIB, num_processes=0),),
)


def test_an_idle_machine_is_worth_no_word() -> None:
    assert IDLE.warnings() == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (replace(IDLE, load=12.34), "a load of 12.3 on 16 cores"),
        (replace(IDLE, available_memory_bytes=GIB), "only 1.0 GiB of memory"),
        (replace(IDLE, free_disk_bytes={"/data": 500 * GIB, "/tmp": GIB}), "only 1.0 GiB are free on the disk of /tmp"),
        (
            replace(IDLE, gpus=(GpuState(index=1, used_bytes=40 * GIB, total_bytes=80 * GIB, num_processes=2),)),
            "GPU 1 is in use by 2 processes: 40.0 of 80 GiB",
        ),
        (
            replace(IDLE, gpus=(GpuState(index=0, used_bytes=9 * GIB, total_bytes=80 * GIB, num_processes=0),)),
            "GPU 0 is in use: 9.0 of 80 GiB",
        ),
    ],
)
def test_what_would_disturb_a_sweep_is_one_sentence(state: MachineState, words: str) -> None:
    (sentence,) = state.warnings()
    assert words in sentence


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    seen = machine_state(tmp_path / "not" / "there", use_gpu=False)
    assert seen.load == 99.0
    assert seen.gpus == ()
    assert seen.available_memory_bytes
    assert all(free > 0 for free in seen.free_disk_bytes.values())


def test_gpus_are_asked_for_what_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda: ["a"])
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=7 * GIB, total=80 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [1],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(module.pynvml, name, answer)
    assert machine_state(tmp_path, use_gpu=True).gpus == (
        GpuState(index=0, used_bytes=7 * GIB, total_bytes=80 * GIB, num_processes=1),
    )
