"""Why a compiled setting is not faster than eager, as far as a record shows, and what helps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compile_sweep.schema.causes.breaks import NOTHING_TO_DO, advice_on_break
from compile_sweep.schema.causes.errors import REAL_PAIRS, advice_on_cudagraph_skip
from compile_sweep.schema.causes.guards import advice_on_limit, cause_of_series, named_advice
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.visible_text import counted

FASTER_FROM = 1.05  # speedup over eager from which a setting counts as faster

STILL_COMPILING = "compiling has not stopped"
"""In the finding about graphs that are compiled until the last timed step."""

NOTHING_EXPLAINS = "nothing that was recorded explains it"

_FAR_SLOWER_BELOW = 0.85
"""Speedup over eager below which more than a lack of things to fuse must be at work, or something beside the run."""

_SHORT_STEP_MS = 2.0
"""Step time below which fixed costs matter: a call of compiled code checks guards and passes through AOTAutograd's Python. Two
layers of 8 × 8, forward and backward, took 0.3 ms longer compiled than in eager on one core of a busy host.
"""

_WITHOUT_GAIN = (
    "most of the step may be in kernels that eager calls too, such as matrix products and attention, which leaves little to "
    "fuse; torch.profiler over one step says which"
)
_FAR_SLOWER = (
    "either other work slowed the machine down during this run, which a second run shows, or kernels that the compiler generates "
    "are slower here than those that eager calls, which torch.profiler over one step of each shows"
)

_WAITS_FROM = 0.1  # fraction of a step spent waiting for data from which the wait matters
_LAUNCH_BOUND_BELOW = 0.7  # fraction of a step with kernels running, below which the step is bound by launching them
_UNALIGNED_FROM = 0.1  # fraction of the matrix products' arithmetic with unaligned shapes from which the shapes matter

_BACKENDS_WITHOUT_CODE = ("eager", "aot_eager", "aot_eager_decomp_partition")


@dataclass(frozen=True, slots=True)
class Slowness:
    """Why a setting is not faster than eager, and what would help."""

    name: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}: {self.advice}"


def why_not_faster(found: Mapping[str, Any], speedup: float | None, backend: str | None = None) -> list[Slowness]:
    """Explains why a compiled setting is not faster than eager, the surest reason first; empty if it is faster.

    Only recorded facts count: without a profile, which only GPUs have, it is unknown whether memory or arithmetic limits a step,
    and this does not guess.
    """
    if speedup is None or speedup >= FASTER_FROM:
        return []
    unknown = _WITHOUT_GAIN if speedup >= _FAR_SLOWER_BELOW else _FAR_SLOWER
    return [*_runs_eagerly(found, backend), *_around_the_graphs(found)] or [Slowness("not known", NOTHING_EXPLAINS, unknown)]


def _runs_eagerly(found: Mapping[str, Any], backend: str | None) -> Iterator[Slowness]:
    if not found["graphs"]:
        yield Slowness("nothing compiled", "no graph was compiled", "see which parts run eagerly")
    if backend in _BACKENDS_WITHOUT_CODE:
        yield Slowness("backend", f"backend={backend} generates no code", "leave it out, so that Inductor does")
    for hit in found["recompile_limit_hits"]:
        where = hit.partition(" hit ")[0]
        advice = advice_on_limit(hit, found["recompile_reasons"], found["graph_break_reasons"])
        yield Slowness("recompile limit", f"{where} runs eagerly since it hit its recompile limit", advice)
    if number := len(found["fallbacks"]):
        yield Slowness(
            "runs eagerly", f"{counted(number, 'part')} of it run{'s' if number == 1 else ''} eagerly", "fix that first"
        )


def _around_the_graphs(found: Mapping[str, Any]) -> Iterator[Slowness]:
    """Yields costs of code that is compiled."""
    if any(STILL_COMPILING in text for text in found.get("findings", ())):
        series = max(fold_recompiles(found["recompile_reasons"]), key=lambda one: one.count, default=None)
        cause = cause_of_series(series, found["graph_break_reasons"], found["recompile_reasons"]) if series else None
        helps = named_advice(cause, series) if series and cause else "see what recompiles, and why"
        yield Slowness("recompiles", "it compiles again and again while steps are timed", helps)
    if (share := found.get("data_wait_share")) is not None and share >= _WAITS_FROM:
        yield Slowness(
            "data wait",
            f"it waits for data {share:.0%} of the time",
            "use more DataLoader workers, pinned memory or less work per sample; compiling cannot make that faster",
        )
    breaks = [(text, advice_on_break(text)) for text in found["graph_break_reasons"]]
    if own := [(text, mends) for text, mends in breaks if mends not in NOTHING_TO_DO]:
        first, mends = own[0]
        yield Slowness(
            "graph breaks",
            f"{counted(len(own), 'graph break')}, the first at {first.partition(' in ')[0].splitlines()[0]}",
            f"nothing is fused across a break, and Python runs between the graphs; {mends or 'mend it, or compile around it'}",
        )
    if any("complex operators" in text for text in found["perf_hints"]):
        yield Slowness("complex numbers", "it computes with complex numbers, which Inductor does not fuse", REAL_PAIRS)
    if skips := found["cudagraph_skip_reasons"]:
        yield Slowness("CUDA graphs skipped", "CUDA graphs were skipped", advice_on_cudagraph_skip(skips[0]))
    yield from _on_the_device(found.get("device_use") or {})
    if found["step_ms_median"] < _SHORT_STEP_MS:
        yield Slowness(
            "short steps",
            f"a step takes {found['step_ms_median']:.2g} ms, and any call of compiled code costs some tenths of a millisecond",
            "use a larger batch, fewer graphs that each hold more of the step (scope=full, optimizer=compiled), or, on a GPU, "
            "mode=reduce-overhead",
        )


def _on_the_device(use: Mapping[str, float]) -> Iterator[Slowness]:
    """Yields what a profile of the GPU shows; nothing without one."""
    if use.get("kernels_per_step") == 0:
        yield Slowness(
            "not profiled",
            "torch's profiler saw none of the GPU's kernels, so what limits a step is not known",
            "run it again alone on the card, without another profiler such as Nsight or DCGM, or ask nsys where the time goes",
        )
    if (busy := use.get("busy")) is None:
        return
    kernels = f"{use['kernels_per_step']:,.0f} kernels a step"
    if busy < _LAUNCH_BOUND_BELOW:
        yield Slowness(
            "launch-bound",
            f"the GPU runs kernels {busy:.0%} of the time, {kernels}, and waits for the next launch in between",
            "use mode=reduce-overhead, whose CUDA graphs launch many kernels at once, a larger batch, or larger graphs "
            "(scope=full, optimizer=compiled)",
        )
        return
    products = sum(use.get(f"{kind}_share", 0.0) for kind in ("matmul", "attention", "convolution"))
    moving = sum(use.get(f"{kind}_share", 0.0) for kind in ("pointwise", "reductions", "copies"))
    reached = f", at {use['mfu']:.0%} of the card's measured rate" if "mfu" in use else ""
    if products >= moving:
        yield Slowness(
            "matmul-bound",
            f"{products:.0%} of its kernels' time is matrix products, attention and convolutions{reached}, which eager calls too",
            "try a lower precision (autocast, matmul_precision=high), another attention kernel, mode=max-autotune, or "
            "memory_format=channels_last for convolutions",
        )
    else:
        yield Slowness(
            "memory-bound",
            f"{moving:.0%} of its kernels' time is element-wise work, reductions and copies, which memory limits",
            "try larger graphs, so that more is fused (scope=full, optimizer=compiled), or a lower precision",
        )
    if use.get("unaligned_products", 0.0) >= _UNALIGNED_FROM:
        yield Slowness(
            "shapes",
            f"{use['unaligned_products']:.0%} of its matrix products have a side that is not a multiple of 8",
            "pad vocabulary, widths and batches to multiples of 8 (64 for half precision), which tensor cores need",
        )
