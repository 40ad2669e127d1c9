"""Values and small tools that several tests share."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.environment import Environment

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


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Returns once the condition holds; fails when it does not in time."""
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, "waited in vain"
        time.sleep(0.05)
