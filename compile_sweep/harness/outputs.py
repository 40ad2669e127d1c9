"""What an inference step gives, as a few numbers: its digest, which stands where training has a loss, and sampled elements.

Background: outputs are large (the logits of a batch, say), and reading all of them after each timed step would cost what is not
the model's. So a fixed random sample of the elements is looked at, and only the compared steps are searched for NaN as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compile_sweep.schema.errors import WorkloadError

SAMPLED_OUTPUTS = 4096
"""Elements of each output tensor; smaller ones are taken whole."""


def tensors_of(outputs: Any) -> list[Tensor]:
    """Every tensor in what a model returned, be it one, a tuple, a dictionary or an output of Hugging Face's.

    Raises:
        WorkloadError: there is none.
    """
    found = [leaf.detach() for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not found:
        raise WorkloadError(f"the model's forward returned {type(outputs).__name__} without a tensor in it; return its outputs")
    return found


@torch.no_grad()
def sample_elements(outputs: Sequence[Tensor]) -> Tensor:
    """Chosen elements of the outputs, the same for equal shapes, in float32; of complex numbers both parts."""
    return torch.cat([_elements(_real(tensor).reshape(-1)).float() for tensor in outputs])


@torch.no_grad()
def digest(outputs: Sequence[Tensor]) -> Tensor:
    """Root mean square of the chosen elements; infinite where one of them is."""
    return rms(sample_elements(outputs))


@torch.no_grad()
def rms(elements: Tensor) -> Tensor:
    """Root mean square."""
    return elements.square().mean().sqrt()


@torch.no_grad()
def zero_infinities(elements: Tensor) -> Tensor:
    """The elements with 0 for infinite ones, which masked scores have by right."""
    return torch.where(elements.isinf(), 0.0, elements)


@torch.no_grad()
def any_nan(outputs: Sequence[Tensor]) -> Tensor:
    """Whether an element of the outputs is not a number, on their device."""
    return torch.stack([tensor.isnan().any() for tensor in outputs]).any()


@torch.no_grad()
def count_infinities(outputs: Sequence[Tensor]) -> Tensor:
    """How many elements of each output are inf, and how many -inf, one after the other, on their device."""
    return torch.stack([(_real(tensor) == value).sum() for tensor in outputs for value in (torch.inf, -torch.inf)])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _elements(flat: Tensor) -> Tensor:
    return flat if flat.numel() <= SAMPLED_OUTPUTS else flat[_where(flat.numel(), flat.device)]


@lru_cache(maxsize=64)
def _where(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(count, (SAMPLED_OUTPUTS,), generator=generator).to(device)
