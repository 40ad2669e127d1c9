"""Tracks the tuning of Triton kernels at their first call: which were tuned, at what cost, and which were restored tuned.

A kernel from a restored graph remembers the path it was written to on the host that made it, and looks for its best
configuration next to that path; so does torch when it saves one. Both are redirected to this process's own folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

from compile_sweep.contract.installed_torch import private
from compile_sweep.harness.compile_cache.folders import ArtifactKind

if TYPE_CHECKING:
    from compile_sweep.harness.compile_cache.usage import Tally

AutotuneCache = private("torch._inductor.runtime.autotune_cache", "AutotuneCache")
CachingAutotuner = private("torch._inductor.runtime.triton_heuristics", "CachingAutotuner")


def functions_to_wrap(tally: Tally) -> Iterator[tuple[type | None, str, Callable[..., Any]]]:
    """Yields functions of torch to wrap: class, name, and a replacement that takes the original as its first argument."""

    def tune(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        result = original(kernel, *args, **kwargs)
        seconds = time.perf_counter() - begun
        if name := _name(kernel):
            tally.tuned(name, seconds)
        return result

    def choose(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        configurations = compiled_configurations(kernel)
        result = tune(original, kernel, *args, **kwargs)
        if best := next((each.cache_hash for each in kernel.launchers if getattr(each, "cache_hash", None)), None):
            tally.chosen((ArtifactKind.TRITON, best), configurations)
        return result

    def make_ready(original: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(kernel, *args, **kwargs)
        if len(kernel.launchers) == 1 and (name := _name(kernel)):
            tally.spared(name)
        return result

    def find(original: Callable[..., Any], inductor_meta: dict[str, Any], filename: str, *args: Any, **kwargs: Any) -> Any:
        return original(inductor_meta, _here(filename), *args, **kwargs)

    def save(original: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        if cache.local_cache:
            cache.local_cache = (cache.local_cache[0], _here(cache.local_cache[1]))
        return original(cache, *args, **kwargs)

    yield AutotuneCache, "create", find
    yield AutotuneCache, "save", save
    yield CachingAutotuner, "precompile", make_ready
    yield CachingAutotuner, "autotune_to_one_config", choose
    yield CachingAutotuner, "coordinate_descent_tuning", tune


def keep_best_configuration(kernel: Any) -> bool:
    """Reduces a restored kernel to its best configuration if this process's folder has it; returns whether it changed."""

    def compile_anew() -> Any:
        raise LookupError("the best configuration is none of those that were compiled")

    several, filename = len(kernel.compile_results), kernel.filename
    if several < 2 or filename is None:
        return False
    kernel.filename = _here(filename)
    try:
        kernel.recheck_autotune_cache(reload_kernel_from_src=compile_anew)
    except LookupError:
        return False
    finally:
        kernel.filename = filename
    return len(kernel.compile_results) < several


def compiled_configurations(kernel: Any) -> list[tuple[str, str]]:
    """Returns kind and key of each of a kernel's remaining configurations that Triton compiled."""
    hashes = (getattr(result.kernel, "hash", None) for result in getattr(kernel, "compile_results", ()))
    return [(ArtifactKind.TRITON, triton_hash_to_path_key(each)) for each in hashes if each]


def _here(path: str) -> str:
    return str(Path(cache_dir(), *Path(path).parts[-2:]))


def _name(kernel: Any) -> tuple[str, str] | None:
    """Returns kind and key of a kernel's best configuration; None if the kernel has none of its own."""
    try:
        cache = AutotuneCache.create(kernel.inductor_meta, kernel.filename, "") if kernel.filename else None
    except Exception:  # watching a kernel must not make its launch fail
        return None
    if cache is None or cache.local_cache is None:
        return None
    return ArtifactKind.AUTOTUNE, "/".join(Path(cache.local_cache[1]).parts[-2:])
