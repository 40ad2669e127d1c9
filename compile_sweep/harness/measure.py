"""The measuring protocol: one workload under one setting → `Measurement`.

Background: a compiled step is slow while it compiles, captures and tunes, and fast afterwards; the two must not be mixed. In a
fresh process: build, then a warm-up window over real batches and every length the shape policy can produce, often enough that
nothing is left to compile or capture, then whole passes over a pool of prepared batches until the interval of the typical step
is narrow. The first of these passes runs alone and measures the memory. Then an eager reference is built if memory allows,
repeats the first steps to check the numbers, and alternates with the further passes.

Output: `compile_s` = warm-up seconds less a typical step for each of its steps; `samples_per_s` over whole passes, so every
setting is timed on the same samples; memory, speedup over eager, numerics and diagnostics.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compile_sweep.contract.base import Batch
from compile_sweep.contract.seeding import seed_all
from compile_sweep.harness import memory, steady
from compile_sweep.harness.apply import TrainStep, applied
from compile_sweep.harness.compile_phases import PhaseClock, record_phases
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.coverage import Expectation
from compile_sweep.harness.diagnostics.late_compiles import LateCompiles
from compile_sweep.harness.diagnostics.repeated_graphs import RepeatedGraphs
from compile_sweep.harness.diagnostics.unsynchronized import unsynchronized_kernels_of_this_process
from compile_sweep.harness.distributed import agreed_numbers, by_rank, everywhere, largest_everywhere, num_workers
from compile_sweep.harness.memory import MemoryPeaks
from compile_sweep.harness.numerics.check import check_numerics
from compile_sweep.harness.numerics.reference_store import ReferenceStore
from compile_sweep.harness.numerics.references import build_model_on, compute_dtype, eager_reference, keep_start, record_run
from compile_sweep.harness.numerics.step_check import check_step
from compile_sweep.harness.numerics.trajectory import OutputRecorder, Recorder, Trajectory, make_recorder
from compile_sweep.harness.pipeline import RealPasses, parse_pipeline, real_passes
from compile_sweep.harness.prepare import Prepared
from compile_sweep.harness.protocol import Protocol, together
from compile_sweep.harness.steady import Limits, Window, synchronize
from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.outcome import Phase, may_run_out_of_memory
from compile_sweep.schema.record import Measurement
from compile_sweep.schema.settings import Scope


def first_steps(pool: Sequence[Batch], protocol: Protocol) -> list[Batch]:
    """Returns the real batches that a measurement compares with eager."""
    return [pool[index % len(pool)] for index in range(protocol.compared_steps)]


def warm_up_batches(prepared: Prepared, pool: Sequence[Batch], *, rank: int, protocol: Protocol) -> list[Batch]:
    """Returns the first steps' batches, then every length that the settings can pad to, often enough to compile and capture."""
    lengths = prepared.policy.lengths()
    by_shape = {(batch.length, frozenset(batch.inputs)): batch for batch in pool}  # by the tensors that it holds, too
    kinds = {kind for _, kind in by_shape}
    for length in lengths:
        missing = {kind for kind in kinds if (length, kind) not in by_shape}
        made = prepared.workload.batches_of_length(length, rank=rank, device=prepared.device) if missing else []
        found = {frozenset(batch.inputs): batch for batch in made if batch.length == length}
        by_shape |= {(length, kind): batch for kind, batch in found.items() if kind in missing}
        if missing == kinds and not found:
            # No batch can be made of a length that real batches lack. Then no step needs that length, and a real batch replaces
            # it.
            by_shape[length, frozenset()] = min(pool, key=lambda one: one.length)
    every = [batch for length in lengths for (at, _), batch in by_shape.items() if at == length]
    visits = protocol.cudagraph_visits if prepared.settings.claims_cudagraphs else protocol.visits
    return [*first_steps(pool, protocol), *every * visits]


__all__ = ["Measurement", "Protocol", "measure"]

