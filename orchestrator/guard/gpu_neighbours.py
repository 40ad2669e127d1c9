"""Who else is on a worker's GPU: waits for those who are leaving, and notes those who stay.

Background: a figure holds for a GPU that the trial has for itself. NVML lists a GPU's compute processes and their memory. Whether
its process numbers mean anything here depends on the container: with the host's processes in sight, all but the worker's own
and what it started are others. Without, the numbers are another namespace's, and all that counts is how many there are beyond
those of ours that hold the GPU open. Some containers are shown no process at all; then memory that is in use before the worker
has asked for any tells, and who comes later is not seen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pynvml

from orchestrator.guard.cpu_pressure import descendants

EVERY_S = 2.0
"""Between two looks; one takes some milliseconds of a thread that mostly waits for the driver."""

CONTEXT_BYTES = 3 * 2**29
"""More than what a CUDA context with its loaded kernels takes by itself (0.5 to 1 GiB)."""

_GIB = 2**30


class Nvml(Protocol):
    """As much of `pynvml` as is needed."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Iterable[Any]: ...

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...


class GpuResidents:
    """Watches one GPU from a thread of its own between `start` and `stop`.

    Args:
        uuid: of the GPU, as NVML spells it; empty if there is none to watch.
        nvml: where to ask.
    """

    def __init__(self, uuid: str, nvml: Nvml = pynvml) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle: Any = None
        self._seen: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="gpu-residents", daemon=True)
        if uuid:
            with suppress(nvml.NVMLError):
                nvml.nvmlInit()
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def wait_until_alone(self, seconds: float) -> bool:
        """Waits for others to leave, a trial's before that is being ended, say; returns whether they have.

        Args:
            seconds: at most so long.
        """
        ends_at = time.monotonic() + seconds
        while self.others() or self._has_foreign_memory():
            if time.monotonic() >= ends_at:
                return False
            time.sleep(0.2)
        return True

    def start(self) -> None:
        """Begins to watch. The worker has put nothing into the GPU's memory yet."""
        if self._handle is None:
            return
        if not self._listed() and self._has_foreign_memory():
            used_gib = self._used_bytes() / _GIB
            self._seen["memory"] = f"memory of others, of {used_gib:.1f} GiB in use before the trial had any"
        self._thread.start()

    def stop(self) -> list[str]:
        """Ends it, and returns whom it saw, a phrase each."""
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()
            self._look()
        return list(self._seen.values())

    def others(self) -> dict[str, str]:
        """A phrase for each process that is on the GPU now and not of this worker, by what tells it from others."""
        listed = self._listed()
        own = descendants(os.getpid())
        if not listed:
            return {}
        if own & listed.keys():
            return {str(pid): f"process {pid}{_name(pid)}, {_size(used)}" for pid, used in listed.items() if pid not in own}
        # A process that was only forked, a data loader's, has its parent's files open, and no context.
        ours = len({_command(pid) for pid in own if _holds_a_gpu(pid)})
        return {f"#{number}": f"a process outside this container ({number} of {len(listed) - ours})"
                for number in range(1, len(listed) - ours + 1)}  # fmt: skip

    def _follow(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        for who, words in self.others().items():
            self._seen.setdefault(who, words)

    def _listed(self) -> dict[int, int | None]:
        """Memory in bytes, where it is told, of each process on the GPU."""
        if self._handle is None:
            return {}
        try:
            return {one.pid: one.usedGpuMemory for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._nvml.NVMLError:
            return {}

    def _has_foreign_memory(self) -> bool:
        return not self._listed() and self._used_bytes() > CONTEXT_BYTES

    def _used_bytes(self) -> int:
        if self._handle is None:
            return 0
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        except self._nvml.NVMLError:
            return 0


def _size(used: int | None) -> str:
    return "memory unknown" if used is None else f"{used / _GIB:.1f} GiB"


def _name(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text(encoding='utf-8', errors='replace').strip()})"
    except OSError:
        return ""


def _command(pid: int) -> bytes:
    """With which words a process was started; a forked one has its parent's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _holds_a_gpu(pid: int) -> bool:
    """Whether a process has opened a GPU's device file, as every one with a CUDA context has."""
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(descriptor).startswith("/dev/nvidia") and os.readlink(descriptor)[11:].isdigit():
                    return True
    except OSError:
        pass  # gone meanwhile, or another user's
    return False
