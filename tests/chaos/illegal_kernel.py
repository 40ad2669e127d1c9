"""A kernel with an invalid memory access. It is in a separate file because only a GPU build of torch has Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_far(pointer):  # type: ignore[no-untyped-def]
    tl.store(pointer + (1 << 40), 1.0)


def write_far() -> None:
    """Raises torch's error for an illegal memory access, after which this process's CUDA context is unusable."""
    _write_far[(1,)](torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
