"""Object detection: Hugging Face's YOLOS with random weights, on noise with COCO's image size and number of classes.

The loss is DETR's, as published, for batches whose images all have the same number of objects. Each object is assigned one
query so that the total cost is minimal (Carion et al., "End-to-End Object Detection with Transformers", 2020). The published
code solves that with SciPy on the CPU, called from Python, which breaks the graph. The option `matching` offers that, the same as
an operator, which stays inside one graph, and a greedy matching on the device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import YolosConfig, YolosForObjectDetection

from compile_sweep.contract.options import Option
from workloads.synthetic import ImageTraining

CLASS_COST, CORNER_COST, OVERLAP_COST = 1.0, 5.0, 2.0  # the paper's weights, for both the assignment and the loss


def matching_costs(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Returns the cost of assigning a query to an object, (batch, queries, objects); takes the arguments of `DetectionLoss`."""
    classes = logits.softmax(-1).gather(2, labels.unsqueeze(1).expand(-1, logits.size(1), -1))
    one, other = boxes.unsqueeze(2).expand(-1, -1, labels.size(1), -1), targets.unsqueeze(1).expand(-1, boxes.size(1), -1, -1)
    corners = (one - other).abs().sum(-1)
    return CORNER_COST * corners - CLASS_COST * classes - OVERLAP_COST * generalized_overlap(one, other)


def generalized_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Returns the generalized intersection over union of boxes given by center and size (Rezatofighi et al., 2019)."""
    low, high = one[..., :2] - one[..., 2:] / 2, one[..., :2] + one[..., 2:] / 2
    other_low, other_high = other[..., :2] - other[..., 2:] / 2, other[..., :2] + other[..., 2:] / 2
    shared = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0).prod(-1)
    around = (torch.maximum(high, other_high) - torch.minimum(low, other_low)).prod(-1)
    union = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - shared
    return shared / (union + 1e-7) - (around - union) / (around + 1e-7)


def hungarian(cost: Tensor) -> Tensor:
    """Returns each object's query in the assignment of least cost, (batch, objects), for costs of (batch, queries, objects)."""
    # NaN costs more than anything else: the loss then reports it, more clearly than SciPy would.
    finite = torch.nan_to_num(cost, nan=_MOST, posinf=_MOST, neginf=-_MOST).cpu().numpy()
    found = torch.empty(cost.size(0), cost.size(2), dtype=torch.int64)
    for number, image in enumerate(finite):
        queries, objects = linear_sum_assignment(image)
        found[number, torch.from_numpy(objects)] = torch.from_numpy(queries)
    return found.to(cost.device)


# It waits for the device and computes on the CPU, so it cannot be in a CUDA graph; Inductor therefore makes two graphs.
@torch.library.custom_op("compile_sweep::hungarian", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def hungarian_operator(cost: Tensor) -> Tensor:
    """Runs `hungarian` as an operator that the compiler calls without tracing it."""
    return hungarian(cost)


@hungarian_operator.register_fake
def _(cost: Tensor) -> Tensor:
    return cost.new_empty((cost.size(0), cost.size(2)), dtype=torch.int64)


def greedy(cost: Tensor) -> Tensor:
    """Returns each object's cheapest query that no earlier object has; on the device, without minimizing the total cost."""
    found = []
    for number in range(cost.size(2)):
        best = cost[:, :, number].argmin(1, keepdim=True)
        found.append(best)
        cost = cost.scatter(1, best.unsqueeze(-1).expand(-1, -1, cost.size(2)), torch.inf)
    return torch.cat(found, dim=1)


_MOST = 1e9

MATCHINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hungarian": hungarian_operator,
    "python": hungarian,
    "greedy": greedy,
}
"""Matchings by value of the option `matching`, the default first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionSize:
    """Dimensions of one size; those of `small` are the paper's."""

    layers: int
    width: int
    heads: int
    image_height: int
    image_width: int
    patch_pixels: int
    queries: int
    classes: int
    objects: int
    batch_size: int
    pool_batches: int


