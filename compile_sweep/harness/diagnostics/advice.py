"""Explains a measurement to a person: what was compiled, what did not go as intended, and what usually helps. Pure values.

The table of causes, `compile_sweep/schema/causes/`, says what helps. This module adds what depends on the settings and the
workload: guards of sizes, and performance hints. A finding without advice keeps torch's own words, shortened by `torch_logs.py`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from compile_sweep.schema.causes.breaks import advice_on_break, advice_on_fallback, cause_of_break
from compile_sweep.schema.causes.cause import Cause
from compile_sweep.schema.causes.errors import REAL_PAIRS, advice_on_cudagraph_skip
from compile_sweep.schema.causes.guards import (
    FIXED_LENGTH,
    GROWS_UNEVENLY,
    GUARDS,
    MAY_VARY,
    advice_on_limit,
    are_of_blocks,
    cause_of_series,
    lasting_cause,
    named_advice,
)
from compile_sweep.schema.causes.recompiles import RecompileSeries, fold_recompiles
from compile_sweep.schema.causes.slowness import why_not_faster
from compile_sweep.schema.settings import CompileSettings, Dynamic, Scope
from compile_sweep.schema.visible_text import counted, ratio_text

_HINTS = (
    (r"TensorFloat32|tf32", "say matmul_precision=high, if the model bears it"),
    (r"Grad tensors", "say static_gradients=on"),
    (r"distinct sizes", "use dynamic=buckets, or leave CUDA graphs off: each size is captured for itself"),
    (r"tile_reductions", "try inductor.triton.tile_reductions=on"),
    (r"max_tiles", "try inductor.triton.max_tiles=3"),
    (r"max_autotune_gemm", "this GPU is too small for tuned matrix products; max-autotune gains nothing here"),
    (r"outside its CUDA graphs", "bring what it names to the GPU, or out of the forward"),
    (r"fast path of CUDAGraphs", "run the backward before the next forward"),
    (
        r"FallbackKernel: torch\.ops\.aten\._fft",
        "Inductor calls this kernel, as it should; what is computed between FFTs is fused as pairs, torch.view_as_real(x)",
    ),
    (
        r"complex operators|\(complex numbers\)",
        f"Inductor makes no kernels of complex numbers and fuses nothing with them: {REAL_PAIRS}",
    ),
    (r"FallbackKernel.*(attention|convolution|_mm|embedding)", "Inductor calls this kernel, as it should; nothing to do"),
    (r"FallbackKernel", "Inductor calls torch's kernel for this operator and fuses nothing with it"),
    (r"padding on CPU", "says only that this is a CPU; nothing to do"),
)

_PROPERTIES = {
    "dtype": "give it the same in every step, as by x.float() before the forward, under one autocast",
    "rank": "give it the same number of dimensions in every step",
    "device": "keep it on one device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSizes:
    """What a tensor's size may stand for."""

    settings: CompileSettings
    max_length: int  # tokens
    batch_size: int
    mark_fails: bool = False
    """Whether the same setting with dynamic=mark is known not to work."""

    def are_sequence_lengths(self, *sizes: int) -> bool:
        """Tells whether all sizes are lengths that batches are padded to, or the number of tokens in a batch of such a length."""
        known = self.settings.shape_policy(self.max_length).lengths()
        return any(set(sizes) <= {length * rows for length in known} for rows in (1, self.batch_size))


def advise_on_hint(text: str) -> str | None:
    """Returns what a performance hint means for these settings."""
    return next((advice for pattern, advice in _HINTS if re.search(pattern, text)), None)


_A_SIZE = r"([\w.\[\]']+)\.size\(\)\[(\d+)\]"


