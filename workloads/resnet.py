"""Image classification: Hugging Face's ResNet with random weights, on noise with ImageNet's size and number of classes.

Its speed depends on the memory order of its tensors (`memory_format`), since nearly all its work is convolutions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification

from compile_sweep.schema.choices import OptimizerKind, optimizer_options
from workloads.synthetic import ImageTraining

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 1e-4
"""From He et al., "Deep Residual Learning for Image Recognition", section 3.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetSize:
    """Dimensions of one size; those of `resnet50` are the paper's."""

    layer_type: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    stem_width: int
    pixels: int
    classes: int
    batch_size: int
    pool_batches: int


RESNET_SIZES = {
    "resnet50": ResNetSize(
        layer_type="bottleneck", depths=(3, 4, 6, 3), widths=(256, 512, 1024, 2048), stem_width=64,
        pixels=224, classes=1000, batch_size=128, pool_batches=6,
    ),
    "tiny": ResNetSize(
        layer_type="basic", depths=(1, 1), widths=(8, 16), stem_width=8,
        pixels=32, classes=5, batch_size=4, pool_batches=4,
    ),
}  # fmt: skip


class ResNetModel(nn.Module):
    """ResNet and its loss."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        config = ResNetConfig(
            layer_type=size.layer_type,
            depths=list(size.depths),
            hidden_sizes=list(size.widths),
            embedding_size=size.stem_width,
        )
        config.num_labels = size.classes
        self.model = ResNetForImageClassification(config)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar loss of images, (batch, 3, height, width), and classes, (batch,)."""
        return cross_entropy(self.model(pixel_values=pixel_values).logits.float(), labels)


class ResNet(ImageTraining):
    """ResNet-50 trained on synthetic images of ImageNet's size by SGD with momentum; EMA and batch size may vary."""

    sizes = tuple(RESNET_SIZES)

    def __init__(self, size: str = "resnet50", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = RESNET_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.pool_batches = self.dimensions.pool_batches

    def make_model(self) -> nn.Module:
        return ResNetModel(self.dimensions)

    def parts(self) -> Sequence[str]:
        return ["model"]

    def optimizer(self, model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer:
        options: dict[str, Any] = optimizer_options(kind)
        options |= {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, **options)

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        size = self.dimensions
        return {
            "pixel_values": torch.randn(self.batch_size, 3, size.pixels, size.pixels, generator=generator),
            "labels": torch.randint(size.classes, (self.batch_size,), generator=generator),
        }
