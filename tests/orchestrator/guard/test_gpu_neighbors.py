"""Other processes on a GPU, with an NVML that answers like real ones inside and outside containers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.guard import gpu_neighbors
from orchestrator.guard.gpu_neighbors import GpuNeighborMonitor

GIB = 2**30


class FakeNvml:
    """A driver with one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *pids: int, used_bytes: int = 0, fails: bool = False) -> None:
        self.pids = list(pids)
        self.used_bytes = used_bytes
        self.fails = fails

    def nvmlInit(self) -> None:
        self._check()

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._check()
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Iterable[Any]:
        self._check()
        return [SimpleNamespace(pid=pid, usedGpuMemory=2 * GIB if pid % 2 else None) for pid in self.pids]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        self._check()
        return SimpleNamespace(used=self.used_bytes)

    def _check(self) -> None:
        if self.fails:
            raise self.NVMLError


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_neighbors, "SAMPLE_INTERVAL_S", 0.02)


@pytest.fixture
def child() -> Iterator[int]:
    """A process started by this one."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def watched(nvml: FakeNvml) -> list[str]:
    residents = GpuNeighborMonitor("GPU-1", nvml)
    residents.start()
    return residents.stop()


def test_a_worker_and_what_it_started_are_no_strangers(child: int) -> None:
    assert watched(FakeNvml(os.getpid(), child)) == []


def test_a_strangers_process_is_named_with_its_memory() -> None:
    (first, second) = watched(FakeNvml(os.getpid(), 1, 4_000_000))
    assert first.startswith("process 1 (")
    assert first.endswith("2.0 GiB")
    assert second == "process 4000000, memory unknown"


def test_a_stranger_who_comes_and_goes_is_remembered() -> None:
    nvml = FakeNvml(os.getpid())
    residents = GpuNeighborMonitor("GPU-1", nvml)
    residents.start()
    nvml.pids.append(1)
    for _ in range(500):
        if residents._seen:
            break
        subprocess.run(["sleep", "0.02"], check=True)
    nvml.pids.remove(1)
    assert len(residents.stop()) == 1


@pytest.mark.parametrize(("listed", "ours", "strangers"), [(1, 1, 0), (3, 1, 2), (2, 2, 0), (1, 2, 0)])
def test_where_process_numbers_are_another_namespaces_their_count_tells(
    listed: int, ours: int, strangers: int, monkeypatch: pytest.MonkeyPatch, child: int
) -> None:
    monkeypatch.setattr(gpu_neighbors, "_has_gpu_open", lambda pid: pid == os.getpid() or (ours == 2 and pid == child))
    seen = watched(FakeNvml(*range(4_000_000, 4_000_000 + listed)))
    assert len(seen) == strangers
    assert all("outside this container" in words for words in seen)


def test_forked_loaders_that_have_the_workers_files_open_hide_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_neighbors, "process_tree", lambda pid: {pid, 4_100_000, 4_100_001})
    monkeypatch.setattr(gpu_neighbors, "_has_gpu_open", lambda pid: True)
    monkeypatch.setattr(gpu_neighbors, "_command_line", lambda pid: b"ray::worker", raising=False)
    assert len(watched(FakeNvml(4_000_000, 4_000_001))) == 1
    assert watched(FakeNvml(4_000_000)) == []


def test_where_no_process_is_shown_memory_in_use_tells() -> None:
    (words,) = watched(FakeNvml(used_bytes=20 * GIB))
    assert "of 20.0 GiB in use" in words
    assert watched(FakeNvml(used_bytes=GIB // 2)) == []  # a context of the worker's own


def test_a_worker_waits_for_those_who_are_leaving() -> None:
    nvml = FakeNvml(os.getpid(), 1)
    assert not GpuNeighborMonitor("GPU-1", nvml).wait_until_alone(0.1)
    nvml.pids.remove(1)
    assert GpuNeighborMonitor("GPU-1", nvml).wait_until_alone(0.1)
    assert not GpuNeighborMonitor("GPU-1", FakeNvml(used_bytes=20 * GIB)).wait_until_alone(0.1)


def test_without_a_gpu_or_with_a_driver_that_says_nothing_there_are_no_strangers() -> None:
    for residents in (GpuNeighborMonitor("", FakeNvml(1)), GpuNeighborMonitor("GPU-1", FakeNvml(1, fails=True))):
        assert residents.wait_until_alone(0.1)
        residents.start()
        assert residents.stop() == []


def test_a_process_that_opened_no_gpu_holds_none() -> None:
    assert not gpu_neighbors._has_gpu_open(os.getpid())
    assert not gpu_neighbors._has_gpu_open(4_000_000)
