"""A measurement in words: what was compiled, what went otherwise than meant, and what helps. Pure: plain values in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads import advice
from workloads.advice import Lengths
from workloads.settings import CompileSettings, Scope

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands below it."""

    title: str
    lines: Sequence[str]


def explanation(
    measurement: Mapping[str, Any], settings: CompileSettings, lengths: Lengths, targets: Sequence[str]
) -> Iterator[Section]:
    """Everything about one measured setting but its verdict and its source.

    Args:
        measurement: `workloads.measuring.Measurement.to_dict()`, or the same out of JSON.
        settings: what was measured.
        lengths: what sizes of tensors stand for.
        targets: names of the modules compiled apart.
    """
    found = measurement
    yield Section(title="compiled", lines=list(_compiled(found, settings, targets)))
    yield Section(title="graph breaks", lines=_listed(found["graph_break_reasons"], advice.against_break))
    yield Section(title="recompiles", lines=_listed(found["recompile_reasons"], lambda text: _guard_in_words(text, lengths)))
    limit = "those sizes run eagerly: use fewer lengths, dynamic=mark, or a higher recompile_limit"
    yield Section(title="recompile limits hit", lines=_listed(found["recompile_limit_hits"], lambda _: limit))
    yield Section(title="runs eagerly", lines=_listed(found["fallbacks"], advice.against_fallback))
    if settings.claims_cudagraphs:
        yield Section(title="CUDA graphs skipped", lines=_listed(found["cudagraph_skip_reasons"], advice.against_skip))
    yield Section(title="performance hints", lines=_listed(found["perf_hints"], advice.about_hint))
    yield Section(title="time", lines=list(_times(found)))
    yield Section(title="compile time", lines=list(_phases(found)))
    yield Section(title="memory", lines=list(_memory(found)))
    yield Section(title="numerics", lines=list(_numerics(found["numerics"])))


def _compiled(found: Mapping[str, Any], settings: CompileSettings, targets: Sequence[str]) -> Iterator[str]:
    graphs = _number(found["graphs"], "graph")
    if settings.scope is Scope.EAGER:
        yield f"{graphs}: scope=eager compiles no part of the model"
    elif settings.scope is Scope.FULL:
        yield f"{graphs} of the model and its loss as one"
    else:
        yield f"{graphs} of {_number(len(targets), 'module')}: {_shown(targets)}"
        if settings.scope is Scope.REGIONAL:
            yield "modules of one class share their graphs"


def _listed(findings: Sequence[str], helps: Callable[[str], str | None]) -> list[str]:
    """Each finding once, with how often it was met and what helps."""
    lines: list[str] = []
    for text, times in Counter(findings).items():
        head, *rest = text.splitlines()
        lines.append(f"{head}{f' ({times} times)' if times > 1 else ''}")
        lines += rest
        if helped := helps(text):
            lines.append(f"  → {helped}")
    return lines or ["none"]


def _guard_in_words(text: str, lengths: Lengths) -> str:
    return advice.about_guard(text.partition("): ")[2] or text, lengths)


def _times(found: Mapping[str, Any]) -> Iterator[str]:
    low, high = found["step_ms_ci95"]
    steadiness = "" if found["stable"] else ", and not stable"
    interval = f"95 %: {low:.3g} to {high:.3g}{steadiness}"
    yield f"{found['step_ms_median']:.3g} ms a step ({interval}), {found['samples_per_s']:,.1f} samples/s"
    if found["speedup_eager"] is not None:
        yield f"{found['speedup_eager']:.2f} times as fast as eager on the same batches"
    if found["data_wait_share"] is not None:
        yield f"{found['data_wait_share']:.1%} of the time it waits for data"


def _phases(found: Mapping[str, Any]) -> Iterator[str]:
    total = found["compile_s"]
    yield f"{total:.1f} s; the first step took {found['first_step_s']:.1f} s"
    for name, seconds in found["compile_phases_s"].items():
        if seconds >= 0.05:
            share = f"  {seconds / total:.0%}" if total else ""
            yield f"{name.replace('_', ' '):<20}{seconds:>8.1f} s{share}"


def _memory(found: Mapping[str, Any]) -> Iterator[str]:
    peak = found["peak_memory_bytes"]
    yield f"peak in use while training: {_size(peak)}"
    if (reserved := found["peak_reserved_bytes"]) is not None:
        yield f"peak reserved from the device: {_size(reserved)}"
    if (compiling := found["compile_peak_memory_bytes"]) is not None:
        yield f"peak while compiling and warming up: {_size(compiling)}"
    if pool := found["cudagraph_pool_bytes"]:
        yield f"of which CUDA graphs keep for themselves: {_size(pool)}{f', {pool / peak:.0%} of the peak' if peak else ''}"


def _numerics(numerics: Mapping[str, Any]) -> Iterator[str]:
    status = str(numerics["status"]).replace("_", " ")
    yield f"{status}, over {_number(numerics['compared_steps'], 'step')} beside eager: {numerics['worst']}"


def _shown(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[: most - 1])}, … {names[-1]}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
