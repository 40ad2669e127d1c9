"""What settings change in models of transformers: caches of keys and values, and the product of a mixture's experts."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from compile_sweep.script.job import ScriptError

Call = Callable[..., Any]

GROUPED = "grouped_mm"
"""Name of the implementation that transformers takes for experts where it can."""

IN_AUTOCAST = "grouped_mm_in_autocast"
"""Name under which the same in autocast's dtype is registered with transformers."""


def without_cache(module: nn.Module, call: Call, *, applies: Callable[[], bool]) -> Call:
    """Returns a replacement for a module's call in which models of transformers make no cache of keys and values in training.

    Their configurations say so during the call alone, because checkpoints keep them and generation needs the cache. A script that
    asks for the cache in the call itself gets it.
    """
    found = {id(held): held for part in module.modules() if (held := getattr(part, "config", None)) is not None}

    def call_without(*args: Any, **kwargs: Any) -> Any:
        changed = [config for config in found.values() if getattr(config, "use_cache", None) is True] if applies() else []
        for config in changed:
            config.use_cache = False
        try:
            return call(*args, **kwargs)
        finally:
            for config in changed:
                config.use_cache = True

    return call_without


def float32_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of experts whose float32 weights transformers multiplies by `torch.nn.functional.grouped_mm`."""
    for part in module.modules():
        is_layer = hasattr(part, "_apply_gate") and _implementation(part) in (GROUPED, IN_AUTOCAST)
        if is_layer and any(weights.dtype == torch.float32 for weights in part.parameters(recurse=False)):
            yield part


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def autocast_experts(module: nn.Module) -> None:
    """Has a model's experts multiplied in autocast's dtype, as its linear layers are.

    `torch.autocast` does not reach `grouped_mm` (https://github.com/pytorch/pytorch/issues/174763): weights in float32 are
    multiplied in float32, one expert after the other, and compiled code leaves Inductor for each layer of experts.

    Raises:
        ScriptError: No layer of the model has such experts.
    """
    if not any(True for _ in float32_experts(module)):
        raise ScriptError(
            "autocast_experts changes the experts of a mixture of transformers whose weights are float32 and whose "
            "experts_implementation is grouped_mm, and the script trains none; leave it out"
        )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # a library of the script's

    ALL_EXPERTS_FUNCTIONS.register(IN_AUTOCAST, _multiply_in_autocast)
    for model in module.modules():
        choose = getattr(model, "set_experts_implementation", None)
        if callable(choose) and _implementation(model) == GROUPED:
            choose(IN_AUTOCAST)


def _multiply_in_autocast(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns what `grouped_mm` does, of weights and inputs in autocast's dtype where autocast is on."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    grouped = cast(Callable[..., Tensor], grouped_mm_experts_forward)
    device = hidden_states.device.type
    if not torch.is_autocast_enabled(device):
        return grouped(self, hidden_states, top_k_index, top_k_weights)
    dtype = torch.get_autocast_dtype(device)
    return grouped(_Cast(self, dtype), hidden_states.to(dtype), top_k_index, top_k_weights)


class _Cast:
    """A module as another function reads it, with its weights cast."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
