"""The measuring protocol: one workload under one setting → `Measurement`.

Background: a compiled step is slow while it compiles, captures and tunes, and fast afterwards; the two must not be mixed. In a
fresh process: build, then a warm-up window over real batches and every length the shape policy can produce, often enough that
nothing is left to compile or capture, then whole passes over a pool of prepared batches, each step timed by CUDA events (a
monotonic clock on CPUs), until the interval of the throughput is narrow. Afterwards the first steps are repeated eagerly to
check the numbers.

Output: `compile_s` = warm-up seconds less as many median steady steps; `samples_per_s` over whole passes, so every setting is
timed on the same samples; peak memory up to the end of the steady state.
"""

from __future__ import annotations

import gc
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workloads.base import Batch, Workload
from workloads.checking import Numerics, Trajectory, compare
from workloads.compiling import TrainStep, applied
from workloads.diagnostics import Diagnostics, watching
from workloads.phases import Phase
from workloads.settings import CompileSettings, OptimizerKind

Z95 = 1.96
"""Half-width of a 95 % interval in standard errors of a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long to measure."""

    compared_steps: int = 8
    """First steps, on real batches, whose loss and gradient norm are compared with eager."""
    visits: int = 2
    """Times the warm-up goes through every length."""
    cudagraph_visits: int = 3
    """The same with CUDA graphs, which torch captures on the second visit of a length and replays from the third."""
    min_passes: int = 3
    max_passes: int = 8
    """Passes over the pool of batches; the window grows until the interval is narrow or this many are done."""
    target_half_width: float = 0.005
    """Relative half-width of the throughput's 95 % interval at which the window stops growing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one worker measured; units are in the names."""

    device: str
    compile_s: float
    first_step_s: float
    warmup_s: float
    warmup_steps: int
    steady_steps: int
    step_ms_median: float
    step_ms_ci95: tuple[float, float]
    samples_per_s: float
    samples_per_s_ci95: tuple[float, float]
    tokens_per_s: float
    mean_length: float
    peak_memory_bytes: int
    numerics: dict[str, Any]
    graphs: int
    graph_break_reasons: list[str]
    recompile_reasons: list[str]
    recompile_limit_hits: list[str]
    cudagraph_skips: int
    cudagraph_skip_reasons: list[str]
    step_ms: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that cross processes without this module."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _WarmUp:
    first_step_s: float
    total_s: float
    steps: int
    trajectory: Trajectory


def measure(
    workload: Workload,
    settings: CompileSettings,
    *,
    device: torch.device,
    rank: int = 0,
    protocol: Protocol | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
) -> Measurement:
    """Measures one setting in this process, which should be fresh and have empty compile caches for a cold figure.

    Args:
        workload: what to train.
        settings: how to compile it.
        device: where; one process a device.
        rank: this worker's; the default process group must exist where there are several.
        protocol: how long to measure.
        on_phase: told when a phase begins.

    Raises:
        SettingsError: the settings do not fit the workload's lengths.
    """
    protocol = protocol or Protocol()
    settings.validate_for(workload.max_length)
    with workload.process_settings():
        return _measure(workload, settings, device, rank, protocol, on_phase)


def _measure(
    workload: Workload,
    settings: CompileSettings,
    device: torch.device,
    rank: int,
    protocol: Protocol,
    on_phase: Callable[[Phase], None],
) -> Measurement:
    on_phase(Phase.BUILDING)
    _reset_peak_memory(device)
    pool = workload.pool(settings.shape_policy(workload.max_length), rank=rank, device=device)
    warmup_batches = list(_warmup_batches(workload, settings, pool, protocol, rank, device))
    model = _model_on(workload, device)
    optimizer = workload.optimizer(model, settings.optimizer)
    torch.manual_seed(workload.seed)
    with watching() as diagnostics, applied(settings, workload, model, optimizer, device) as step:
        _synchronize(device)
        on_phase(Phase.WARMING_UP)
        warmup = _warm_up(step, model, warmup_batches, protocol.compared_steps, device)
        on_phase(Phase.STEADY)
        passes, losses = _steady(step, pool, protocol, device)
    peak_memory_bytes = _peak_memory_bytes(device)
    on_phase(Phase.CHECKING)
    del step, model, optimizer
    _free(device)
    numerics = _check(workload, warmup_batches[: protocol.compared_steps], warmup.trajectory, losses, device)
    on_phase(Phase.DONE)
    return _summarized(workload, device, pool, warmup, passes, peak_memory_bytes, numerics, diagnostics)


