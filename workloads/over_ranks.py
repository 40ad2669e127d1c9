"""What several workers measured, as one: they step together, so each has measured the group from where it stands.

Times of the warm-up and memory are those of the worker that has most: the group waits for the slowest and needs room for the
largest. Rates add up. Steady steps are worker 0's, since a step ends for all when gradients are reduced. A finding about the
compiler counts whoever made it, and the numbers hold only where every worker's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from workloads.lockstep import by_rank
from workloads.measurement import Measurement

_SEVERITY = ("nan", "diverges", "eager_unstable", "ok")
"""Of what the numerics check says, the gravest first."""

_FINDINGS = ("recompile_limit_hits", "cudagraph_skip_reasons", "fallbacks", "graph_break_reasons")


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
