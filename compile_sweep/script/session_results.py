"""Converts what a session found to the figures of a record and to sentences for a person."""

import gc
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn

from compile_sweep.contract.inspect_model import calls_attention, facts_of_blocks, preferred_memory_format
from compile_sweep.contract.precision import matmul_precision
from compile_sweep.harness import memory, steady
from compile_sweep.schema.causes.errors import GRAPHS_MEMORY
from compile_sweep.schema.choices import COMPILED_OPTIMIZERS, MatmulPrecision, SdpaKernel
from compile_sweep.schema.outcome import MAX_DATA_WAIT_SHARE, SCRIPT_PIPELINE
from compile_sweep.schema.part_settings import left_out
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import CompileSettings, Scope
from compile_sweep.schema.visible_text import spoken_number
from compile_sweep.script.apply.captured import captured_in_parts, left_eager, with_uncaptured
from compile_sweep.script.apply.huggingface import float32_experts
from compile_sweep.script.apply.optimizer_support import has_fused, has_sparse_gradients, loops_over_weights
from compile_sweep.script.apply.padding import why_not_padded
from compile_sweep.script.discover import Discovery, Target
from compile_sweep.script.fallback import leaving_out
from compile_sweep.script.session import Session
from compile_sweep.script.steady_steps import FAR_SLOWER, Stream


def measurement(session: Session) -> Measurement:
    """Returns the figures of this worker, before its numbers are judged."""
    stream, warm, peaks = _stream(session), session.warmup_peaks, session.peaks
    window, compile_s = stream.window, compile_s_of(session)
    samples, tokens = session.step_size()
    rate = stream.throughput(samples, tokens)
    reserved = [one for one in (peaks.reserved_bytes, warm.reserved_bytes) if one is not None]
    return Measurement(
        device=torch.cuda.get_device_name(session.device) if session.device.type == "cuda" else session.device.type,
        compile_s=compile_s,
        compile_phases_s=session.phases.split(compile_s),
        first_step_s=session.first_step_s,
        warmup_s=session.warmup_s,
        warmup_steps=len(session.warmup),
        steady_steps=len(stream.passes) * stream.pass_steps,
        step_ms_median=stream.median_ms,
        step_ms_ci95=steady.median_ci95(window.passes, window.lengths),
        stable=stream.is_stable,
        outliers=steady.outliers(window.passes),
        samples_per_s=rate.samples_per_s,
        samples_per_s_ci95=rate.ci95,
        tokens_per_s=rate.tokens_per_s,
        mean_length=tokens / samples,
        eager_step_ms=[],
        speedup_eager=None,
        speedup_eager_ci95=None,
        clock_drift=None,
        peak_memory_bytes=peaks.in_use_bytes,
        peak_reserved_bytes=max(reserved, default=None),
        compile_peak_memory_bytes=warm.tensors_bytes,
        cudagraph_pool_bytes=peaks.cudagraph_pool_bytes,
        pipeline=SCRIPT_PIPELINE,
        data_wait_share=stream.wait_share,
        source=source(session),
        model_facts=model_facts(session) if session.settings.as_written else {},
        numerics={"status": "ok"},
        **asdict(with_uncaptured(session.diagnostics, session.found.targets)),
        step_ms=[round(step_ms, 4) for times in window.passes for step_ms in times],
    )


def early(session: Session) -> dict[str, float]:
    """Returns the figures that the first pass already shows, at their best where batches differ in size."""
    stream = _stream(session)
    rate, slack = stream.throughput(*session.step_size()), stream.slack
    return {
        "compile_s": compile_s_of(session),
        "warmup_s": session.warmup_s,
        "step_ms_median": stream.median_ms / slack,
        "samples_per_s": rate.samples_per_s * slack,
        "tokens_per_s": rate.tokens_per_s * slack,
    }


def data_wait_share(session: Session) -> float:
    """Returns the share of the timed steps so far that waited for data."""
    return _stream(session).wait_share


def not_finite(session: Session) -> str | None:
    """Says that the script's own loss is not finite, with nothing compiled; None if it is, or training goes on after it."""
    losses = [float(loss) for loss in session.losses]
    if _compiles(session) or not losses or math.isfinite(losses[-1]):
        return None
    value = "NaN" if math.isnan(losses[-1]) else "infinite"
    number = sum(not math.isfinite(loss) for loss in losses)
    steps = "the only timed step" if len(losses) == 1 else f"{number} of {len(losses)} timed steps"
    return f"the script's own loss is {value}, not finite in {steps} with nothing compiled, so no numbers can be compared with it"


