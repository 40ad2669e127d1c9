"""Many equal small layers: shows what compiling a repeated block only once saves, with almost nothing to compute.

Source: "Reducing cold start compilation time with regional compilation": 64 layers of two linear layers of 10 × 10.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from compile_sweep.contract.options import Option
from workloads.synthetic import Synthetic

WIDTH = ROWS = 10

NUM_LAYERS = {"base": 64, "tiny": 6}  # number of layers, by size


class Layer(nn.Module):
    """The repeated block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (rows, width) to (rows, width)."""
        hidden = self.first(hidden).relu()
        hidden = self.second(hidden).relu()
        return hidden


class LayersModel(nn.Module):
    """A linear layer, then the repeated ones; returns the mean square for training, the last layer's output for inference."""

    def __init__(self, num_layers: int, *, trains: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.trains = trains

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (rows, width) to the loss, or to (rows, width)."""
        hidden = self.first(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean() if self.trains else hidden


class Layers(Synthetic):
    """Many equal small layers, trained: the regional recipe's model."""

    sizes = tuple(NUM_LAYERS)
    convolutional = False
    options: ClassVar[Mapping[str, Option]] = {"batch_size": int}
    batch_size = ROWS

    def __init__(self, size: str = "base", seed: int = 0) -> None:
        super().__init__(size, seed)

    def make_model(self) -> nn.Module:
        return LayersModel(NUM_LAYERS[self.size], trains=self.trains)

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        return {"hidden": torch.randn(self.batch_size, WIDTH, generator=generator)}

    def regions(self, model: nn.Module) -> Sequence[str]:
        return [f"layers.{number}" for number in range(NUM_LAYERS[self.size])]

    def parts(self) -> Sequence[str]:
        return ["first", *self.regions(nn.Identity())]


class LayersInference(Layers):
    """Many equal small layers, forward alone, as the regional recipe times them."""

    trains = False
    options: ClassVar[Mapping[str, Option]] = {**Layers.options, "grad_mode": ("inference_mode", "no_grad")}
