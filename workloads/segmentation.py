"""Semantic segmentation: Hugging Face's SegFormer with random weights, on noise of Cityscapes' size and number of classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from transformers import SegformerConfig, SegformerForSemanticSegmentation

from compile_sweep.contract.inspect_model import repeated_blocks
from compile_sweep.contract.options import Option
from compile_sweep.schema.setting_text import Scalar
from workloads.synthetic import ImageTraining

IGNORED_PIXEL = 255  # label of an ignored pixel in Cityscapes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentationSize:
    """Dimensions of one size; those of `b0` are the paper's smallest."""

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[int, ...]
    decoder_width: int
    height: int
    width: int
    classes: int
    batch_size: int
    pool_batches: int


SEGMENTATION_SIZES = {
    "b0": SegmentationSize(
        depths=(2, 2, 2, 2), widths=(32, 64, 160, 256), heads=(1, 2, 5, 8), decoder_width=256,
        height=512, width=1024, classes=19, batch_size=8, pool_batches=10,
    ),
    "tiny": SegmentationSize(
        depths=(2, 2, 2, 2), widths=(8, 16, 24, 32), heads=(1, 1, 1, 2), decoder_width=16,
        height=64, width=64, classes=5, batch_size=2, pool_batches=4,
    ),
}  # fmt: skip


class PixelLoss(nn.Module):
    """Cross entropy of each pixel, in float32."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar mean.

        Args:
            logits: (batch, classes, height / 4, width / 4).
            labels: (batch, height, width), `IGNORED` where a pixel has no label.
        """
        enlarged = interpolate(logits.float(), size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return cross_entropy(enlarged, labels, ignore_index=IGNORED_PIXEL)


class SegmentationModel(nn.Module):
    """SegFormer and its loss."""

    def __init__(self, size: SegmentationSize) -> None:
        super().__init__()
        config = SegformerConfig(
            depths=list(size.depths),
            hidden_sizes=list(size.widths),
            num_attention_heads=list(size.heads),
            decoder_hidden_size=size.decoder_width,
        )
        config.num_labels = size.classes
        self.model = SegformerForSemanticSegmentation(config)
        # transformers adds hooks to the model's layers in its first forward, behind a lock that breaks a graph, so that is done
        # now. The hooks inside the blocks are for attention maps, which are not used, and what they call breaks a graph in each
        # block.
        with torch.no_grad():
            self.model.eval()(pixel_values=torch.zeros(1, 3, 64, 64))
        for name in repeated_blocks(self.model):
            for module in self.model.get_submodule(name).modules():
                module._forward_hooks.clear()
        self.loss = PixelLoss()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Returns the scalar loss for images, (batch, 3, height, width), and labels, (batch, height, width)."""
        loss: Tensor = self.loss(self.model(pixel_values=pixel_values).logits, labels)
        return loss


class Segmentation(ImageTraining):
    """SegFormer trained on synthetic images of Cityscapes' size; EMA, SyncBN and batch size may vary."""

    sizes = tuple(SEGMENTATION_SIZES)
    options: ClassVar[Mapping[str, Option]] = {**ImageTraining.options, "norm": ("batch", "sync")}
    needs_gpu: ClassVar[Mapping[tuple[str, Scalar], str]] = {
        ("norm", "sync"): "torch synchronises batch normalisation between CUDA devices alone; use workload.norm=batch"
    }

    def __init__(self, size: str = "b0", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = SEGMENTATION_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.pool_batches = self.dimensions.pool_batches

    def make_model(self) -> nn.Module:
        made = SegmentationModel(self.dimensions)
        return nn.SyncBatchNorm.convert_sync_batchnorm(made) if self.chosen["norm"] == "sync" else made

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        size = self.dimensions
        labels = torch.randint(size.classes + 1, (self.batch_size, size.height, size.width), generator=generator)
        return {
            "pixel_values": torch.randn(self.batch_size, 3, size.height, size.width, generator=generator),
            "labels": labels.masked_fill(labels == size.classes, IGNORED_PIXEL),
        }
