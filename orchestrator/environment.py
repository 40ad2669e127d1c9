"""The environment fingerprint: what must be equal for the measurements of two trials to be comparable.

Reads package metadata, `/proc` and NVML. Never imports torch and never starts CUDA, so it is cheap in any process.
"""

import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The facts about a host that measurements depend on; None if something is not installed or not present."""

    python: str
    torch: str | None
    triton: str | None
    transformers: str | None
    ray: str | None
    cuda: str | None  # highest CUDA version that the driver supports
    driver: str | None
    gpu: str | None
    num_gpus: int  # number of GPUs this process may use, according to CUDA_VISIBLE_DEVICES
    gpu_memory_bytes: int | None
    cpu: str
    cores: int  # number of cores this process may use
    memory_bytes: int
    platform: str

    @property
    def key(self) -> str:
        """Digest of what decides a measurement: versions and processors, not how many processors or which driver patch."""
        facts = (self.python, self.torch, self.triton, self.transformers, self.cuda, self.gpu, self.gpu or self.cpu)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    @property
    def decisive(self) -> tuple[str, ...]:
        """Names of the facts that make up the key."""
        return ("gpu", "torch", "triton", "cuda", "transformers", "python", *(() if self.gpu else ("cpu",)))

    def to_dict(self) -> dict[str, str | int | None]:
        """Returns the environment as plain JSON values."""
        return asdict(self)


@cache
def fingerprint() -> Environment:
    """Returns the environment of this host."""
    gpus, driver, cuda = _gpus()
    return Environment(
        python=platform.python_version(),
        torch=_version("torch"),
        triton=_version("triton"),
        transformers=_version("transformers"),
        ray=_version("ray"),
        cuda=cuda,
        driver=driver,
        gpu=gpus[0][0] if gpus else None,
        num_gpus=len(gpus),
        gpu_memory_bytes=gpus[0][1] if gpus else None,
        cpu=cpu_fact("model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        platform=platform.platform(),
    )


def git_commit(folder: str | Path) -> str | None:
    """Returns the commit of the checkout that a folder is in, with `+changes` if files differ; None outside git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: str | Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def visible_gpus() -> list[Any]:
    """Returns NVML's handles of the GPUs in CUDA_VISIBLE_DEVICES, or of all GPUs if it is not set. NVML must be initialized.

    Like CUDA, it stops at the first entry that does not exist.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(pynvml.nvmlDeviceGetCount())) if named is None else map(str.strip, named.split(","))
    found: list[Any] = []
    with suppress(pynvml.NVMLError):
        for name in names:
            by_index = name.isdigit()
            found.append(pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name))
    return found


def num_host_gpus() -> int:
    """Returns the number of GPUs of the host, no matter which of them this process may use."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> tuple[list[tuple[str, int]], str | None, str | None]:
    """Returns (name, memory in bytes) of each visible GPU, the driver's version, and its CUDA version."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None, None
    try:
        handles = visible_gpus()
        gpus = [(str(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
        if not gpus:
            return [], None, None
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return gpus, str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    finally:
        pynvml.nvmlShutdown()


def cpu_fact(*names: str) -> str:
    """Returns what Linux says of the first CPU under one of these names; empty if it says nothing."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""
