"""Other processes on a worker's GPU: waits for those that are leaving, and records those that stay.

Background: a measurement holds only if the trial has the GPU to itself. NVML lists the compute processes of a GPU and their
memory. Whether its process IDs mean anything here depends on the container. If the host's processes are visible, every process
other than the worker and its descendants is a neighbor. If not, the IDs belong to another namespace, and all that can be
compared is how many processes NVML lists with how many of ours have the GPU open. In some containers NVML lists no process at
all. Then memory that was in use before the worker allocated any reveals a neighbor, and one that comes later goes unnoticed.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml

from orchestrator.guard.cpu_pressure import process_tree

SAMPLE_INTERVAL_S = 2.0  # A sample takes a few milliseconds of a thread that mostly waits for the driver
MAX_CONTEXT_BYTES = 3 * 2**29  # more than a CUDA context takes with its loaded kernels (0.5 to 1 GiB)

_GIB = 2**30


class GpuNeighborMonitor:
    """Watches one GPU from a thread of its own, between `start` and `stop`."""

    def __init__(self, uuid: str, nvml: Any = pynvml) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle: Any = None
        self._seen: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-residents", daemon=True)
        if uuid:
            with suppress(nvml.NVMLError):
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def wait_until_alone(self, seconds: float) -> bool:
        """Waits so many seconds at most for other processes to leave the GPU; returns whether it is free."""
        ends_at = time.monotonic() + seconds
        while self.neighbors() or self._has_memory_of_others():
            if time.monotonic() >= ends_at:
                return False
            time.sleep(0.2)
        return True

    def start(self) -> None:
        """Starts watching. The worker must not have allocated any GPU memory yet."""
        if self._handle is None:
            return
        if not self._processes() and self._has_memory_of_others():
            used_gib = self._used_bytes() / _GIB
            self._seen["memory"] = f"memory of others, of {used_gib:.1f} GiB in use before the trial had any"
        self._thread.start()

    def stop(self) -> list[str]:
        """Stops watching and returns a phrase for each neighbor seen."""
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()
            self._sample()
        return list(self._seen.values())

    def neighbors(self) -> dict[str, str]:
        """Returns a phrase for each process on the GPU that is not part of this worker, keyed by what identifies it."""
        listed = self._processes()
        own = process_tree(os.getpid())
        if not listed:
            return {}
        if own & listed.keys():
            return {
                str(pid): f"process {pid}{_command_name(pid)}, {'memory unknown' if used is None else f'{used / _GIB:.1f} GiB'}"
                for pid, used in listed.items()
                if pid not in own
            }
        # A forked process without a CUDA context, such as a data-loader worker, inherits its parent's open files. Counting
        # distinct command lines counts it only once.
        ours = len({_command_line(pid) for pid in own if _has_gpu_open(pid)})
        return {f"#{number}": f"a process outside this container ({number} of {len(listed) - ours})"
                for number in range(1, len(listed) - ours + 1)}  # fmt: skip

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        for who, words in self.neighbors().items():
            self._seen.setdefault(who, words)

    def _processes(self) -> dict[int, int | None]:
        """Returns the processes on the GPU with the memory of each in bytes, or None where NVML does not report it."""
        if self._handle is None:
            return {}
        try:
            return {one.pid: one.usedGpuMemory for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._nvml.NVMLError:
            return {}

    def _has_memory_of_others(self) -> bool:
        return not self._processes() and self._used_bytes() > MAX_CONTEXT_BYTES

    def _used_bytes(self) -> int:
        if self._handle is None:
            return 0
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError:
            return 0


def _command_name(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(encoding='utf-8', errors='replace').strip()})"
    except OSError:
        return ""


def _command_line(pid: int) -> bytes:
    """Returns the command line of a process; a forked process has the same one as its parent."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _has_gpu_open(pid: int) -> bool:
    """Tells whether a process has a GPU's device file open, as every process with a CUDA context does."""
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # the file was closed
                if os.readlink(descriptor).startswith("/dev/nvidia") and os.readlink(descriptor)[11:].isdigit():
                    return True
    except OSError:
        pass  # the process has ended or belongs to another user
    return False