def compile_s_of(session: Session) -> float:
    """Returns the seconds that the warm-up, and later steps with new shapes, took beyond a typical step, without evaluations."""
    stream = _stream(session)
    counted = [one for one in session.warmup if stream.keeps_interrupted or not one.interrupted]
    if not _compiles(session):
        counted = [one for one in counted if one.is_new]  # others were slow by chance
    counted += stream.prepared
    return max(0.0, sum(one.compute_ms - stream.median_ms for one in counted) / 1e3)


def _compiles(session: Session) -> bool:
    """Tells whether anything is compiled or captured in this run."""
    settings, own = session.settings, session.own_compile
    if settings.as_written:
        return bool(own.modules or own.functions)
    return settings.scope is not Scope.EAGER or settings.claims_cudagraphs or settings.optimizer in COMPILED_OPTIMIZERS


def source(session: Session) -> str:
    """Returns the settings as Python, for a person who applies them by hand."""
    found = session.found.targets if session.settings.as_written else session.found.all_compiled
    names = ", ".join(f"{one.name} ({type(one.module).__name__})" for one in found)
    if session.settings.as_written:
        return f"# Nothing is applied: {names} runs as the script has it.\n"
    return (
        f"# What is compiled of the script: {names}. Before the first step:\nimport compile_sweep\n\n"
        f'compile_sweep.apply(model, optimizer, "{session.settings.key}")\n'
    )


def model_facts(session: Session) -> dict[str, Any]:
    """Returns fields of `WorkloadFacts` that follow from the modules that the script trains."""
    blocks = {target.module: target.blocks for target in session.found.targets}
    groups = [group for one in session.found.optimizers for group in one.param_groups]
    return {
        "memory_format": next(filter(None, map(preferred_memory_format, blocks)), None),
        "has_optimizer": bool(session.found.optimizers),
        "has_fused": any(map(has_fused, session.found.optimizers)),
        "can_compile_optimizer": not all(map(has_sparse_gradients, session.found.optimizers)),
        "is_fused": bool(groups) and all(group.get("fused") for group in groups),
        "loops_over_weights": any(map(loops_over_weights, session.found.optimizers)),
        "has_loss_outside": bool(session.found.loss_modules or session.found.loss_functions),
        "can_compile": any(not target.differentiated_twice for target in session.found.targets),
        "recomputes": session.found.num_recomputed > 0,
        "makes_cache": session.found.makes_cache,
        "float32_experts": _float32_experts(session) > 0,
        "can_pad": _can_pad(session),
        "batches_change": any(target.changing() for target in session.found.targets),
        "shapes_recur": session.stream is None or session.stream.shapes_recur,
        "autocasts": _has_lower_precision(session),
        **facts_of_blocks(blocks),
        **_facts_of_operators(session),
        "num_shapes": _num_shapes(session),
        "has_attention": _attends(session),
        "classes": _classes(session.found.targets),
    }


def _has_lower_precision(session: Session) -> bool:
    """Tells whether products have less than float32's precision in the script as it is."""
    chosen = session.settings.matmul_precision is None and matmul_precision() != MatmulPrecision.HIGHEST
    return chosen or all(target.autocast is not None or not _has_float32(target.module) for target in session.found.targets)


def _has_float32(module: nn.Module) -> bool:
    return any(one.dtype is torch.float32 for one in module.parameters())


_DEVICE_LIMITS = 0.5
"""Fraction of a step's time that the device still works when the step was launched, from which on launches do not limit it."""


def _facts_of_operators(session: Session) -> dict[str, Any]:
    found, stream = session.found, session.stream
    number = sum(target.operators.number for target in found.targets)
    if stream is None or not stream.times or not stream.behind_ms or not number or not session.settings.as_written:
        return {"num_operators": number}
    if statistics.median(stream.behind_ms) > _DEVICE_LIMITS * stream.median_ms:
        return {"num_operators": number}
    return {"num_operators": number, "us_per_operator": round(1e3 * stream.median_ms / (number * found.micro_steps), 1)}


def _num_shapes(session: Session) -> int:
    """Returns the number of shapes of the batches, from the end of the first steps on, of the module that met the most."""
    return max(Counter(target for target, _ in session.times_met).values(), default=1)


def _classes(targets: Iterable[Target]) -> list[str]:
    """Names the classes of the targets and their parts, without torch's own."""
    every = {type(part) for target in targets for part in target.module.modules()}
    return sorted(kind.__qualname__ for kind in every if not kind.__module__.startswith("torch."))


