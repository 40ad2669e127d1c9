"""Summarizes an inference step's outputs: their digest, which takes the place of training's loss, and sampled elements.

Background: outputs, such as the logits of a batch, are large, and reading all of them after each timed step would cost time that
the model does not. So a fixed random sample of elements is read, and only the compared steps are searched for NaN completely.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_sweep.schema.errors import WorkloadError

SAMPLED_OUTPUTS = 4096  # number of sampled elements per output tensor; smaller ones are read whole


def tensors_of(outputs: Any) -> list[Tensor]:
    """Lists every tensor that a model returned, in any structure of torch's; raises WorkloadError if there is none."""
    found = [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not found:
        raise WorkloadError(f"the model's forward returned {type(outputs).__name__} without a tensor in it; return its outputs")
    return found


@torch.no_grad()
def sample_elements(outputs: Sequence[Tensor]) -> Tensor:
    """Samples elements of the outputs, the same for equal shapes, in float32; both parts of complex numbers."""
    return torch.cat([_elements(_real(tensor).reshape(-1)).float() for tensor in outputs])


@torch.no_grad()
def digest(outputs: Sequence[Tensor]) -> Tensor:
    """Returns the root mean square of the sampled elements; infinite if one of them is."""
    return rms(sample_elements(outputs))


@torch.no_grad()
def rms(elements: Tensor) -> Tensor:
    """Returns the root mean square."""
    return elements.square().mean().sqrt()


@torch.no_grad()
def zero_infinities(elements: Tensor) -> Tensor:
    """Replaces infinite elements, which masked scores legitimately have, by 0."""
    return torch.where(elements.isinf(), 0.0, elements)


@torch.no_grad()
def any_nan(outputs: Sequence[Tensor]) -> Tensor:
    """Tells whether any element of the outputs is NaN, as a tensor on their device."""
    return torch.stack([tensor.isnan().any() for tensor in outputs]).any()


@torch.no_grad()
def count_infinities(outputs: Sequence[Tensor]) -> Tensor:
    """Counts inf and -inf elements of each output, one after the other, on their device."""
    return torch.stack([(_real(tensor) == value).sum() for tensor in outputs for value in (torch.inf, -torch.inf)])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _elements(flat: Tensor) -> Tensor:
    return flat if flat.numel() <= SAMPLED_OUTPUTS else flat[_where(flat.numel(), flat.device)]


@lru_cache(maxsize=64)
def _where(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(count, (SAMPLED_OUTPUTS,), generator=generator).to(device)