def explain_recompiles(
    series: RecompileSeries, lengths: KnownSizes, breaks: Sequence[str] = (), recompiles: Sequence[str] = ()
) -> str:
    """Explains the recompiles of one source, and what helps."""
    first, cause = series.first, _cause(series, lengths, breaks, recompiles)
    if size := re.match(r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)", first.guard):
        if cause is None and " from line " in first.function and lengths.settings.dynamic is Dynamic.MARK:
            cause = next(one for one in GUARDS if one.name == "length after a graph break")
        if cause is None and are_of_blocks(series, recompiles) and not lengths.are_sequence_lengths(int(size[3]), int(size[4])):
            rows = "output of unknown size"
            of_rows = size[2] == "0" and any(one and one.name == rows for one in map(cause_of_break, breaks))
            cause = next(one for one in GUARDS if one.name == (rows if of_rows else "blocks of different sizes"))
        if cause is None:
            before, now = int(size[3]), int(size[4])
            return _resized(_named(size[1]), int(size[2]), before, now, lengths, anew=len(series.values) > 1)
        return f"the size of {_named(size[1])} changed: {cause.advice}"
    if first.kind in _PROPERTIES:
        return f"the {first.kind} of {_named(first.source)} changed: {_PROPERTIES[first.kind]}"
    if cause is not None:
        return _guard_of(cause, series)
    if compared := re.fullmatch(rf"{_A_SIZE} [<>]=? {_A_SIZE}", first.guard):
        one, other = (f"dimension {compared[at + 1]} of {_named(compared[at])}" for at in (1, 3))
        what = f"the code asks whether {one} or {other} is larger, and each answer takes a graph"
        return f"{what}: pad them to one length before the forward, as with pad_sequence in the batch function or the collator"
    if grows := re.search(_A_SIZE, first.guard):
        if parity := re.search(r"size\(\)\[\d+\] % (\d+)", first.guard):
            what = f"the code asks whether dimension {grows[2]} of {_named(grows[1])} is a multiple of {parity[1]}"
            return f"{what}, and each answer takes a graph: accept one more, or pad to multiples, pad_multiple={parity[1]}"
        what = f"dimension {grows[2]} of {_named(grows[1])} left the range its graph was compiled for"
        return f"{what}: sizes of 0 and 1, and those the code compares with, are compiled apart; pad to others"
    return "what its graph was compiled for no longer held"


def _cause(series: RecompileSeries, lengths: KnownSizes, breaks: Sequence[str], recompiles: Sequence[str]) -> Cause | None:
    """Returns the cause from the table; a number that takes the batches' lengths is not a counter, unless it counts by ones."""
    fixes_numbers = lengths.settings.dynamic in (Dynamic.STATIC, Dynamic.BUCKETS)
    if fixes_numbers and (lasting := lasting_cause(series, breaks, recompiles)) is not None and lasting.name in MAY_VARY:
        return lasting
    cause = cause_of_series(series, breaks, recompiles)
    sizes = [int(value) for value in series.values if value.isdecimal() and int(value) > 1]
    is_number = cause is GROWS_UNEVENLY or (cause is not None and cause.name in ("module's counter", "number of each block"))
    if not is_number or {after - before for before, after in pairwise(sizes)} == {1}:
        return cause
    if len(sizes) > 1 and lengths.are_sequence_lengths(*sizes):
        return next(one for one in GUARDS if one.name == "cache that grows")
    return cause


def _guard_of(cause: Cause, series: RecompileSeries) -> str:
    """Returns the advice on a guard, with the names in it."""
    name, kind = _named(series.first.source), series.first.kind
    advice = named_advice(cause, series)
    values = series.values[0] if len(series.values) == 1 else f"{series.values[0]}, then {', '.join(series.values[1:3])}"
    if cause.name == "number of each block":
        return f"the Python value {name} was {values}: {advice}"
    if kind in ("requires_grad", "stride"):
        return f"the {kind} of {name} changed: {advice}"
    if kind == "length":
        return f"the length of {name} was {values} and changed: {advice}"
    if kind == "value" and not series.first.source.startswith("___"):
        return f"the Python value {name} was {values} and changed: {advice}"
    return advice


def _resized(tensor: str, dimension: int, before: int, now: int, lengths: KnownSizes, *, anew: bool) -> str:
    """Returns what a size that changed means. `anew`: it was compiled for more than one size, each in a graph of its own."""
    change = f"changed from {before} to {now}"
    if min(before, now) < 2:
        return f"dimension {dimension} of {tensor} {change}: torch compiles sizes of 0 and 1 apart, each in a graph of its own"
    if not lengths.are_sequence_lengths(before, now):
        return f"dimension {dimension} of {tensor} {change}: keep it fixed, or let the workload say that it varies (dynamic_dims)"
    what = f"the sequence length {change} (dimension {dimension} of {tensor})"
    dynamic = lengths.settings.dynamic
    if dynamic is Dynamic.BUCKETS:
        return f"{what}: as expected, one graph for each bucket; fewer buckets make fewer graphs"
    if dynamic is Dynamic.AUTO and anew:
        return f"{what}: each length takes a graph although dynamic=auto lets lengths vary, for {FIXED_LENGTH}"
    if dynamic is Dynamic.AUTO:
        at_once = "" if lengths.mark_fails else "; dynamic=mark does so at once"
        return f"{what}: dynamic=auto compiles the first length alone and then once for all{at_once}"
    if dynamic is Dynamic.MARK:
        return f"{what} although it is marked: a length at or beside dynamic_min or dynamic_max is compiled apart"
    return f"{what}: use dynamic=mark or buckets"


