"""What torch has for an optimizer: a fused implementation and a compiled step, neither of which takes sparse gradients."""

import weakref
from typing import Any

import torch
from torch.optim import Optimizer

SPARSE_GRADIENTS = (
    "has sparse gradients, as of nn.Embedding(sparse=True), which torch does not compile, and runs as the script has it"
)
"""What to say of an optimizer that was to be compiled."""

_sparse: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def has_sparse_gradients(optimizer: Optimizer) -> bool:
    """Tells whether it has, or had in a step, gradients that are sparse, as those of `nn.Embedding(sparse=True)`."""
    weights = (one for group in optimizer.param_groups for one in group["params"])
    if any(one.grad is not None and one.grad.layout is not torch.strided for one in weights):
        _sparse.add(optimizer)
    return optimizer in _sparse


def has_fused(optimizer: Optimizer) -> bool:
    """Tells whether torch has a fused implementation of the optimizer for these weights and the gradients that they have now."""
    if any("fused" not in group or group.get("differentiable") for group in optimizer.param_groups):
        return False
    if has_sparse_gradients(optimizer):
        return False
    weights = [one for group in optimizer.param_groups for one in group["params"]]
    return all(_steps_fused(type(optimizer), *which) for which in {(one.device, one.dtype) for one in weights})


def loops_over_weights(optimizer: Optimizer) -> bool:
    """Tells whether it updates weight after weight, as Muon and most that are not torch's do, and can be compiled."""
    has_other = any("foreach" in group or "fused" in group for group in optimizer.param_groups)
    cannot_compile = isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam)  # by closures, sparse gradients
    return not has_other and not cannot_compile


def _steps_fused(kind: type[Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Tries a fused step of torch's class on one weight, because torch refuses some only then, such as Adagrad's on CUDA."""
    of_torch: Any = next(one for one in kind.__mro__ if one.__module__.startswith("torch.optim"))
    if of_torch is Optimizer:  # a class of somebody else's, which has the option and is taken at its word
        return dtype.is_floating_point
    weight = torch.zeros(1, device=device, dtype=dtype).requires_grad_(dtype.is_floating_point)
    weight.grad = torch.zeros_like(weight)
    try:
        probe = of_torch([weight], fused=True)
        own = of_torch.step
        getattr(own, "__wrapped__", own)(probe)  # without the hooks that count steps
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