def other_batch_size(session: Session) -> str | None:
    """Says that the script does not train with the batch size it was given; None if it does."""
    asked = session.settings.batch_size
    samples = statistics.median(size[0] for size in session.sizes) if asked else 0
    if asked is None or (samples and samples % asked == 0):
        return None
    found = f"{samples:g} samples" if samples else "samples that cannot be counted"
    return (
        f"the script was given a batch size of {asked}, and a step has {found}, so that sizes cannot be compared; name the "
        "option that sets it with --batch-arg, or leave batch_size out"
    )


MANY_OPERATORS = 2500
"""Operators of a forward that take about two minutes to compile, at the 0.05 s of `orchestrator/plan/estimates.py`."""

PLANNED_ATTENTION = (
    "batches keep coming in new shapes; where attention has a mask, torch takes cuDNN's kernels on Hopper and later, which are "
    "planned anew for each shape: try sdpa_kernel=efficient"
)


def _attends(session: Session) -> bool:
    """Tells whether torch chooses a kernel of attention: not where a module computes attention by products and a softmax."""
    return session.found.num_attended > 0 or any(calls_attention(target.module) for target in session.found.targets)


def plans_attention(settings: CompileSettings, device: torch.device, stream: Stream, attends: Callable[[], bool]) -> bool:
    """Tells whether the attention kernels of a script's steps may have to be planned in each of many steps, on the CPU.

    A public report has 0.44 s for the forward pass and 0.55 s for the backward pass on a B200 with torch 2.11, in one step in
    six (https://github.com/modelscope/FunASR/issues/3704).

    Args:
        settings: What the script was measured with.
        device: Where the script trains.
        stream: Its timed steps.
        attends: Tells whether torch chooses a kernel of attention in them, which may read the source of the model.
    """
    is_planned = device.type == "cuda" and settings.sdpa_kernel in (None, SdpaKernel.CUDNN)
    return is_planned and (not stream.shapes_recur or stream.extra_ms > 0) and attends()


TWICE = "not compiled by any setting, because the script differentiates its gradients again (create_graph=True)"


def findings(session: Session) -> list[str]:
    """Returns what a person should know about the script, in sentences; the limiting factor first."""
    return list(_findings(session))


