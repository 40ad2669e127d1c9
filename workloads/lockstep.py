"""Decisions that several workers must take alike: they train together, so one that took a step more would wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")


def num_workers() -> int:
    """Workers that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agreed_numbers(values: Sequence[float], device: torch.device) -> list[float]:
    """Worker 0's numbers, in every worker; all must give as many."""
    if num_workers() == 1:
        return list(values)
    shared = torch.tensor(values, device=device, dtype=torch.float64)
    dist.broadcast(shared, src=0)
    return [float(value) for value in shared.cpu()]


def agreed(decision: bool, device: torch.device) -> bool:
    """Worker 0's decision, in every worker."""
    return bool(agreed_numbers([float(decision)], device)[0])


def everywhere(condition: bool, device: torch.device) -> bool:
    """Whether the condition holds in every worker."""
    if num_workers() == 1:
        return condition
    held = torch.tensor(float(condition), device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return bool(held.item())


def largest_everywhere(values: Sequence[int], device: torch.device) -> list[int]:
    """Of each number the largest that a worker has; all must give as many."""
    if num_workers() == 1:
        return list(values)
    shared = torch.tensor(values, device=device, dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(value) for value in shared.cpu()]


def by_rank(value: Value) -> list[Value]:
    """The value of each worker; plain values only, because they are pickled."""
    if num_workers() == 1:
        return [value]
    found: list[Value | None] = [None] * num_workers()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]  # every place was filled
