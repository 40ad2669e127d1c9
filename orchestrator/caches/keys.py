"""What makes an artifact useless or wrong elsewhere, by component: two processes may share artifacts if all of it is equal."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pynvml

from orchestrator.environment import Environment, fingerprint, visible_gpus
from workloads.settings import CompileSettings

Facts = Mapping[str, str]
"""Component → value. Compared whole; a component that one side lacks differs."""

DECISIVE = (
    "torch", "triton", "cuda", "driver", "gpu", "capability", "python", "machine", "libc", "cpu", "cpu_instructions",
)  # fmt: skip
"""Components of the host, the one that explains most first: another torch brings another triton and configuration."""

_KEPT_APART = ("attention", "matmul_precision", "autocast", "backend", "dynamic_min", "dynamic_max")
"""Settings that are not in every key of torch's caches: what a compiled graph computes, who compiles it, and the bounds of a
marked size, under which torch 2.13 finds a graph of narrower ones and then fails, because that graph's guard contradicts them."""


def trial_facts(configuration: Mapping[str, str], settings: CompileSettings, *, use_gpu: bool) -> dict[str, str]:
    """Everything that artifacts of a trial depend on.

    Args:
        configuration: as in `environment_facts`, with the workload's process settings in force.
        settings: the trial's, which are not applied yet.
        use_gpu: whether it runs on one.
    """
    own = kept_apart(settings)
    if use_gpu:
        own["device"] = "cuda"
    else:  # the number of threads is in the code; `cores.bind` sets it for trials
        threads = os.environ.get("OMP_NUM_THREADS") or configuration.get("cpu_threads", "")
        own |= {"device": "cpu", "threads": threads}
    return environment_facts({**configuration, **own})


def kept_apart(settings: CompileSettings) -> dict[str, str]:
    """Of the settings, those by which artifacts must be kept apart, because torch does not, by name."""
    chosen = settings.to_dict()
    return {f"settings.{name}": str(chosen[name]) for name in _KEPT_APART if chosen[name] is not None}


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