def _findings(session: Session) -> Iterator[str]:
    found, stream = session.found, session.stream
    if (reason := not_finite(session)) is not None:
        yield reason
    if stream is not None and stream.times and stream.wait_share > MAX_DATA_WAIT_SHARE:
        yield (
            f"a step waits for its data {stream.wait_share:.0%} of the time, which no setting shortens, and figures are of the "
            "rest; more DataLoader workers or less work for each sample would save up to that much"
        )
    if (idle := _idle_share(session)) > _MOST_IDLE:
        yield (
            f"the script sleeps {idle:.0%} of the time outside of a DataLoader, as where it takes batches from a queue, a "
            "disk or a network; no setting shortens that, and figures include it, so gains look smaller than they are"
        )
    yield from _modules(found.targets)
    if (uncalled := _uncalled_whole(found)) is not None:
        yield (
            f"the script trains by calling {len(found.targets)} parts of {uncalled}, not {uncalled} itself, as where a method "
            "other than forward does the work, so each part is compiled apart; with that work in its forward, it is compiled as "
            "a whole"
        )
    for target in found.targets:
        if target.operators.number >= MANY_OPERATORS:
            fewer = "; scope=eager,cudagraphs=on captures it in seconds" if target.device.type == "cuda" else ""
            yield (
                f"a forward of {target.name} has {target.operators.number:,} operators, as one with a loop over the words of a "
                f"text has, and takes minutes to compile{fewer}"
            )
        if session.settings.scope is Scope.EAGER and stream is not None and stream.times and _slices_limit(target, stream):
            yield (
                f"the forward of {target.name} takes {target.operators.num_slices} slices of one tensor, such as x[:, i] in a "
                "loop, and for each of them the backward pass writes a tensor as large as the whole: take them at once, for part "
                "in x.unbind(1)"
            )
        met = session.shapes_met.get(target, [])
        if not target.changing() and 1 < len(met) == len(set(met)):
            yield (
                f"the batches of {target.name} change in shape as training goes on, {_then(met)}, so settings timed from "
                "another step on had other batches: let the script train with one size while it is swept"
            )
    for target in found.frozen:
        size = sum(weights.numel() for weights in target.module.parameters())
        kind = type(target.module).__name__
        yield f"module {target.name}: {kind} of {spoken_number(size)} parameters, called in every step and not trained"
    kinds = [f"{type(one).__name__}{', fused' if one.param_groups[0].get('fused') else ''}" for one in found.optimizers]
    for kind, number in Counter(kinds).items():
        yield f"optimizer {kind}{f', {number} of them' if number > 1 else ''}"
    if found.steps_by_backward:
        yield "no optimizer of torch.optim steps, so each backward pass counts as a step, and its settings change nothing"
    if (calls := _calls_of_a_step(session)) > 1:
        called = "the model" if len(found.targets) == 1 else found.primary.name
        yield (
            f"{called} is called {calls} times for each step, as where batches are accumulated, a loss compares "
            "several outputs, a policy acts before it learns, or an optimizer calls the loss itself"
        )
    first, timed = _samples_at_first(session), 0.0 if stream is None or not stream.times else stream.mean_size()[0]
    if timed and not 1 / _OTHER_SAMPLES < timed / first < _OTHER_SAMPLES:
        yield (
            f"a step had {first:.3g} samples at first and {timed:.3g} when it was timed, as where batches grow or more of them "
            "are accumulated as training goes on; the figures are of the latter"
        )
    if recomputed := found.num_recomputed // max(1, found.num_backward if found.steps_by_backward else found.num_steps):
        peak, whole = session.peaks.in_use_bytes or 0, memory.total_bytes(session.device)
        spare = f", and a step needs {peak / 2**30:.3g} of the GPU's {whole / 2**30:.3g} GiB: try activation_checkpointing=off"
        yield (
            f"activations are recomputed in the backward pass, {recomputed} calls of torch.utils.checkpoint a step"
            f"{spare if 0 < 2 * peak < whole else ''}"
        )
    if (experts := _float32_experts(session)) and not session.settings.autocast_experts:
        layers = "1 layer" if experts == 1 else f"{experts} layers"
        yield f"autocast leaves the experts of {layers} in float32, because it does not reach grouped_mm: try autocast_experts=on"
    if own := dict.fromkeys([*session.own_compile.modules, *session.own_compile.functions]):
        yield f"the script calls torch.compile itself, on {', '.join(own)}"
    if stream is not None and stream.interrupted:
        steps = "1 timed step" if stream.interrupted == 1 else f"{stream.interrupted} timed steps"
        share = f"; it took {stream.interrupted_share:.0%} of the time" if stream.interrupted_share > MAX_DATA_WAIT_SHARE else ""
        yield f"{steps} held an evaluation, a policy that acts or a checkpoint, which no figure includes{share}"
    if stream is not None and 0 < stream.extra_ms < math.inf:
        new, all_steps = len(stream.new), len(stream.taken)
        which = "it" if new == 1 else "each"
        has_ids = any(name.endswith("ids") for target in session.found.targets for name in target.changing())
        where = "where the script makes its batches"
        other = f"padding {'texts to multiples of 64' if has_ids else 'batches to a few sizes'} {where}"
        fewer = "pad_to_multiple_of=64" if _can_pad(session) else other
        counts = (
            "shapes hardly ever come again, so the figures include these steps, and a longer run may be faster"
            if stream.keeps_new
            else f"this counts as warm-up, since shapes come again; fewer shapes, as by {fewer}, may run faster"
        )
        yield (
            f"{new} of {all_steps} timed steps had a batch of a shape that had not come "
            f"{'twice' if session.has_graphs else 'before'}, and {which} took {_time(stream.extra_ms)} longer; {counts}"
        )
    if stream is not None and stream.explained:
        yield (
            f"a step takes longer with a larger batch ({stream.explained:.0%} of the differences between steps), so the figures "
            "are of a step with a batch of the mean size"
        )
    if stream is not None and stream.keeps_new and (slow := len(stream.prepared)):
        steps = "1 timed step with a new shape" if slow == 1 else f"{slow} timed steps with new shapes"
        yield f"{steps} took more than {FAR_SLOWER:g} times as long as a typical one, which counts as warm-up"
    if stream is not None and plans_attention(session.settings, session.device, stream, partial(_attends, session)):
        yield PLANNED_ATTENTION
    if stream is not None and stream.keeps_interrupted:
        also = "call the model without gradients" if session.num_without_gradients else "hold an evaluation or a checkpoint"
        yield f"most steps also {also}, which counts as part of the step{_eager_there(session)}"
    if stream is not None and (shift := steady.find_shift(stream.passes)):
        yield (
            f"a step took {_time(shift.before_ms)} at first and {_time(shift.after_ms)} after {shift.after_passes} of "
            f"{len(stream.passes)} passes: the work changed with the step, or the host slowed down; the figures are of both"
        )
    if session.restarts:
        again = "" if session.restarts == 1 else f" {session.restarts} times"
        yield f"something still compiled after the warm-up, so timing began anew{again}"
    yield from captured_in_parts(found.trained_and_frozen)
    yield from left_eager(found.frozen)
    yield from session.missed
    yield from leaving_out(found, session.settings, session.diagnostics.fallbacks)