def _named(source: str) -> str:
    """Extracts the name that a person gave an argument from Dynamo's path to it."""
    if not re.fullmatch(r"[\w.\[\]']+", source):
        return source
    names = re.findall(r"\['([\w.]+)'\]|\.(\w+)|^(\w+)$", source)
    words = [word for found in names for word in found if word and word not in ("self", "kwargs")]
    return ".".join(words) or source


_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and the lines below it."""

    title: str
    lines: Sequence[str]


def explain_measurement(
    measurement: Mapping[str, Any], settings: CompileSettings, lengths: KnownSizes, targets: Sequence[str]
) -> Iterator[Section]:
    """Yields everything about one measured setting, as `Measurement.to_dict` gives it, except its verdict and its source."""
    found = measurement
    yield Section(title="compiled", lines=list(_compiled(found, settings, targets)))
    breaks = found["graph_break_reasons"]
    yield Section(title="graph breaks", lines=_listed(breaks, advice_on_break))
    recompiles, hits = found["recompile_reasons"], found["recompile_limit_hits"]
    yield Section(title="recompiles", lines=_recompiled(recompiles, lengths, breaks))
    yield Section(title="recompile limits hit", lines=_listed(hits, lambda hit: advice_on_limit(hit, recompiles, breaks)))
    eagerly = [*found["fallbacks"], *(f"{hit.partition(' hit ')[0]} from its recompile limit on" for hit in hits)]
    yield Section(title="runs eagerly", lines=_listed(eagerly, lambda text: advice_on_fallback(text, breaks)))
    if settings.claims_cudagraphs:
        yield Section(title="CUDA graphs skipped", lines=_listed(found["cudagraph_skip_reasons"], advice_on_cudagraph_skip))
    hints = _with_advice((hint, advise_on_hint(hint)) for hint in found["perf_hints"])
    yield Section(title="performance hints", lines=hints or ["none"])
    yield Section(title="time", lines=list(_times(found)))
    if changes := found.get("findings"):
        yield Section(title="changes while it trains", lines=changes)
    if settings.scope is not Scope.EAGER and (reasons := why_not_faster(found, found["speedup_eager"], settings.backend)):
        lines = [line for one in reasons for line in (one.found, f"  → {one.advice}")]
        yield Section(title="why it is not faster than eager", lines=lines)
    yield Section(title="compile time", lines=list(_phases(found)))
    yield Section(title="memory", lines=list(_memory(found)))
    yield Section(title="numerics", lines=list(_numerics(found["numerics"])))


_SHORT = 3  # how many findings of one kind a short list shows


def short_findings(found: Mapping[str, Any], lengths: KnownSizes | None = None) -> Iterator[str]:
    """Yields the first graph breaks and recompiles of a measurement, one per line, with what helps below those it helps."""
    breaks, recompiles = found["graph_break_reasons"], found["recompile_reasons"]
    first = list(dict.fromkeys(breaks))[:_SHORT]
    yield from _with_advice((f"graph break: {text.splitlines()[0]}", advice_on_break(text)) for text in first)
    told = []
    for series in fold_recompiles(recompiles)[:_SHORT]:
        cause = cause_of_series(series, breaks, recompiles)
        short = named_advice(cause, series) if cause else _of_tensor(series)
        advice = explain_recompiles(series, lengths, breaks, recompiles) if lengths else short
        told.append((f"recompile: {series.text}", advice))
    yield from _with_advice(told)


def _of_tensor(series: RecompileSeries) -> str | None:
    """Returns what helps against recompiles for a tensor's size or property, where nothing is known of the batches' lengths."""
    name, kind = _named(series.first.source), series.first.kind
    if kind in _PROPERTIES:
        return f"the {kind} of {name} changed: {_PROPERTIES[kind]}"
    if not kind.startswith("size "):
        return None
    if len(series.values) == 1:
        return f"the size of {name} changed for the first time: dynamic=auto makes one graph more, for all sizes but 0 and 1"
    return f"each size of {name} takes a graph although dynamic=auto lets sizes vary, for {FIXED_LENGTH}"


def _with_advice(findings: Iterable[tuple[str, str | None]]) -> list[str]:
    """Lists findings, with each advice once, below the findings that it is about."""
    by_advice: dict[str | None, list[str]] = {}
    for line, advice in findings:
        by_advice.setdefault(advice, []).append(line)
    return [line for advice, told in by_advice.items() for line in (*told, *([f"  → {advice}"] if advice else ()))]


def _compiled(found: Mapping[str, Any], settings: CompileSettings, targets: Sequence[str]) -> Iterator[str]:
    graphs = counted(found["graphs"], "graph")
    if settings.scope is Scope.EAGER:
        yield f"{graphs}: scope=eager compiles no part of the model"
    elif settings.compiles_whole:
        yield f"{graphs} of the model and its loss as one"
    else:
        yield f"{graphs} of {counted(len(targets), 'module')}: {_shown(targets)}"
        if settings.scope is Scope.REGIONAL:
            yield "modules of one class share their graphs"


def _listed(findings: Sequence[str], helps: Callable[[str], str | None]) -> list[str]:
    """Lists each distinct finding with its count and what helps."""
    lines: list[str] = []
    for text, times in Counter(findings).items():
        head, *rest = text.splitlines()
        lines.append(f"{head}{f' ({times} times)' if times > 1 else ''}")
        lines += rest
        if helped := helps(text):
            lines.append(f"  → {helped}")
    return lines or ["none"]


def _recompiled(recompiles: Sequence[str], lengths: KnownSizes, breaks: Sequence[str]) -> list[str]:
    """Lists each source once, with its values and what helps."""
    folded = fold_recompiles(recompiles)
    return _with_advice((series.text, explain_recompiles(series, lengths, breaks, recompiles)) for series in folded) or ["none"]


def _times(found: Mapping[str, Any]) -> Iterator[str]:
    low, high = found["step_ms_ci95"]
    steadiness = "" if found["stable"] else ", and not stable"
    interval = f"95%: {low:.3g} to {high:.3g}{steadiness}"
    yield f"{found['step_ms_median']:.3g} ms a step ({interval}), {found['samples_per_s']:,.1f} samples/s"
    if found["speedup_eager"] is not None:
        yield f"{ratio_text(found['speedup_eager'])} times as fast as eager on the same batches"
    if found["data_wait_share"] is not None:
        yield f"{found['data_wait_share']:.1%} of the time it waits for data"


def _phases(found: Mapping[str, Any]) -> Iterator[str]:
    total = found["compile_s"]
    spared = found.get("graphs_without_code")
    if spared is not None and found["device"] == "cpu":
        yield "without torch's check of this CPU's vector instructions, which every trial of a sweep makes"
    if spared:
        graphs = counted(found["graphs"], "graph")
        yield f"without the code of {spared} of {graphs}, which repeat others and run once: longer in a sweep"
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
    yield f"{status}, over {counted(numerics['compared_steps'], 'step')} beside eager: {numerics['worst']}"
    if remark := numerics.get("remark"):
        yield f"  {remark}"
    if advice := numerics.get("advice"):
        yield f"  → {advice}"
    if check := numerics.get("gradient_check"):
        yield _gradient_check(check)


def _gradient_check(check: Mapping[str, Any]) -> str:
    """Says what is known of the gradients."""
    if check["outcome"] == "skipped":
        return f"whether gradients belong to the loss could not be checked: {check['reason']}"
    layers = ", ".join(f"{name} {100 * error:+.3g}%" for name, error in check["layers"].items())
    within = f"within {100 * check['error']:.2g}% of one layer's ({100 * check['allowed']:.2g}% allowed)"
    if off := check.get("eager_error"):
        return (
            f"gradients are eager's {within}, which do not belong to the loss either: off by {100 * off:.3g}% of one layer's, "
            "as a detach, a straight-through estimate, a hook on a gradient or a backward of a custom autograd.Function do; fine "
            "if meant"
        )
    if check.get("follows_eager"):
        alone = "finite differences alone cannot tell whether they belong to the loss"
        return f"gradients are eager's {within}, by how both losses change along them; {alone}"
    is_wrong = check["outcome"] == "wrong"
    if check.get("beside_eager"):
        told, means = f"are not eager's: {layers}" if is_wrong else f"are eager's {within}", "at the same weights and batch"
    else:
        told = f"do not belong to the loss: {layers}" if is_wrong else f"belong to the loss {within}"
        means = "by finite differences in the compiled code"
    share = check.get("share_checked") or 1.0
    rest = f"; {100 * (1 - share):.2g}% of the layers could not be checked" if not is_wrong and share < 1 else ""
    return f"gradients {told}, {means}{rest}"


def _shown(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    return ", ".join(names) if len(names) <= most else f"{', '.join(names[: most - 1])}, … {names[-1]}"


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
