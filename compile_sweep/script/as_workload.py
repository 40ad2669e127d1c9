"""A script where a plan expects a workload: it has no lengths, parts or options, and says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from compile_sweep.contract.base import Batch, Workload
from compile_sweep.schema.shapes import ShapePolicy
from compile_sweep.script.job import ScriptError

ANY_LENGTH = 2**20
"""In the place of a longest sequence, which a script does not name: no setting is refused for being longer."""


class ScriptWorkload(Workload):
    """What a plan may ask of a script; everything else only the script itself knows."""

    sizes = ("script",)
    max_length = ANY_LENGTH
    batch_size = 1
    pool_batches = 1

    def __init__(self, seed: int = 0) -> None:
        super().__init__("script", seed)

    def build_model(self) -> nn.Module:
        raise ScriptError("a script builds its own model, so there is none before it runs")

    def pool(self, policy: ShapePolicy, *, rank: int, device: torch.device) -> Sequence[Batch]:
        raise ScriptError("a script makes its own batches")

    def batch_of_length(self, length: int, *, rank: int, device: torch.device) -> Batch:
        raise ScriptError("a script makes its own batches")

    def regions(self, model: nn.Module) -> Sequence[str]:
        return ()

    def parts(self) -> Sequence[str]:
        return ()

    def dynamic_dims(self, module: str) -> Mapping[str, tuple[int, ...]]:
        return {}
