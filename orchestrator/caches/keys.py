"""What makes an artifact useless or wrong elsewhere, by component: two processes may share artifacts if all of it is equal."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pynvml

from orchestrator.environment import Environment, fingerprint, visible_gpus

Facts = Mapping[str, str]
"""Component → value. Compared whole; a component that one side lacks differs."""

DECISIVE = (
    "torch", "triton", "cuda", "driver", "gpu", "capability", "python", "machine", "libc", "cpu", "cpu_instructions",
)  # fmt: skip
"""Components of the host, the one that explains most first: another torch brings another triton and configuration."""


def environment_facts(configuration: Mapping[str, str], environment: Environment | None = None) -> dict[str, str]:
    """Everything an artifact of this process depends on.

    Args:
        configuration: `workloads.compile_caches.configuration()`: what of torch's state decides.
        environment: of this host; by default `fingerprint()`.
    """
    host = environment or fingerprint()
    facts = {
        "torch": host.torch,
        "triton": host.triton,
        "python": host.python,
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),  # what g++ links here does not load with an older one
        "cpu": host.cpu,
        "cpu_instructions": _cpu_instructions(),  # the same CPU hides some of them in some virtual machines
    }
    if host.gpu:
        # Of the driver the CUDA version and the branch decide; its patches change neither what it loads nor what is fastest.
        facts |= {"cuda": host.cuda, "driver": (host.driver or "").partition(".")[0], "gpu": host.gpu}
        facts["capability"] = _capability()
    present = {name: value for name, value in facts.items() if value}
    return {**{name: str(value) for name, value in configuration.items()}, **present}


def digest(facts: Facts) -> str:
    """The facts' name: SHA-256 of them all, in hex."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def differences(a: Facts, b: Facts) -> list[str]:
    """Components that differ, the most decisive first."""
    rank = {name: number for number, name in enumerate(DECISIVE)}
    differing = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    return sorted(differing, key=lambda name: (rank.get(name, len(rank)), name))


@cache
def _cpu_instructions() -> str:
    """Digest of what this CPU can do: code made with `-march=native` dies elsewhere of an illegal instruction."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return hashlib.sha256(" ".join(sorted(values.split())).encode()).hexdigest()[:12]
    return ""


@cache
def _capability() -> str:
    """Of the GPU that this process sees first, by NVML, which does not start CUDA."""
    pynvml.nvmlInit()
    try:
        visible = visible_gpus()
        return "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(visible[0])) if visible else ""
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()
