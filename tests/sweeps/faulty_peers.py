"""A workload whose second worker fails in its third step, in a way that the pad multiple selects."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import torch
from torch import nn
from toy_workloads import Toy

from compile_sweep.contract.base import Batch
from compile_sweep.schema.shapes import PadToLongest, ShapePolicy

FAULTY_STEP = 3


class FaultyPeers(Toy):
    """For worker 1, 2 is killed, 4 raises, 8 runs out of memory; other multiples are sound."""

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        self._fault = policy.multiple if rank == 1 and isinstance(policy, PadToLongest) else None
        return super().pool(policy, rank=rank, device=device)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        steps = 0

        def fail(module: nn.Module, inputs: object) -> None:
            nonlocal steps
            steps += 1
            if steps < FAULTY_STEP:
                return
            if self._fault == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault == 4:
                raise ValueError("worker 1 does not like multiples of 4")
            if self._fault == 8:
                time.sleep(0.5)
                raise torch.OutOfMemoryError("worker 1 has no memory left")

        model.register_forward_pre_hook(fail)
        return model