_NEVER = 2**31 - 1  # number of younger collections before one of the oldest generation: the maximum that Python accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What is measured, and how."""

    prepared: Prepared
    pool: Sequence[Batch]
    rank: int
    protocol: Protocol
    pipeline: Pipeline
    store: ReferenceStore | None
    repeated: RepeatedGraphs | None

    @property
    def device(self) -> torch.device:
        return self.prepared.device

    @property
    def limits(self) -> Limits:
        """Limits of the window."""
        return self.protocol.limits(self.device)

    @property
    def compared(self) -> list[Batch]:
        """Batches of the first steps."""
        return first_steps(self.pool, self.protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarmUp:
    first_step_s: float
    total_s: float
    lengths: list[int]
    trajectory: Trajectory
    phases: PhaseClock
    peaks: MemoryPeaks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steady:
    window: Window
    peaks: MemoryPeaks
    eager: Trajectory | None  # first steps of the eager reference
    real: RealPasses | None


def measure(
    prepared: Prepared,
    *,
    rank: int = 0,
    protocol: Protocol | None = None,
    pipeline: str = Pipeline.RESIDENT,
    store: ReferenceStore | None = None,
    repeated: RepeatedGraphs | None = None,
    on_phase: Callable[[Phase], None] = lambda phase: None,
    on_early: Callable[[dict[str, float]], None] = lambda early: None,
) -> Measurement:
    """Measures one setting in this process, which should be fresh and have empty compile caches for a cold figure.

    Args:
        prepared: The setting, on its workload.
        rank: This worker's rank; with several workers, the default process group must exist.
        protocol: How long to measure.
        pipeline: `resident` for prepared batches, `real` for the workload's own loader.
        store: Where the sweep keeps eager runs for later trials; None to make them all here.
        repeated: Spares the warm-up the code of graphs that repeat others; None to generate it for all.
        on_phase: Called when a phase begins.
        on_early: Called with figures from the first timed pass, by their names in the measurement.

    Raises:
        SettingsError: The model has nothing that the settings compile.
        WorkloadError: There is no such pipeline, or the workload has no loader for it.
    """
    source_of_batches = parse_pipeline(pipeline)
    workload, device = prepared.workload, prepared.device
    with workload.process_settings():
        on_phase(Phase.BUILDING)
        memory.reset_peaks(device)
        run = _Run(
            prepared=prepared,
            pool=workload.pool(prepared.policy, rank=rank, device=device),
            rank=rank,
            protocol=protocol or Protocol(),
            pipeline=source_of_batches,
            store=store,
            repeated=repeated,
        )
        return _measure(run, on_phase, on_early)


def _measure(run: _Run, on_phase: Callable[[Phase], None], on_early: Callable[[dict[str, float]], None]) -> Measurement:
    prepared, device = run.prepared, run.device
    model = build_model_on(prepared.workload, device)
    optimizer = prepared.optimizer(model)
    warmup_batches = warm_up_batches(prepared, run.pool, rank=run.rank, protocol=run.protocol)
    recorder = make_recorder(prepared.workload, model, steps=run.protocol.compared_steps)
    expected = Expectation.of(prepared, model, optimizer)
    keep_start(prepared.workload, model)
    seed_all(prepared.workload.seed)
    with ExitStack() as watching, ExitStack() as undo:
        diagnostics = watching.enter_context(capture_diagnostics(expected))
        step = undo.enter_context(applied(prepared, model, optimizer))
        source = step.source
        synchronize(device)
        on_phase(Phase.WARMING_UP)
        with run.repeated.spared(diagnostics.recompile_reasons) if run.repeated else nullcontext():
            warmup = _warm_up(step, recorder, warmup_batches, device)
        late = LateCompiles(step, diagnostics.recompile_reasons, steps=len(warmup_batches))
        del recorder, warmup_batches
        on_phase(Phase.STEADY)

        def report(window: Window, peaks: MemoryPeaks) -> None:
            early = _early(run, warmup, window, peaks)
            if not diagnostics.tells_more_than_speed:  # which would be lost if the trial were stopped by its figures
                on_early(early)

        found = _steady(run, late, report)
        watching.close()  # what the check compiles does not belong to the setting
        on_phase(Phase.CHECKING)
        gradient_check = check_step(prepared, model, step, run.compared[0], draws=warmup.trajectory.random)
        use = _device_use(run, model, step, found.window)
    remarks = prepared.workload.remarks(prepared.policy)
    findings = [*remarks, *late.sentences(has_stopped=found.window.is_settled), *_changes(found.window, len(run.pool))]
    del step, late, model, optimizer, expected
    unsynchronized = unsynchronized_kernels_of_this_process()
    torch._dynamo.reset()
    memory.free(device)
    numerics = check_numerics(
        prepared,
        run.compared,
        warmup.trajectory,
        _floats(found.window.losses),
        eager=found.eager,
        eager_steady_losses=_floats(found.window.eager_losses),
        gradient_check=gradient_check,
        recompiles=diagnostics.recompile_reasons,
        unsynchronized=unsynchronized,
        store=run.store,
        on_eager_runs=lambda: on_phase(Phase.EAGER_RUNS),
    )
    on_phase(Phase.DONE)
    return together(_summarized(run, warmup, found, diagnostics, numerics.to_dict(), source, findings, use))


def _device_use(run: _Run, model: nn.Module, step: TrainStep, window: Window) -> dict[str, float]:
    """Returns how well a training step uses its GPU; empty with several workers, which would wait for one that fails."""
    if run.device.type != "cuda" or not run.prepared.workload.trains or num_workers() > 1:
        return {}
    from compile_sweep.harness.diagnostics.device_use import device_use  # loads torch's profiler, which a CPU does not need

    prepared, batch, speedup = run.prepared, run.compared[0], steady.speedup(window)
    return device_use(
        step,
        batch,
        step_ms=steady.step_ms_at(window, batch.length),
        dtype=compute_dtype(prepared.settings, prepared.workload.autocast_dtype(run.device), next(model.parameters()).dtype),
        device=run.device,
        speedup_eager=speedup.ratio if speedup and prepared.settings.scope is not Scope.EAGER else None,
    )


def _changes(window: Window, batches: int) -> list[str]:
    """Says what changed with the step while it was timed, and whether that makes the speedup doubtful."""
    found = []
    if shift := steady.find_shift(window.passes):
        step = window.steps - (len(window.passes) - shift.after_passes) * (1 + batches)
        found.append(
            f"from about step {step} on a step takes {shift.after_ms:.3g} ms, and {shift.before_ms:.3g} before: the work changed "
            "with the step, or the host slowed down; the figures are of both"
        )
    behind = window.steps - window.eager_steps
    if window.restarts and window.eager_blocks and behind > batches:
        found.append(
            f"eager steps beside it are {behind} steps behind, so they may do other work, and the speed-up over eager is doubtful"
        )
    return found


def _warm_up(step: TrainStep, recorder: Recorder | OutputRecorder, batches: Sequence[Batch], device: torch.device) -> _WarmUp:
    first_step_s = 0.0
    with record_phases() as phases:
        started = time.perf_counter()
        for index, batch in enumerate(batches):
            recorder.step(step, batch)
            if index == 0:
                synchronize(device)
                first_step_s = time.perf_counter() - started
        synchronize(device)
        total_s = time.perf_counter() - started
    return _WarmUp(
        first_step_s=first_step_s,
        total_s=total_s,
        lengths=largest_everywhere([batch.length for batch in batches], device),
        trajectory=recorder.trajectory(),
        phases=phases,
        peaks=memory.read_peaks(device),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps the garbage collector from scanning existing objects.

    Two models and a compiler's state are many objects: a full collection during the timed steps takes 0.2 s and more, which a job
    that trains one model does not pay (docs/log.md). The two younger generations still collect what the steps allocate.
    `gc.freeze` is no alternative, because `gc.unfreeze` would undo a caller's freeze, too.
    """
    gc.collect()
    young, middle, oldest = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, oldest)


def _steady(run: _Run, step: LateCompiles, on_first_pass: Callable[[Window, MemoryPeaks], None]) -> _Steady:
    memory.reset_peaks(run.device)
    with _undisturbed():
        window = steady.first_pass(step, run.pool, run.device, steps=step.steps, compiled_graphs=lambda: step.graphs)
    peaks = memory.read_peaks(run.device)
    on_first_pass(window, peaks)
    several = num_workers() > 1
    eager: Trajectory | None = None
    # Errors are not caught if others wait for this worker, so the margin is twice as wide then.
    if everywhere(memory.has_room(peaks.in_use_bytes * (2 if several else 1), run.device), run.device):
        with may_run_out_of_memory(unless=several):
            eager = _grown_beside_eager(run, step, window)
        if eager is None:
            window.chosen, window.eager_blocks, window.eager_losses = [], [], []
    memory.free(run.device)
    if not window.chosen:
        with _undisturbed():
            steady.grow(window, step, run.pool, run.limits, run.device)
    real = None
    if run.pipeline is Pipeline.REAL:
        workload, policy, passes = run.prepared.workload, run.prepared.policy, run.protocol.real_passes
        real = real_passes(step, workload, policy, steps=len(run.pool), passes=passes, rank=run.rank, device=run.device)
    return _Steady(window=window, peaks=peaks, eager=eager, real=real)


def _grown_beside_eager(run: _Run, step: LateCompiles, window: Window) -> Trajectory:
    """Fills the window, with blocks of eager steps unless they are too slow, and returns the first steps of the eager model."""
    with eager_reference(run.prepared) as (model, eager_step):
        trajectory = record_run(run.prepared.workload, model, eager_step, run.compared)
        window.chosen = _for_reference(run, eager_step)
        window.eager_steps = len(run.compared) + 2
        if window.chosen:
            with _undisturbed():
                steady.grow(window, step, run.pool, run.limits, run.device, reference=eager_step)
    return trajectory


def _for_reference(run: _Run, eager_step: TrainStep) -> list[int]:
    """Returns indices of the pool's batches for the eager blocks: fewer if steps are slow, none instead of one."""
    longest = max(run.pool, key=lambda batch: batch.length)
    _, step_ms = steady.timed(eager_step, [longest, longest], [], run.device)
    protocol = run.protocol
    # The first step of each block is not timed.
    affordable = int(1e3 * protocol.eager_budget_s / (protocol.max_passes * step_ms)) - 1
    count = min(affordable, protocol.eager_batches)
    chosen = steady.representative([batch.length for batch in run.pool], count) if count > 1 else []
    padded = [*chosen, *([-1] * (protocol.eager_batches - len(chosen)))]
    return [int(index) for index in agreed_numbers(padded, run.device) if index >= 0]


def _summarized(
    run: _Run,
    warmup: _WarmUp,
    found: _Steady,
    diagnostics: Diagnostics,
    numerics: dict[str, Any],
    source: str,
    findings: list[str],
    use: dict[str, float],
) -> Measurement:
    window, real = found.window, found.real
    compile_s = _compile_s(warmup, window)
    resident = _throughput(run, window)
    throughput = real.throughput() if real else resident
    speedup = steady.speedup(window)
    return Measurement(
        device=torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type,
        compile_s=compile_s,
        compile_phases_s=warmup.phases.split(compile_s),
        first_step_s=warmup.first_step_s,
        warmup_s=warmup.total_s,
        warmup_steps=len(warmup.lengths),
        steady_steps=len(window.passes) * len(run.pool),
        step_ms_median=steady.stratified_median(window.passes, window.lengths),
        step_ms_ci95=steady.median_ci95(window.passes, window.lengths),
        stable=steady.relative_width(window) <= run.limits.target_width,
        outliers=steady.outliers(window.passes),
        samples_per_s=throughput.samples_per_s,
        samples_per_s_ci95=throughput.ci95,
        tokens_per_s=throughput.tokens_per_s,
        mean_length=statistics.fmean(batch.length for batch in run.pool),
        eager_step_ms=[round(step_ms, 4) for block in window.eager_blocks for step_ms in block],
        speedup_eager=speedup.ratio if speedup else None,
        speedup_eager_ci95=speedup.ci95 if speedup else None,
        clock_drift=steady.clock_drift(window),
        peak_memory_bytes=found.peaks.in_use_bytes,
        peak_reserved_bytes=_largest(found.peaks.reserved_bytes, warmup.peaks.reserved_bytes),
        compile_peak_memory_bytes=warmup.peaks.tensors_bytes,
        cudagraph_pool_bytes=found.peaks.cudagraph_pool_bytes,
        pipeline=str(run.pipeline),
        data_wait_share=max(0.0, 1 - throughput.samples_per_s / resident.samples_per_s) if real else None,
        source=source,
        numerics=numerics,
        findings=findings,
        device_use=use,
        **asdict(diagnostics),
        step_ms=[round(step_ms, 4) for times in window.passes for step_ms in times],
    )


def _compile_s(warmup: _WarmUp, window: Window) -> float:
    typical_s = sum(steady.step_ms_at(window, length) for length in warmup.lengths) / 1e3
    return max(0.0, warmup.total_s - typical_s)


def _throughput(run: _Run, window: Window) -> steady.Throughput:
    samples, tokens = (sum(getattr(batch, unit) for batch in run.pool) for unit in ("samples", "tokens"))
    return steady.throughput(window.passes, samples=samples, tokens=tokens)


def _early(run: _Run, warmup: _WarmUp, window: Window, peaks: MemoryPeaks) -> dict[str, float]:
    """Returns the first pass's figures over all workers. The rate is for prepared batches, an upper limit for pipeline=real."""
    rates = by_rank(_throughput(run, window))
    reserved_bytes = _largest(peaks.reserved_bytes, warmup.peaks.reserved_bytes)
    return {
        "compile_s": _compile_s(warmup, window),
        "warmup_s": warmup.total_s,
        "step_ms_median": steady.stratified_median(window.passes, window.lengths),
        "samples_per_s": sum(rate.samples_per_s for rate in rates),
        "tokens_per_s": sum(rate.tokens_per_s for rate in rates),
        "peak_memory_bytes": float(peaks.in_use_bytes),
        **({"peak_reserved_bytes": float(reserved_bytes)} if reserved_bytes is not None else {}),
    }


def _largest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _floats(scalars: Sequence[Tensor]) -> list[float]:
    return [float(value) for value in torch.stack(list(scalars)).float().cpu()] if scalars else []
