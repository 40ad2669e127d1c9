"""Finds the largest batch that fits the device's memory, by bisection in one process, and the memory of each size tried.

Background: compiled code keeps fewer activations than eager, so the largest batch depends on the setting, not only on the model.
A size is tried with two training steps on batches of the longest length: the optimizer's state exists from the second one on.
Output: the sizes that were tried, in order, each with its peak memory, or None if it did not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compile_sweep.contract.base import Workload
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory
from compile_sweep.harness.apply import applied
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.outcome import is_out_of_memory
from compile_sweep.schema.settings import CompileSettings

MOST_TIMES = 64
"""Maximum size, as a multiple of the workload's own batch size."""

RESOLUTION = 32
"""Bisection stops when sizes differ by less than one part in this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedBatch:
    """A batch size that was tried."""

    batch_size: int
    peak_memory_bytes: int | None
    """None if it did not fit."""


def largest_batch(workload: Workload, settings: CompileSettings, device: torch.device | str) -> list[TriedBatch]:
    """Tries batch sizes under a setting, starting with the workload's own.

    Args:
        workload: The workload in its default form.
        settings: How to compile it; the search begins with their batch size.
        device: The device whose memory is the limit.

    Raises:
        SettingsError: The workload does not accept a batch size, or the settings do not fit it.
    """
    where = torch.device(device)
    start = settings.batch_size or workload.batch_size
    return bisected(lambda size: peak_memory(workload, settings.with_batch_size(size), where), start=start)


def bisected(peak_of: Callable[[int], int | None], *, start: int) -> list[TriedBatch]:
    """Tries sizes by doubling until one does not fit, or halving until one does, then by bisection.

    Args:
        peak_of: Returns the bytes that a size takes; None if it does not fit.
        start: The size to begin with.
    """
    tried: list[TriedBatch] = []

    def fits(size: int) -> bool:
        tried.append(TriedBatch(batch_size=size, peak_memory_bytes=peak_of(size)))
        return tried[-1].peak_memory_bytes is not None

    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
        if high > MOST_TIMES * start:
            return tried
    while high > 1 and low == 0:
        half = high // 2
        low, high = (half, high) if fits(half) else (0, half)
    while high - low > max(1, low // RESOLUTION) and low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return tried


def peak_memory(workload: Workload, settings: CompileSettings, device: torch.device) -> int | None:
    """Returns the peak memory of two steps in bytes; None if they do not fit."""
    try:
        return _peak_memory(workload, settings, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
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
