"""Which query of a detector answers for which object: the assignment of least cost, as DETR has it, in three ways to compute it.

Source: Carion et al., "End-to-End Object Detection with Transformers" (2020): one query an object, the least sum of costs. The
published code solves that with SciPy on the CPU, from Python, which ends a graph; as an operator the same stays inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

CLASS_COST, CORNER_COST, OVERLAP_COST = 1.0, 5.0, 2.0
"""The paper's weights, of the assignment and of the loss alike."""


def costs(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """What it costs that a query answers for an object, (batch, queries, objects); arguments as `DetectionLoss` takes them."""
    classes = logits.softmax(-1).gather(2, labels.unsqueeze(1).expand(-1, logits.size(1), -1))
    one, other = boxes.unsqueeze(2).expand(-1, -1, labels.size(1), -1), targets.unsqueeze(1).expand(-1, boxes.size(1), -1, -1)
    corners = (one - other).abs().sum(-1)
    return CORNER_COST * corners - CLASS_COST * classes - OVERLAP_COST * generalized_overlap(one, other)


def generalized_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Generalised intersection over union of boxes given by centre and size (Rezatofighi et al., 2019)."""
    low, high = one[..., :2] - one[..., 2:] / 2, one[..., :2] + one[..., 2:] / 2
    other_low, other_high = other[..., :2] - other[..., 2:] / 2, other[..., :2] + other[..., 2:] / 2
    shared = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(min=0).prod(-1)
    around = (torch.maximum(high, other_high) - torch.minimum(low, other_low)).prod(-1)
    union = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - shared
    return shared / (union + 1e-7) - (around - union) / (around + 1e-7)


def hungarian(cost: Tensor) -> Tensor:
    """For each object its query in the assignment of least cost, (batch, objects), of costs (batch, queries, objects)."""
    # What is no number costs more than anything else: the loss then says what is wrong, and SciPy would say it in a worse way.
    finite = torch.nan_to_num(cost, nan=_MOST, posinf=_MOST, neginf=-_MOST).cpu().numpy()
    found = torch.empty(cost.size(0), cost.size(2), dtype=torch.int64)
    for number, image in enumerate(finite):
        queries, objects = linear_sum_assignment(image)
        found[number, torch.from_numpy(objects)] = torch.from_numpy(queries)
    return found.to(cost.device)


# It waits for the device and computes elsewhere: no part of a CUDA graph, which Inductor therefore makes two of.
@torch.library.custom_op("compile_sweep::hungarian", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def hungarian_operator(cost: Tensor) -> Tensor:
    """`hungarian`, as an operator that a compiler calls and does not look into."""
    return hungarian(cost)


@hungarian_operator.register_fake
def _(cost: Tensor) -> Tensor:
    return cost.new_empty((cost.size(0), cost.size(2)), dtype=torch.int64)


def greedy(cost: Tensor) -> Tensor:
    """For each object the query that costs least and answers for no object before it; on the device, and not the least sum."""
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
"""By the value of the option `matching`, the usual one first."""
