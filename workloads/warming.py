"""The batches of a warm-up: what has to be stepped through until nothing is left to compile or to capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workloads.base import Batch, Workload
from workloads.measurement import Protocol
from workloads.settings import CompileSettings


def first_steps(pool: Sequence[Batch], protocol: Protocol) -> list[Batch]:
    """Real batches, those that a measurement compares with eager."""
    return [pool[index % len(pool)] for index in range(protocol.compared_steps)]


def warm_up_batches(
    workload: Workload, settings: CompileSettings, pool: Sequence[Batch], *, rank: int, device: torch.device, protocol: Protocol
) -> list[Batch]:
    """The first steps, then every length the settings can pad to, often enough to compile and capture."""
    lengths = settings.shape_policy(workload.max_length, workload.min_length).lengths()
    by_length = {batch.length: batch for batch in pool}
    for length in lengths:
        if length not in by_length:
            by_length[length] = workload.batch_of_length(length, rank=rank, device=device)
    visits = protocol.cudagraph_visits if settings.claims_cudagraphs else protocol.visits
    return [*first_steps(pool, protocol), *[by_length[length] for length in lengths] * visits]
