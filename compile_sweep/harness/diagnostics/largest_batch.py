"""Finds the largest batch that fits the device's memory, by bisection in one process, and the memory of each size tried.

Background: compiled code keeps fewer activations than eager, so the largest batch depends on the setting, not only on the model.
A size is tried with two training steps on batches of the longest length: the optimizer's state exists from the second one on.
Output: the sizes that were tried, in order, each with its peak memory, or None if it did not fit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from compile_sweep.contract.base import Workload
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.apply import applied
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.outcome import may_run_out_of_memory
from compile_sweep.schema.settings import CompileSettings

MOST_TIMES = 64  # maximum size, as a multiple of the workload's own batch size
RESOLUTION = 32  # bisection stops when sizes differ by less than one part in this many

_MOST_GUESSES = 8
"""Number of sizes after which lines through peaks are no longer believed, because they did not lead to the largest size."""

_FURTHEST = 4
"""A line through two peaks is believed up to this multiple of the larger size: memory may grow faster than the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBatch:
    """A batch size that was tried."""

    batch_size: int
    peak_memory_bytes: int | None  # None if it did not fit


def largest_batch(
    workload: Workload, settings: CompileSettings, device: torch.device | str, *, budget_s: float = math.inf
) -> list[TriedBatch]:
    """Tries batch sizes under a setting, starting with its own; raises SettingsError if the workload does not accept any."""
    where = torch.device(device)
    parts = settings.accumulate or 1  # which a batch is split into evenly
    start = max(1, (settings.batch_size or workload.batch_size) // parts)
    capacity_bytes = sum((torch.cuda.mem_get_info(where)[0], torch.cuda.memory_reserved(where))) if where.type == "cuda" else None
    tried = bisected(
        lambda count: peak_memory(workload, settings.with_batch_size(parts * count), where),
        start=start,
        capacity_bytes=capacity_bytes,
        budget_s=budget_s,
    )
    return [replace(one, batch_size=parts * one.batch_size) for one in tried]


def bisected(
    peak_of: Callable[[int], int | None], *, start: int, capacity_bytes: int | None = None, budget_s: float = math.inf
) -> list[TriedBatch]:
    """Tries sizes by doubling until one does not fit, or halving until one does, then by bisection.

    Each size that compiles anew takes as long as a trial does. So from the second one that fits, the line through the peaks says
    what to try: a size just below the device's memory, then the next one above it.

    Args:
        peak_of: Returns the bytes that a size takes; None if it does not fit.
        capacity_bytes: Memory of the device; None if it is not known, so that nothing is predicted.
        budget_s: Seconds that all sizes together may take. None is begun that would take too long if it took twice as long as
            the longest so far.
    """
    tried: list[TriedBatch] = []
    ends_at, longest_s = time.monotonic() + budget_s, 0.0
    size: int | None = start
    while size is not None and (began := time.monotonic()) + 2 * longest_s < ends_at:
        tried.append(TriedBatch(batch_size=size, peak_memory_bytes=peak_of(size)))
        longest_s = max(longest_s, time.monotonic() - began)
        size = _next_size(tried, MOST_TIMES * start, capacity_bytes)
    return tried


def _next_size(tried: Sequence[TriedBatch], most: int, capacity_bytes: int | None) -> int | None:
    """Returns the size to try next; None if the largest is known well enough."""
    low = max((one.batch_size for one in tried if one.peak_memory_bytes is not None), default=0)
    high = min((one.batch_size for one in tried if one.peak_memory_bytes is None), default=None)
    if low == 0:
        return high // 2 if high is not None and high > 1 else None
    enough = max(1, low // RESOLUTION)
    if low >= most or (high is not None and high - low <= enough):
        return None
    middle = 2 * low if high is None else (low + high) // 2
    guess = _predicted(tried, capacity_bytes) if len(tried) <= _MOST_GUESSES else None
    if guess is None:
        return min(middle, most)
    if high is None or guess < high:
        return min(max(guess, low + enough), most if high is None else high - 1)
    return middle


def _predicted(tried: Sequence[TriedBatch], capacity_bytes: int | None) -> int | None:
    """Returns the largest size that should fit by the line through two peaks, with a margin; None if there is no such line."""
    peaks = {one.batch_size: one.peak_memory_bytes for one in tried if one.peak_memory_bytes is not None}
    large = max(peaks)
    small = max((size for size in peaks if size <= 0.8 * large), default=None)
    if capacity_bytes is None or small is None or peaks[large] <= peaks[small]:
        return None
    guess = large + int((capacity_bytes - peaks[large]) * (large - small) / (peaks[large] - peaks[small]))
    guess = min(guess - guess // RESOLUTION, _FURTHEST * large)  # the last part of the memory is in fragments
    return guess - guess % 8 if guess >= 64 else guess


def peak_memory(workload: Workload, settings: CompileSettings, device: torch.device) -> int | None:
    """Returns the peak memory of two steps in bytes; None if they do not fit."""
    try:
        with may_run_out_of_memory():
            return _peak_memory(workload, settings, device)
        return None
    finally:
        torch._dynamo.reset()
        memory.free(device)


def _peak_memory(workload: Workload, settings: CompileSettings, device: torch.device) -> int:
    memory.reset_peaks(device)
    prepared = prepare(workload, settings, device, num_workers=1)
    sized = prepared.workload
    with sized.process_settings():
        batch = sized.batch_of_length(prepared.policy.lengths()[-1], rank=0, device=device)
        model = sized.build_model().to(device)
        optimizer = prepared.optimizer(model)
        seed_all(sized.seed)
        with applied(prepared, model, optimizer) as step:
            for _ in range(2):
                step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return memory.read_peaks(device).in_use_bytes