def _warmup_batches(
    workload: Workload,
    settings: CompileSettings,
    pool: Sequence[Batch],
    protocol: Protocol,
    rank: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Real batches first, as a job would meet them, then every length the policy can produce."""
    yield from (pool[i % len(pool)] for i in range(protocol.compared_steps))
    lengths = settings.shape_policy(workload.max_length).lengths()
    by_length = {batch.length: batch for batch in pool}
    for length in lengths:
        if length not in by_length:
            by_length[length] = workload.batch_of_length(length, rank=rank, device=device)
    for _ in range(protocol.cudagraph_visits if settings.cudagraphs else protocol.visits):
        yield from (by_length[length] for length in lengths)


def _warm_up(step: TrainStep, model: nn.Module, batches: Sequence[Batch], compared_steps: int, device: torch.device) -> _WarmUp:
    losses: list[Tensor] = []
    norms: list[Tensor] = []

    def record_norm() -> None:
        norms.append(_gradient_norm(model))

    started = time.perf_counter()
    first_step_s = 0.0
    for index, batch in enumerate(batches):
        compared = index < compared_steps
        loss = step(batch, before_update=record_norm if compared else None)
        if compared:
            losses.append(loss)
        if index == 0:
            _synchronize(device)
            first_step_s = time.perf_counter() - started
    _synchronize(device)
    total_s = time.perf_counter() - started
    trajectory = Trajectory(losses=_floats(losses), gradient_norms=_floats(norms))
    return _WarmUp(first_step_s, total_s, len(batches), trajectory)


def _steady(
    step: TrainStep, pool: Sequence[Batch], protocol: Protocol, device: torch.device
) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of each step of each pass over the pool, and every loss."""
    passes: list[list[float]] = []
    losses: list[Tensor] = []
    while not _enough(passes, protocol, device):
        passes.append(_timed_pass(step, pool, losses, device))
    return passes, _floats(losses)


def _enough(passes: list[list[float]], protocol: Protocol, device: torch.device) -> bool:
    """Whether the window is long enough; worker 0 decides for all, because they step in lockstep."""
    if len(passes) < protocol.min_passes or len(passes) >= protocol.max_passes:
        return len(passes) >= protocol.max_passes
    narrow = torch.tensor(float(_relative_half_width(passes) <= protocol.target_half_width), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.broadcast(narrow, src=0)
    return bool(narrow.item())


def _timed_pass(step: TrainStep, pool: Sequence[Batch], losses: list[Tensor], device: torch.device) -> list[float]:
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(pool) + 1)]
        marks[0].record()
        for batch, mark in zip(pool, marks[1:], strict=True):
            losses.append(step(batch))
            mark.record()
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]
    times = [time.perf_counter()]
    for batch in pool:
        losses.append(step(batch))
        times.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in pairwise(times)]


def _relative_half_width(passes: list[list[float]]) -> float:
    """Relative half-width of the 95 % interval of a pass's total time.

    Each batch of the pool is its own stratum: batches of different length take different times, and that spread is no noise.
    """
    if len(passes) < 2:
        return math.inf
    by_batch = list(zip(*passes, strict=True))
    variance = sum(statistics.variance(times) / len(times) for times in by_batch)
    return Z95 * math.sqrt(variance) / sum(statistics.fmean(times) for times in by_batch)


def median_ci95(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median from order statistics (binomial, normal approximation); no distribution is assumed."""
    ordered = sorted(values)
    half = Z95 * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[low], ordered[high]


def _check(
    workload: Workload, batches: Sequence[Batch], compiled: Trajectory, steady_losses: Sequence[float], device: torch.device
) -> Numerics:
    eager, again = (_eager_trajectory(workload, batches, device, workload.seed + offset) for offset in (0, 1))
    return compare(compiled, eager, again, steady_losses)


def _eager_trajectory(workload: Workload, batches: Sequence[Batch], device: torch.device, seed: int) -> Trajectory:
    model = _model_on(workload, device)
    optimizer = workload.optimizer(model, OptimizerKind.FOREACH)
    torch.manual_seed(seed)
    with applied(CompileSettings.from_dict({"scope": "eager"}), workload, model, optimizer, device) as step:
        warmed = _warm_up(step, model, batches, len(batches), device)
    return warmed.trajectory


def _summarized(
    workload: Workload,
    device: torch.device,
    pool: Sequence[Batch],
    warmup: _WarmUp,
    passes: list[list[float]],
    peak_memory_bytes: int,
    numerics: Numerics,
    diagnostics: Diagnostics,
) -> Measurement:
    step_ms = [time_ms for times in passes for time_ms in times]
    median = statistics.median(step_ms)
    pass_s = sum(step_ms) / len(passes) / 1e3
    samples_per_s = sum(batch.samples for batch in pool) / pass_s
    half_width = _relative_half_width(passes)
    return Measurement(
        device=_device_name(device),
        compile_s=max(0.0, warmup.total_s - warmup.steps * median / 1e3),
        first_step_s=warmup.first_step_s,
        warmup_s=warmup.total_s,
        warmup_steps=warmup.steps,
        steady_steps=len(step_ms),
        step_ms_median=median,
        step_ms_ci95=median_ci95(step_ms),
        samples_per_s=samples_per_s,
        samples_per_s_ci95=(samples_per_s / (1 + half_width), samples_per_s / max(1e-9, 1 - half_width)),
        tokens_per_s=sum(batch.tokens for batch in pool) / pass_s,
        mean_length=statistics.fmean(batch.length for batch in pool),
        peak_memory_bytes=peak_memory_bytes,
        numerics=numerics.to_dict(),
        graphs=diagnostics.graphs,
        graph_break_reasons=diagnostics.graph_break_reasons,
        recompile_reasons=diagnostics.recompile_reasons,
        recompile_limit_hits=diagnostics.recompile_limit_hits,
        cudagraph_skips=diagnostics.cudagraph_skips,
        cudagraph_skip_reasons=diagnostics.cudagraph_skip_reasons,
        step_ms=[round(time_ms, 4) for time_ms in step_ms],
    )


def _model_on(workload: Workload, device: torch.device) -> nn.Module:
    model = workload.build_model().to(device)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    return model


def _gradient_norm(model: nn.Module) -> Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).detach().clone()


def _floats(scalars: Sequence[Tensor]) -> list[float]:
    return [float(value) for value in torch.stack(list(scalars)).float().cpu()] if scalars else []


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
