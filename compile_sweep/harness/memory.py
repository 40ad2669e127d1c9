"""Device memory: what steps need, what compiling needed, what CUDA graphs keep, and whether a second model fits.

Background: a captured CUDA graph works in a memory pool of its own. Torch's allocator counts a pool's blocks as free once capture
has ended, although every replay writes to them, so the allocated peak of replayed steps omits all activations. The pools are
therefore counted in full. On CPUs there is one figure, the process's peak resident size, including its compilers.
"""

import gc
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_REFERENCE_FACTOR = 1.6
"""Memory for an eager model, as a multiple of the compiled steps' peak: it keeps activations that a compiled one fuses or
recomputes. Measured on an H200 in captioning: 22.3 GiB versus 18.2.
"""

_MARGIN_BYTES = 2**30  # additional margin, for libraries' workspaces and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeaks:
    """Bytes since the last `reset_peaks`; None if the device does not report them."""

    in_use_bytes: int
    """Peak of tensors plus all of the CUDA graphs' pools, if none was captured in between. On CPUs the process's peak resident
    size since its start.
    """
    tensors_bytes: int | None
    """Peak of tensors, including those in pools while graphs were captured."""
    reserved_bytes: int | None
    """Peak that the allocator reserved on the device, which other programs cannot use."""
    cudagraph_pool_bytes: int | None


@dataclass(frozen=True, slots=True)
class PrivatePools:
    """Bytes in the allocator's pools other than the common one, such as those of CUDA graphs."""

    held: int
    in_tensors: int  # part of those bytes that the allocator counts as allocated


def reset_peaks(device: torch.device) -> None:
    """Resets the peaks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read_peaks(device: torch.device) -> MemoryPeaks:
    """Returns the figures since the last `reset_peaks`."""
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        return MemoryPeaks(in_use_bytes=resident, tensors_bytes=None, reserved_bytes=None, cudagraph_pool_bytes=None)
    pools = private_pools(torch.cuda.memory_snapshot(), _index(device))
    tensors = torch.cuda.max_memory_allocated(device)
    return MemoryPeaks(
        in_use_bytes=tensors - pools.in_tensors + pools.held,
        tensors_bytes=tensors,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        cudagraph_pool_bytes=pools.held,
    )


def private_pools(segments: Sequence[Mapping[str, Any]], device_index: int) -> PrivatePools:
    """Adds up the segments of `torch.cuda.memory_snapshot()` on one device that belong to no common pool."""
    private = [s for s in segments if s["device"] == device_index and tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return PrivatePools(sum(s["total_size"] for s in private), sum(s["allocated_size"] for s in private))


def has_room(peak_bytes: int, device: torch.device) -> bool:
    """Tells whether an eager model, its optimizer and its activations fit in the remaining memory; always true for CPUs."""
    if device.type != "cuda":
        return True
    pools = private_pools(torch.cuda.memory_snapshot(), _index(device))
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - (pools.held - pools.in_tensors)
    return torch.cuda.mem_get_info(device)[0] + kept >= _REFERENCE_FACTOR * peak_bytes + _MARGIN_BYTES


def total_bytes(device: torch.device) -> int:
    """Returns a GPU's memory; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def free(device: torch.device) -> None:
    """Returns unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
