"""Checks what a user passed to `WorkloadFromModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from compile_sweep.schema.errors import WorkloadError

REAL = "real"
PADDED = "padded"


def check_arguments(workload: Any) -> None:
    """Checks the arguments of `WorkloadFromModel`, which are attributes of the class that it made.

    This is not done in `WorkloadFromModel` itself, because one bad workload would then hide others in its module.
    """
    if workload.both_losses:
        raise WorkloadError("WorkloadFromModel has both loss_fn and step_fn; leave one of them out")
    if workload.has_own_step and not workload.trains:
        raise WorkloadError(
            "step_fn and accumulate are for training, and trains=False makes a workload of inference; leave one out"
        )
    clip = workload.clip_grad_norm
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise WorkloadError(f"clip_grad_norm={clip!r} of WorkloadFromModel is not a number above 0")
    numbers = {
        "accumulate": workload.declared_accumulate,
        "num_batches": workload.pool_batches,
        "max_length": workload.declared_max_length,
        "min_length": workload.declared_min_length,
    }
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1):
            raise WorkloadError(f"{name}={number!r} of WorkloadFromModel is not a whole number of 1 or more")
    if workload.declared_lengths not in (None, REAL, PADDED):
        raise WorkloadError(f"lengths={workload.declared_lengths!r} of WorkloadFromModel is neither 'real' nor 'padded'")
    dynamic = workload.declared_dynamic
    if dynamic is not None and not (isinstance(dynamic, Mapping) and all(map(_are_dimensions, dynamic.values()))):
        raise WorkloadError(
            f"dynamic={dynamic!r} of WorkloadFromModel does not give tensors their dimensions; write dynamic={{'ids': (1,)}}"
        )


def _are_dimensions(dims: Any) -> bool:
    return isinstance(dims, Sequence) and all(isinstance(dim, Integral) for dim in dims)
