"""A look at the machine before a sweep: what on it would disturb measurements or end trials, while that can still be fixed."""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pynvml

from orchestrator.environment import visible_gpus

_GIB = 2**30

BUSY_LOAD = 0.5  # load per core, averaged over the last minute, above which compile times are noticeably longer
LITTLE_MEMORY_BYTES = 4 * _GIB
LITTLE_DISK_BYTES = 5 * _GIB  # A running trial's compile caches and logs take up to about 2 GiB
IDLE_GPU_BYTES = 1 * _GIB  # memory that a driver and a display may hold on a GPU that nobody computes on


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU."""

    index: int
    used_bytes: int
    total_bytes: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """What is in use on this host."""

    load: float  # mean number of processes that ran or waited for a core during the last minute
    cores: int
    available_memory_bytes: int | None
    free_disk_bytes: dict[str, int]  # free bytes on the disk of each folder
    gpus: tuple[GpuState, ...] = ()

    def warnings(self) -> list[str]:
        """Returns a sentence for each thing that would disturb a sweep; empty if the machine is idle."""
        found = []
        if self.load > BUSY_LOAD * self.cores:
            found.append(
                f"this machine is busy: a load of {self.load:.1f} on {self.cores} cores; compile times will be too long, and "
                "on a CPU throughput too low, until that ends"
            )
        if self.available_memory_bytes is not None and self.available_memory_bytes < LITTLE_MEMORY_BYTES:
            found.append(
                f"only {self.available_memory_bytes / _GIB:.1f} GiB of memory are available; trials may be killed for it"
            )
        found += [
            f"only {free / _GIB:.1f} GiB are free on the disk of {folder}; trials whose files do not fit fail with disk-full"
            for folder, free in self.free_disk_bytes.items()
            if free < LITTLE_DISK_BYTES
        ]
        for gpu in self.gpus:
            if gpu.num_processes or gpu.used_bytes > IDLE_GPU_BYTES:
                by = f" by {gpu.num_processes} process{'' if gpu.num_processes == 1 else 'es'}" if gpu.num_processes else ""
                found.append(
                    f"GPU {gpu.index} is in use{by}: {gpu.used_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.0f} GiB; trials on "
                    "it will be labeled gpu-shared and kept off the front"
                )
        return found


def machine_state(output: Path, *, use_gpu: bool) -> MachineState:
    """Looks at this host."""
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    folders = {str(path.stat().st_dev): path for path in (there, Path(tempfile.gettempdir()))}  # each disk once
    return MachineState(
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 1,  # the load counts all of them, whichever this process may use
        available_memory_bytes=_available_memory(),
        free_disk_bytes={str(path): shutil.disk_usage(path).free for path in folders.values()},
        gpus=_gpus() if use_gpu else (),
    )


def _available_memory() -> int | None:
    with suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _gpus() -> tuple[GpuState, ...]:
    found = []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index, handle in enumerate(visible_gpus()):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found.append(
                    GpuState(
                        index=index,
                        used_bytes=int(memory.used),
                        total_bytes=int(memory.total),
                        num_processes=len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
                    )
                )
        finally:
            pynvml.nvmlShutdown()
    return tuple(found)
