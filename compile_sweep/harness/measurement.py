"""What a measurement is: how long it takes, and the figures that come of it.

What several workers measured, as one: they step together, so each has measured the group from where it stands.

Times of the warm-up and memory are those of the worker that has most: the group waits for the slowest and needs room for the
largest. Rates add up. Steady steps are worker 0's, since a step ends for all when gradients are reduced. A finding about the
compiler counts whoever made it, and the numbers hold only where every worker's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from compile_sweep.harness.distributed import by_rank
from compile_sweep.harness.numerics.trajectory import COMPARED_STEPS
from compile_sweep.harness.steady import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long to measure."""

    compared_steps: int = COMPARED_STEPS
    """First steps, on real batches, that are compared with eager."""
    visits: int = 2
    """Times the warm-up goes through every length."""
    cudagraph_visits: int = 3
    """The same with CUDA graphs, which torch captures on the second visit of a length and replays from the third."""
    min_passes: int = 4
    max_passes: int = 8
    min_window_s: float = 2.0
    """Passes over the pool of batches; the window grows until the interval is narrow, or this many are done and it is so long."""
    target_width: float = 0.01
    """Width over the median, both of the typical step, at which its 95 % interval is narrow."""
    cpu_target_width: float = 0.10
    """The same on CPUs, which share their host; only ratios within one run are quoted of them."""
    cpu_window_s: float = 12.0
    """In place of `min_window_s` on CPUs, where what disturbs a step may last for seconds."""
    eager_batches: int = 8
    """Batches of the pool in a block of eager reference steps, at most."""
    eager_budget_s: float = 10.0
    """For all blocks together; slow steps make blocks shorter, and very slow ones do without."""
    real_passes: int = 3
    """Passes over what the loader gives, with pipeline=real."""

    def limits(self, device: torch.device) -> Limits:
        """Of the window."""
        on_gpu = device.type == "cuda"
        return Limits(
            min_passes=self.min_passes,
            max_passes=self.max_passes,
            min_window_s=self.min_window_s if on_gpu else self.cpu_window_s,
            target_width=self.target_width if on_gpu else self.cpu_target_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one worker measured, or several together (`combined`); units are in the names."""

    device: str
    compile_s: float
    """Of the slowest worker, as the other times of the warm-up are."""
    compile_phases_s: dict[str, float]
    """Adds up to `compile_s`; see `CompilePhase`."""
    first_step_s: float
    warmup_s: float
    warmup_steps: int
    steady_steps: int
    step_ms_median: float
    step_ms_ci95: tuple[float, float]
    stable: bool
    """Whether that interval became narrow before the limit of passes."""
    outliers: int
    """Steps over 1.5 times their batch's median; kept in every figure."""
    samples_per_s: float
    """Of all workers, over whole passes: of prepared batches, or with pipeline=real of the loader's."""
    samples_per_s_ci95: tuple[float, float]
    tokens_per_s: float
    mean_length: float
    eager_step_ms: list[float]
    """Of the eager reference, block by block; empty where there was none."""
    speedup_eager: float | None
    speedup_eager_ci95: tuple[float, float] | None
    clock_drift: float | None
    """Slowest over fastest block of the eager reference, less 1."""
    peak_memory_bytes: int
    peak_reserved_bytes: int | None
    compile_peak_memory_bytes: int | None
    cudagraph_pool_bytes: int | None
    pipeline: str
    data_wait_share: float | None
    """With pipeline=real, the share of a step that waits for its data."""
    source: str
    """The settings as Python, as executed."""
    numerics: dict[str, Any]
    graphs: int
    graph_break_reasons: list[str]
    recompile_reasons: list[str]
    recompile_limit_hits: list[str]
    cudagraph_skips: int
    cudagraph_skip_reasons: list[str]
    perf_hints: list[str]
    fallbacks: list[str]
    step_ms: list[float]
    """Every timed step on a prepared batch, pass by pass."""
    findings: list[str] = field(default_factory=list)
    """What changed while it trained, a sentence each."""
    samples_per_s_per_worker: float | None = None
    """Mean over the workers."""
    compile_s_by_rank: list[float] = field(default_factory=list)
    """Of each worker."""
    peak_memory_bytes_by_rank: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that cross processes without this module."""
        return asdict(self)


_SEVERITY = ("nan", "diverges", "eager_unstable", "ok")
"""Of what the numerics check says, the gravest first."""

_FINDINGS = ("findings", "recompile_limit_hits", "cudagraph_skip_reasons", "fallbacks", "graph_break_reasons")


def together(measured: Measurement) -> Measurement:
    """The group's measurement, in every worker; all must call this together.

    Args:
        measured: this worker's own, with its own rates.
    """
    return combined(by_rank(measured))


def combined(ranks: Sequence[Measurement]) -> Measurement:
    """One measurement of those of all workers, in the order of their ranks."""
    first, slowest = ranks[0], max(ranks, key=lambda one: one.compile_s)
    total = sum(one.samples_per_s for one in ranks)
    share = total / first.samples_per_s  # the intervals of a group in lockstep are those of one of them, scaled
    low, high = first.samples_per_s_ci95
    values: dict[str, Any] = {
        **{name: _most(ranks, lambda one, name=name: getattr(one, name)) for name in _PEAKS},  # type: ignore[misc]
        **{name: _merged([getattr(one, name) for one in ranks]) for name in _FINDINGS},
        "compile_s": slowest.compile_s,
        "compile_phases_s": slowest.compile_phases_s,
        "first_step_s": max(one.first_step_s for one in ranks),
        "warmup_s": max(one.warmup_s for one in ranks),
        "samples_per_s": total,
        "samples_per_s_ci95": (low * share, high * share),
        "samples_per_s_per_worker": total / len(ranks),
        "tokens_per_s": sum(one.tokens_per_s for one in ranks),
        "mean_length": sum(one.mean_length for one in ranks) / len(ranks),
        "data_wait_share": _most(ranks, lambda one: one.data_wait_share),
        "cudagraph_skips": max(one.cudagraph_skips for one in ranks),
        "numerics": min((one.numerics for one in ranks), key=lambda numerics: _SEVERITY.index(str(numerics["status"]))),
        "compile_s_by_rank": [one.compile_s for one in ranks],
        "peak_memory_bytes_by_rank": [one.peak_memory_bytes for one in ranks],
    }
    return replace(first, **values)


_PEAKS = ("peak_memory_bytes", "peak_reserved_bytes", "compile_peak_memory_bytes", "cudagraph_pool_bytes")


def _most(ranks: Sequence[Measurement], of: Callable[[Measurement], float | None]) -> float | None:
    return max((value for one in ranks if (value := of(one)) is not None), default=None)


def told_by_all(own: Sequence[str]) -> list[str]:
    """What worker 0 tells, and what only another one does, with its rank; all must call this together."""
    return _merged(by_rank(list(own)))


def _merged(ranks: Sequence[Sequence[str]]) -> list[str]:
    found = list(ranks[0])
    for rank, told in enumerate(ranks[1:], start=1):
        found += [f"worker {rank}: {text}" for text in told if not any(text in known for known in found)]
    return found
