"""Values and small tools shared by several tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from orchestrator.environment import Environment

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent

H200 = Environment(
    python="3.11.7",
    torch="2.13.0",
    triton="3.7.0",
    transformers="5.17.0",
    ray="2.60.0",
    cuda="13.0",
    driver="580.65.06",
    gpu="NVIDIA H200",
    num_gpus=1,
    gpu_memory_bytes=150_754_820_096,
    cpu="Intel(R) Xeon(R) Platinum 8480C",
    cores=16,
    memory_bytes=128 * 2**30,
    platform="Linux-6.8",
)

_PHASE_SHARES = {
    "dynamo": 0.08,
    "aot_autograd": 0.22,
    "inductor": 0.34,
    "autotuning": 0.0,
    "kernel_compilation": 0.24,
    "cudagraph_capture": 0.02,
    "other": 0.1,
}


def measured(samples_per_s: float, compile_s: float = 0.0) -> dict[str, Any]:
    """Returns the other fields of a measured `TrialRecord` of schema 2: 64 samples per step, eager at 600 per second."""
    step_ms, eager_ms = 64_000 / samples_per_s, 64_000 / 600
    return {
        "phase": "done",
        "device": "NVIDIA H200",
        "cores": 16,
        "cpu_pressure": 0.01,
        "first_step_s": compile_s + step_ms / 1e3,
        "warmup_s": compile_s + 10 * step_ms / 1e3,
        "warmup_steps": 10,
        "steady_steps": 4,
        "compile_phases_s": {phase: share * compile_s for phase, share in _PHASE_SHARES.items()},
        "step_ms_median": step_ms,
        "step_ms_ci95": (0.998 * step_ms, 1.002 * step_ms),
        "stable": True,
        "outliers": 0,
        "samples_per_s_ci95": (0.99 * samples_per_s, 1.01 * samples_per_s),
        "tokens_per_s": 23.1 * samples_per_s,
        "mean_length": 101.3,
        "speedup_eager": eager_ms / step_ms,
        "speedup_eager_ci95": (0.995 * eager_ms / step_ms, 1.005 * eager_ms / step_ms),
        "clock_drift": 0.004,
        "peak_memory_bytes": 18 * 2**30,
        "peak_reserved_bytes": 20 * 2**30,
        "compile_peak_memory_bytes": 19 * 2**30,
        "cudagraph_pool_bytes": 0,
        "numerics": {
            "status": "ok",
            "compared_steps": 10,
            "first_bad_step": None,
            "first_bad_steady_step": None,
            "last_loss": 6.8,
            "random": True,
            "reference": "float32",
            "loss": {"gap": 0.001, "tolerance": 0.01, "kind": "rms"},
            "gradients": {"encoder": {"gap": 0.02, "tolerance": 0.1, "kind": "rms"}},
            "updates": {"encoder": {"gap": 0.03, "tolerance": 0.1, "kind": "rms"}},
            "parameters": {"encoder": {"gap": 0.001, "tolerance": 0.01, "kind": "distance"}},
            "worst": "updates of encoder: off by 3.00%, 10.00% allowed",
        },
        "source": "step = torch.compile(step)",
        "graphs": 1,
        "graph_breaks": 0,
        "recompiles": 0,
        "cudagraph_skips": 0,
        "step_ms": [step_ms] * 4,
        "eager_step_ms": [eager_ms] * 2,
    }


def wait_until(condition: Callable[[], bool], timeout_s: float, why_not: Callable[[], object] = lambda: "") -> None:
    """Waits for a condition; fails after the timeout, with the reason."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"waited in vain: {why_not()}"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Tells whether a process runs; false for a zombie, whose exit status nobody has read."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False
