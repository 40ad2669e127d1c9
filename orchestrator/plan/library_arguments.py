"""Equivalents of a setting in libraries that a script may train with: arguments of Trainer, accelerate's plugin. Pure.

Only exact equivalents are offered: a setting with one more lever has none.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compile_sweep.schema.choices import ActivationCheckpointing, Dynamic, Mode, OptimizerKind, Scope
from compile_sweep.schema.settings import CompileSettings


def training_arguments(settings: CompileSettings) -> str | None:
    """Returns the Hugging Face `TrainingArguments` equivalent to the settings; None if there are none."""
    spelled = ("mode", "cudagraphs", "backend", "optimizer", "matmul_precision", "activation_checkpointing")
    if _without(settings, *spelled) != _without(CompileSettings(scope=settings.scope, dynamic=settings.dynamic), *spelled):
        return None
    if settings.scope not in (Scope.EAGER, Scope.FULL) or settings.dynamic not in (None, Dynamic.AUTO):
        return None
    if settings.scope is Scope.EAGER and settings.claims_cudagraphs:
        return None
    if settings.optimizer not in (OptimizerKind.FOREACH, OptimizerKind.FUSED):
        return None
    if settings.matmul_precision not in (None, "high") or settings.activation_checkpointing is ActivationCheckpointing.BLOCKS:
        return None
    words = ["torch_compile=True"] if settings.scope is Scope.FULL else []
    words += [f'torch_compile_mode="{settings.mode}"'] if settings.mode not in (None, Mode.DEFAULT) else []
    words += [f'torch_compile_backend="{settings.backend}"'] if settings.backend is not None else []
    words += ['optim="adamw_torch_fused"'] if settings.optimizer is OptimizerKind.FUSED else []
    words += ["tf32=True"] if settings.matmul_precision == "high" else []
    words += ["gradient_checkpointing=False"] if settings.activation_checkpointing is ActivationCheckpointing.OFF else []
    return ", ".join(words) or None


def accelerate_plugin(settings: CompileSettings) -> str | None:
    """Returns the argument of accelerate's `Accelerator` that compiles as the settings do; None if there is none."""
    common = _without(settings, "mode", "cudagraphs", "backend", "fullgraph")
    if settings.scope not in (Scope.FULL, Scope.REGIONAL) or settings.dynamic in (Dynamic.MARK, Dynamic.BUCKETS):
        return None
    if common != _without(CompileSettings(scope=settings.scope, dynamic=settings.dynamic), "mode", "cudagraphs", "backend"):
        return None
    words = [f'backend="{settings.backend or "inductor"}"']
    words += [f'mode="{settings.mode}"'] if settings.mode not in (None, Mode.DEFAULT) else []
    words += ["fullgraph=True"] if settings.fullgraph else []
    words += [f"dynamic={settings.dynamic is Dynamic.TRUE}"] if settings.dynamic is not Dynamic.AUTO else []
    words += ["use_regional_compilation=True"] if settings.scope is Scope.REGIONAL else []
    return f"dynamo_plugin=TorchDynamoPlugin({', '.join(words)})"


def equivalents(settings: CompileSettings, script: str) -> Iterator[tuple[str, str]]:
    """Yields equivalents of the settings in the libraries that a script trains with: where to write it, and what."""
    pads = settings.pad_to_multiple_of is not None
    if pads and "datacollator" not in script:
        return
    rest = replace(settings, pad_to_multiple_of=None)
    found = []
    if "trainingarguments" in script and (words := training_arguments(rest)):
        found.append(("TrainingArguments", words))
    if re.search(r"\baccelerate\b", script) and re.search(r"\baccelerator\(", script) and (words := accelerate_plugin(rest)):
        found.append(("Accelerator", words))
    yield from found
    if found and pads:
        yield "the data collator", f"pad_to_multiple_of={settings.pad_to_multiple_of}"


def _without(settings: CompileSettings, *names: str) -> dict[str, Any]:
    """Returns the settings' fields except the given ones."""
    return {name: value for name, value in settings.to_dict().items() if name not in names and value is not None}
