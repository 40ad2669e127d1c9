"""What a person reads instead of a setting's key: short words, without what is usual."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.spelling import spelled
from workloads.vocabulary import Dynamic, OptimizerKind, Scope

if TYPE_CHECKING:
    from workloads.settings import CompileSettings

DEFAULT_PAD_MULTIPLE = 8


def label_of(settings: CompileSettings) -> str:
    """The settings in words."""
    words: list[str] = [settings.scope]
    if settings.mode is not None:
        words.append(settings.mode)
    if settings.backend is not None:
        words.append(f"backend {settings.backend}")
    if settings.dynamic is Dynamic.BUCKETS:
        words.append(f"buckets {spelled(settings.buckets)}" if settings.buckets else f"buckets of {settings.bucket_size}")
    elif settings.dynamic is not None:
        words.append(f"dynamic={settings.dynamic}" if settings.dynamic is Dynamic.TRUE else settings.dynamic)
    words += [f"{name} {part.label}" for name, part in settings.parts or ()]
    if settings.scope is Scope.EAGER or settings.pad_multiple not in (None, DEFAULT_PAD_MULTIPLE):
        words.append(f"pad to {settings.padding}" + (f" ×{settings.pad_multiple}" if settings.pad_multiple else ""))
    if settings.optimizer is not OptimizerKind.FOREACH:
        words.append(f"{settings.optimizer} optimizer")
    if settings.group_window is not None:
        words.append(f"grouped {settings.group_window}")
    for name in ("fullgraph", "shape_padding", "static_gradients"):
        if (value := getattr(settings, name)) is not None:
            words.append(name.replace("_", " ") if value else f"no {name.replace('_', ' ')}")
    for name in ("dynamic_min", "dynamic_max", "recompile_limit", "matmul_precision", "autocast", "attention"):
        if (value := getattr(settings, name)) is not None:
            words.append(f"{name.replace('_', ' ')} {value}")
    words += [
        f"{name.rpartition('.')[2]}={spelled(value)}" for name, value in (*(settings.options or ()), *(settings.workload or ()))
    ]
    if settings.ddp is not None:
        words.append(settings.ddp.label)
    return ", ".join(words)