_MOST_IDLE = 0.25
"""Share of a step in which a script's thread sleeps, above which that is told; threads that compute beside it may sleep less."""

_OTHER_SAMPLES = 1.5  # ratio of a timed step's samples to a first one's, from which on both are told


def _idle_share(session: Session) -> float:
    """Returns the share of a typical pass that the script's thread slept; 0 if it may wait for a GPU or for other workers."""
    waits = session.device.type != "cpu" or (torch.distributed.is_available() and torch.distributed.is_initialized())
    shares = [] if session.stream is None or waits else session.stream.idle_shares
    return statistics.median(shares) if shares else 0.0


def _calls_of_a_step(session: Session) -> int:
    """Returns how often a step calls the module whose batches are counted: when timed, if all calls had as many samples."""
    found, stream = session.found, session.stream
    samples = {one for one, _ in found.primary.sizes}
    if stream is None or not stream.times or len(samples) != 1 or found.micro_steps == 1:
        return found.micro_steps
    return max(1, round(stream.mean_size()[0] / samples.pop())) if stream.mean_size()[0] else found.micro_steps


def _samples_at_first(session: Session) -> float:
    """Returns the samples of a step in the discovery."""
    found = session.found
    return found.micro_steps * statistics.fmean(samples for samples, _ in found.primary.sizes) if found.primary.sizes else 1.0


def _time(ms: float) -> str:
    """Writes a time in milliseconds or, from 1,000 on, in seconds, with three significant digits and no exponent."""
    return f"{ms / 1e3:.3g} s" if ms >= 999.5 else f"{ms:.3g} ms"


def _eager_there(session: Session) -> str:
    """Says that no setting compiles what most steps call without gradients; empty if one does."""
    if session.num_evaluated <= session.num_without_gradients / 2 or session.own_compile.includes(session.found.primary.module):
        return ""
    return (
        "; no setting compiles a model in evaluation mode (model.eval()), but a copy of it that serves as a reference or a "
        "teacher, copy.deepcopy(model), is compiled"
    )


def _modules(targets: Sequence[Target]) -> Iterator[str]:
    """Describes the modules that train, several in a row that are alike, such as the steps of a flow, in one sentence."""
    described = [(target.name, (type(target.module).__name__, *_described(target))) for target in targets]
    alike = groupby(described, key=lambda one: (re.sub(r"[ .]?\d+", "", one[0]), one[1]))
    for (_, (kind, size, *rest)), group in alike:
        names = [name for name, _ in group]
        if len(names) < _ALIKE:
            yield from (", ".join([f"module {name}: {kind} of {size}", *rest]) for name in names)
        else:
            yield ", ".join([f"modules {names[0]} to {names[-1]}: {len(names)} of {kind}, {size} each", *rest])


def _described(target: Target) -> Iterator[str]:
    number = sum(weights.numel() for weights in target.module.parameters())
    yield f"{spoken_number(number)} parameter{'' if number == 1 else 's'}"
    yield f"{len(target.blocks)} repeated blocks" if target.blocks else "no repeated blocks"
    dims = _named_dimensions(target.changing())
    yield f"batches that change in {dims}" if dims else "batches of one shape in the first steps"
    if target.draws:
        yield "random numbers in the forward"
    if target.differentiated_twice:
        yield TWICE


def _uncalled_whole(found: Discovery) -> str | None:
    """Names the class of the innermost module that holds all targets but is not called itself; None if there is none.

    With several optimizers, such as a GAN's, the parts are trained by turns, and belong apart.
    """
    if len(found.targets) < 2 or len(found.optimizers) != 1:
        return None
    parts = {target.module for target in found.targets}
    whole = [
        module
        for module in gc.get_objects()
        if issubclass(type(module), nn.Module) and not type(module).__module__.startswith("torch.") and parts <= _parts(module)
    ]
    innermost = min(whole, key=lambda module: len(_parts(module)), default=None)
    return None if innermost is None or innermost in found.called else type(innermost).__name__