DETECTION_SIZES = {
    "small": DetectionSize(
        layers=12, width=384, heads=6, image_height=512, image_width=864, patch_pixels=16, queries=100, classes=91, objects=7,
        batch_size=8, pool_batches=10,
    ),
    "tiny": DetectionSize(
        layers=2, width=32, heads=2, image_height=32, image_width=48, patch_pixels=16, queries=6, classes=5, objects=2,
        batch_size=2, pool_batches=4,
    ),
}  # fmt: skip

NOTHING_WEIGHT = 0.1  # weight of the class "nothing" in the cross entropy, from DETR


class DetectionLoss(nn.Module):
    """Loss over classes, boxes and overlap of the matched queries, and over "nothing" for the others; in float32."""

    def __init__(self, matching: str = "hungarian") -> None:
        super().__init__()
        self.matching = matching

    def forward(self, logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Returns the scalar loss.

        Args:
            logits: (batch, queries, classes + 1), "nothing" last.
            boxes: (batch, queries, 4), center and size as fractions of the image.
            labels: (batch, objects), classes.
            targets: (batch, objects, 4), in the form of `boxes`.
        """
        logits, boxes = logits.float(), boxes.float()
        queries = MATCHINGS[self.matching](matching_costs(logits.detach(), boxes.detach(), labels, targets))
        nothing = logits.size(-1) - 1
        classes = torch.full(logits.shape[:2], nothing, device=logits.device).scatter(1, queries, labels)
        weights = torch.ones(nothing + 1, device=logits.device, dtype=logits.dtype)
        weights = torch.cat([weights[:-1], weights[-1:] * NOTHING_WEIGHT])
        chosen = boxes.gather(1, queries.unsqueeze(-1).expand(-1, -1, 4))
        corners = (chosen - targets).abs().sum(-1).mean()
        overlap = (1 - generalized_overlap(chosen, targets)).mean()
        by_class = cross_entropy(logits.transpose(1, 2), classes, weight=weights)
        return CLASS_COST * by_class + CORNER_COST * corners + OVERLAP_COST * overlap


class DetectionModel(nn.Module):
    """YOLOS and its loss."""

    def __init__(self, size: DetectionSize, matching: str) -> None:
        super().__init__()
        config = YolosConfig(
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.width,
            image_size=[size.image_height, size.image_width],
            patch_size=size.patch_pixels,
            num_detection_tokens=size.queries,
            use_mid_position_embeddings=False,
        )
        config.num_labels = size.classes
        self.model = YolosForObjectDetection(config)
        self.loss = DetectionLoss(matching)

    def forward(self, pixel_values: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Returns the scalar loss for images of (batch, 3, height, width); the other arguments are those of `DetectionLoss`."""
        found = self.model(pixel_values=pixel_values)
        loss: Tensor = self.loss(found.logits, found.pred_boxes, labels, targets)
        return loss


class Detection(ImageTraining):
    """YOLOS trained on synthetic images of COCO's size; EMA, matching and batch size may vary."""

    sizes = tuple(DETECTION_SIZES)
    options: ClassVar[Mapping[str, Option]] = {**ImageTraining.options, "matching": tuple(MATCHINGS)}

    def __init__(self, size: str = "small", seed: int = 0) -> None:
        super().__init__(size, seed)
        self.dimensions = DETECTION_SIZES[size]
        self.batch_size = self.dimensions.batch_size
        self.pool_batches = self.dimensions.pool_batches

    def make_model(self) -> nn.Module:
        return DetectionModel(self.dimensions, str(self.chosen["matching"]))

    def tensors(self, length: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        size = self.dimensions
        centers = torch.rand(self.batch_size, size.objects, 2, generator=generator)
        extents = 0.05 + 0.3 * torch.rand(self.batch_size, size.objects, 2, generator=generator)
        return {
            "pixel_values": torch.randn(self.batch_size, 3, size.image_height, size.image_width, generator=generator),
            "labels": torch.randint(size.classes, (self.batch_size, size.objects), generator=generator),
            "targets": torch.cat([centers, extents], dim=-1),
        }
