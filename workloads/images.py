"""What training on images has in common: options for the moving average of the weights, normalisation over workers, batch size.

Source: "PyTorch 2.0: how to speed up model training", whose pitfalls these options turn into settings: EMA, SyncBN, memory, AMP
(the setting `autocast`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import nn

from workloads.finding import repeated_blocks
from workloads.options import Option
from workloads.spelling import Scalar
from workloads.synthetic import Synthetic

DECAY = 0.9998
"""Of the moving average, as vision recipes have it."""


class ImageTraining(Synthetic):
    """A model of images with its loss; images are all of one size."""

    options: ClassVar[Mapping[str, Option]] = {"batch_size": int, "ema": (False, True)}

    def take(self, chosen: Mapping[str, Scalar]) -> None:
        super().take(chosen)
        self.average_decay = DECAY if chosen["ema"] else None

    def regions(self, model: nn.Module) -> Sequence[str]:
        return repeated_blocks(model)

    def parts(self) -> Sequence[str]:
        return ["model", "loss"]