def _parts(module: nn.Module) -> set[nn.Module]:
    return {*module.modules()} if "_modules" in vars(module) else set()  # one whose __init__ has not run


_BYTES_PER_S = {"cuda": 4e12, "cpu": 4e10}
"""Memory traffic of a fast device of each kind, so that an estimate of seconds is low."""

_SHARE_OF_SLICES = 0.1  # of a step's time, from which on slices are told


def _slices_limit(target: Target, stream: Stream) -> bool:
    """Tells whether the backward pass of slices takes a good part of a step: zeros are written, read and added to the sum."""
    traffic = 4 * 4 * target.operators.sliced_elements  # in float32: one write, and two reads and a write
    seconds = traffic / _BYTES_PER_S.get(target.device.type, math.inf)
    return seconds >= _SHARE_OF_SLICES * stream.median_ms / 1e3


def _float32_experts(session: Session) -> int:
    """Returns the number of layers of experts that autocast leaves in float32, unless a setting changes that."""
    reached = [target.module for target in session.found.targets if target.autocast is not None]
    return sum(1 for module in reached for _ in float32_experts(module))


def _can_pad(session: Session) -> bool:
    return any(why_not_padded(target) is None for target in session.found.targets)


_MOST_NAMED = 4
_ALIKE = 3  # modules in a row that are described together


def _named_dimensions(found: Mapping[str, tuple[int, ...]]) -> str:
    """Names dimensions that change, of many tensors the first few: a recommender has lists of ids for dozens of tables."""
    named = [f"{name} {'/'.join(map(str, dims))}" for name, dims in found.items()]
    more = len(named) - _MOST_NAMED
    return ", ".join(named) if more < 2 else f"{', '.join(named[:_MOST_NAMED])} and {more} other tensors"


def _stream(session: Session) -> Stream:
    assert session.stream is not None
    return session.stream


def spares_culprit(session: Session, error: BaseException) -> str | None:
    """Returns the setting that leaves the module eager whose compiled code raised an error; None if it is unknown, or alone."""
    compiled = [] if session.settings.scope is Scope.EAGER else session.found.all_compiled
    raised, target = session.found.raised_in or (None, None)
    culprit = target if raised is error else _changed_in_place(compiled, str(error)) or _overwritten(compiled, str(error))
    return left_out(culprit.name) if len(compiled) > 1 and culprit in compiled else None


def _overwritten(targets: Iterable[Target], error: str) -> Target | None:
    """Returns the target whose results a CUDA graph overwrote, as the error says; None if it names none, or one of several."""
    named = re.search(r"in forward@([\w.<>]+)", error) if GRAPHS_MEMORY in error else None
    found = [one for one in targets if named and any(type(part).__qualname__ == named[1] for part in one.module.modules())]
    return found[0] if len(found) == 1 else None


def _changed_in_place(targets: Iterable[Target], error: str) -> Target | None:
    """Returns the target that holds the tensor of which autograd says that it was changed in place; None if that is not certain.

    The error of a backward pass names no module, but the shape and version of the tensor, such as a buffer of `spectral_norm`
    that a second call has changed. Of several targets with such a tensor, it is the one that is called most often.
    """
    told = re.search(r"modified by an inplace operation: \[[\w.]+ \[([\d, ]*)\]\].*? is at version (\d+)", error)
    if told is None:
        return None
    shape, version = tuple(int(size) for size in told[1].split(",") if size.strip()), int(told[2])
    held = {
        target: target.calls
        for target in targets
        for one in chain(target.module.buffers(), target.module.parameters())
        if tuple(one.shape) == shape and one._version == version
    }
    likely = [target for target, calls in held.items() if calls == max(held.values())]
    return likely[0] if len(likely) == 1 else None


def _then(shapes: Sequence[tuple[tuple[int, ...], ...]]) -> str:
    """Writes the first tensor's shapes that differ, one after the other, such as `8 × 3 × 16 × 16, then 8 × 3 × 24 × 24`."""
    differing = next((of_tensor for of_tensor in zip(*shapes, strict=False) if len(set(of_tensor)) > 1), ())
    written = list(dict.fromkeys(" × ".join(map(str, shape)) for shape in differing))
    return ", then ".join(written[:3]) + (" and others" if len(written) > 3 else "")
