"""The steady state: whole passes over a pool of prepared batches, with eager reference steps between them.

Background: batches of different lengths take different times, which is not noise, so each padded length is a stratum of its
own. Each length has many steps, so that stretches in which the host is slow do not move its median. A GPU's clock drifts
by more than the differences worth measuring, so blocks of eager steps alternate with the passes: a slower clock slows both, and
their ratio stays. After every switch one step is not timed, and timing starts at its end, so that the device never waits
for the first launch.

Output: `Window`, with all times including outliers, and the figures derived from it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from compile_sweep.contract.base import Batch
from compile_sweep.harness.distributed import agreed, largest_everywhere

OUTLIER_FACTOR = 1.5  # multiple of its batch's median above which a step counts as an outlier

HOPELESS_FROM, HOPELESS_FACTOR = 5, 10
"""A window is abandoned after this many passes if its interval would need this multiple of the maximum number of passes. A GPU
that waits for a noisy host needs hundreds for an interval of 1%; a few more would only cost its time.
"""

WIDE = 0.05
"""Width of an interval, relative to the median, above which it hides what is worth knowing. Twenty steps of a Conformer on an
H200 with a busy host had 0.24, eighty on a quieter one 0.03.
"""

LEAST_S = 1.0
"""Seconds for which a window grows however narrow its interval is. Passes of millisecond steps end before the host's next hiccup,
and a few of them say little about the ratio to eager.
"""

_RESAMPLINGS = 1000

_T975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5% quantiles of Student's t by degrees of freedom."""

LEAST_PASSES = 3  # minimum number of passes for an estimate of their scatter and of the ratio to eager
MAX_RESTARTS = 3  # maximum number of restarts of a window because something was compiled in it

MAX_CATCH_UP_S = 5.0
"""Seconds that the eager reference may take to catch up with the compiled model's step, if the work changes with the step."""

SHIFT = 1.2  # ratio of pass times, at the end of a window to before, from which its steps count as changed
Step = Callable[[Batch], Tensor]  # trains on a batch and returns its loss


@dataclass(slots=True, kw_only=True)
class Window:
    """Milliseconds of every timed step."""

    lengths: Sequence[int]
    """Padded length of each batch of the pool; if several workers step together, the longest of theirs."""
    passes: list[list[float]] = field(default_factory=list)
    """For each pass, the compiled step on each batch of the pool."""
    chosen: Sequence[int] = ()
    """Indices of the pool's batches that the eager reference runs on."""
    eager_blocks: list[list[float]] = field(default_factory=list)
    """Eager steps on the chosen batches: block k is between passes k and k+1."""
    losses: list[Tensor] = field(default_factory=list)
    """Losses of all timed compiled steps."""
    eager_losses: list[Tensor] = field(default_factory=list)
    """Losses of all timed eager steps."""
    compiled_graphs: Callable[[], int] = lambda: 0
    """Returns the number of graphs compiled since the warm-up, as this worker counts them."""
    restarts: int = 0
    """Number of restarts because something was compiled in a pass; passes before the last restart are dropped."""
    is_settled: bool = True
    """Whether nothing was compiled in the recorded passes."""
    steps: int = 0
    """Number of steps that the compiled model has made, including the warm-up."""
    eager_steps: int = 0
    """Number of steps that the eager reference has made."""
    catch_up_s: float = 0.0
    """Seconds of the reference's steps that only catch up with the compiled model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a window is long enough."""

    min_passes: int
    max_passes: int
    min_window_s: float
    """A window with a wide interval lasts at least this many seconds, even if it takes more than `max_passes` short passes."""
    wide_window_s: float = 0.0
    """The same for one whose interval is wider than `WIDE`."""
    max_window_s: float = math.inf
    """Maximum length in seconds; however wide the interval is, the window then stops growing if it has `LEAST_PASSES`."""
    target_width: float
    """Width of the median's 95% interval over the median at which the window stops growing."""


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Step, batches: Iterable[Batch], losses: list[Tensor], device: torch.device) -> list[float]:
    """Returns the milliseconds of the step on each batch, by CUDA events, or by a monotonic clock on CPUs; appends losses.

    The wait for a batch counts toward its step.
    """
    if device.type == "cuda":
        marks = [_marked()]
        for batch in batches:
            losses.append(step(batch))
            marks.append(_marked())
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]
    times = [time.perf_counter()]
    for batch in batches:
        losses.append(step(batch))
        times.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in pairwise(times)]


def first_pass(
    step: Step, pool: Sequence[Batch], device: torch.device, *, steps: int = 0, compiled_graphs: Callable[[], int] = lambda: 0
) -> Window:
    """Runs the first pass and returns a window with it; nothing else may be in the device's memory."""
    window = Window(
        lengths=largest_everywhere([batch.length for batch in pool], device), steps=steps, compiled_graphs=compiled_graphs
    )
    while not window.passes:
        _pass(window, step, pool, device)
    return window


def grow(
    window: Window, step: Step, pool: Sequence[Batch], limits: Limits, device: torch.device, *, reference: Step | None = None
) -> None:
    """Adds passes, each between two blocks of the reference, until the window is long enough; worker 0 decides for all."""
    eager_batches = [pool[index] for index in window.chosen]

    def block() -> None:
        if reference is not None and eager_batches:
            if window.restarts:
                _catch_up(window, reference, pool)
            reference(eager_batches[-1])
            window.eager_blocks.append(timed(reference, eager_batches, window.eager_losses, device))
            window.eager_steps += 1 + len(eager_batches)

    began = time.monotonic()
    look_again_at = limits.min_passes
    block()
    while True:
        if is_late(limits, time.monotonic() - began, len(window.passes), device):
            return
        if len(window.passes) >= look_again_at:
            if agreed(is_long_enough(window, limits, time.monotonic() - began), device):
                return
            look_again_at = next_look(len(window.passes))
        _pass(window, step, pool, device)
        if window.passes:  # after a restart, a pass comes before the first block again
            block()
        else:
            look_again_at = limits.min_passes


def is_late(limits: Limits, elapsed_s: float, passes: int, device: torch.device) -> bool:
    """Tells whether the window's time is over; all workers must call this alike."""
    return limits.max_window_s < math.inf and agreed(elapsed_s >= limits.max_window_s and passes >= LEAST_PASSES, device)


def is_long_enough(window: Window, limits: Limits, elapsed_s: float) -> bool:
    """Tells whether the interval is narrow, or the window has lasted long enough and more passes will not help."""
    width = relative_width(window)
    lasted = elapsed_s >= (max(limits.wide_window_s, limits.min_window_s) if width > WIDE else limits.min_window_s)
    is_narrow = width <= limits.target_width and elapsed_s >= min(LEAST_S, limits.min_window_s)
    return is_narrow or (lasted and (len(window.passes) >= limits.max_passes or is_hopeless(window, width, limits)))


def next_look(passes: int) -> int:
    """Returns the number of passes at which to look at the interval again, because looking costs time, too."""
    return max(passes + 1, math.ceil(1.1 * passes))


def is_hopeless(window: Window, width: float, limits: Limits) -> bool:
    """Tells whether the interval will not become narrow in time: its width shrinks with the root of the number of passes."""
    done = len(window.passes)
    return done >= HOPELESS_FROM and done * width**2 > HOPELESS_FACTOR * limits.max_passes * limits.target_width**2 > 0


def _pass(window: Window, step: Step, pool: Sequence[Batch], device: torch.device) -> None:
    graphs = window.compiled_graphs()
    step(pool[-1])
    times = timed(step, pool, window.losses, device)
    window.steps += 1 + len(pool)
    compiled = agreed(window.compiled_graphs() != graphs, device)
    if compiled and window.restarts < MAX_RESTARTS:
        window.restarts += 1
        window.passes.clear()
        window.eager_blocks.clear()
        return
    window.is_settled = window.is_settled and not compiled
    window.passes.append(times)


def _catch_up(window: Window, reference: Step, pool: Sequence[Batch]) -> None:
    """Brings the eager reference to the compiled model's step, as far as time allows."""
    began = time.monotonic()
    while window.eager_steps < window.steps and window.catch_up_s + time.monotonic() - began < MAX_CATCH_UP_S:
        reference(pool[window.eager_steps % len(pool)]).item()
        window.eager_steps += 1
    window.catch_up_s += time.monotonic() - began


def _marked() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def representative(lengths: Sequence[int], count: int) -> list[int]:
    """Returns indices of at most `count` batches that represent all: the middle ones of equal parts, sorted by length."""
    by_length = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    count = min(count, len(by_length))
    return [by_length[int((part + 0.5) * len(by_length) / count)] for part in range(count)]


def stratified_median(passes: Sequence[Sequence[float]], lengths: Sequence[int]) -> float:
    """Returns the mean over the batches of their length's median step; the plain median if all batches have one length."""
    return float(_stratified_medians(np.asarray(passes)[None], lengths)[0])


def median_ci95(passes: Sequence[Sequence[float]], lengths: Sequence[int]) -> tuple[float, float]:
    """Returns the 95% interval of `stratified_median`.

    The standard error comes from a bootstrap over whole passes, so that differences between passes, such as a clock's drift,
    count in full. Since passes are few, it is corrected for their number and widened by Student's t; percentiles of three passes'
    resamples would cover far less than they claim.
    """
    times = np.asarray(passes)
    number = len(times)
    median = stratified_median(passes, lengths)
    if number < 2:
        return 0.0, math.inf
    # A fixed seed, so that equal times give equal intervals.
    drawn = np.random.default_rng(0).integers(number, size=(_RESAMPLINGS, number))
    error = float(_stratified_medians(times[drawn], lengths).std()) * math.sqrt(number / (number - 1))
    half = _t975(number - 1) * error
    return max(0.0, median - half), median + half


def relative_width(window: Window) -> float:
    """Returns the width of the median's interval divided by the median."""
    low, high = median_ci95(window.passes, window.lengths)
    return (high - low) / stratified_median(window.passes, window.lengths)


def _stratified_medians(times: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    medians = np.zeros(len(times))
    for length in sorted(set(lengths)):
        of_length = np.flatnonzero(np.asarray(lengths) == length)
        medians += len(of_length) * np.median(times[:, :, of_length].reshape(len(times), -1), axis=1)
    return medians / len(lengths)


def outliers(passes: Sequence[Sequence[float]]) -> int:
    """Counts steps that took over `OUTLIER_FACTOR` times their batch's median."""
    times = np.asarray(passes)
    return int((times > OUTLIER_FACTOR * np.median(times, axis=0)).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A change of the step time within a window."""

    after_passes: int
    before_ms: float  # mean milliseconds per step before the change
    after_ms: float


def find_shift(passes: Sequence[Sequence[float]]) -> Shift | None:
    """Finds where the steps became permanently slower or faster; None if they did not.

    All passes on one side must be slower than all on the other, and each side must have at least a third of them, so that a noisy
    host is seldom mistaken for a change of the work.
    """
    totals = [math.fsum(times) / len(times) for times in passes]
    least = max(3, len(totals) // 3)
    for cut in range(least, len(totals) - least + 1):
        before, after = totals[:cut], totals[cut:]
        if min(after) > SHIFT * max(before) or min(before) > SHIFT * max(after):
            return Shift(after_passes=cut, before_ms=statistics.median(before), after_ms=statistics.median(after))
    return None


def relative_half_width(passes: Sequence[Sequence[float]]) -> float:
    """Returns the relative half-width of the 95% interval of a pass's mean total time.

    It is based on the scatter of whole passes: slow steps come in stretches, so the steps of a pass are not independent.
    """
    totals = [math.fsum(times) for times in passes]
    if len(totals) < 2:
        return math.inf
    return _t975(len(totals) - 1) * statistics.stdev(totals) / math.sqrt(len(totals)) / statistics.fmean(totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A rate over whole passes."""

    samples_per_s: float
    ci95: tuple[float, float]  # 95% interval of the samples per second
    tokens_per_s: float


def throughput(passes: Sequence[Sequence[float]], *, samples: float, tokens: float) -> Throughput:
    """Computes the rate from the milliseconds of passes over so many samples and useful tokens each."""
    seconds = statistics.fmean(map(math.fsum, passes)) / 1e3
    rate, half = samples / seconds, relative_half_width(passes)
    return Throughput(
        samples_per_s=rate, ci95=(rate / (1 + half), rate / (1 - half) if half < 1 else math.inf), tokens_per_s=tokens / seconds
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Eager time divided by compiled time on the same batches."""

    ratio: float
    ci95: tuple[float, float]


def speedup(window: Window) -> Speedup | None:
    """Computes the speedup from the passes between two eager blocks; None if there are fewer than two.

    The ratio is that of total times, where the eager time for a pass is the mean of the blocks before and after it, which cancels
    linear drift. The interval is that of a ratio estimator: each pass is paired only with the block after it, so that no block
    counts twice, and the error is the scatter of eager - r × compiled among whole passes, where r is the ratio. Effects common to
    the steps of a pass, such as a host's slow stretch, count in full.
    """
    blocks = np.asarray(window.eager_blocks)
    if len(blocks) < 3:
        return None
    compiled = np.asarray(window.passes)[1 : len(blocks)][:, list(window.chosen)]
    eager = (blocks[:-1] + blocks[1:]) / 2
    ratio = float(eager.sum() / compiled.sum())
    totals = (blocks[1:] - ratio * compiled).sum(axis=1)
    error = math.sqrt(float(totals.var(ddof=1)) / len(totals)) / float(compiled.sum(axis=1).mean())
    half = _t975(len(totals) - 1) * error
    return Speedup(ratio=ratio, ci95=(max(0.0, ratio - half), ratio + half))


def clock_drift(window: Window) -> float | None:
    """Returns the slowest over the fastest block of the reference, minus 1; None with fewer than two blocks."""
    totals = [math.fsum(block) for block in window.eager_blocks]
    return max(totals) / min(totals) - 1 if len(totals) > 1 else None


def step_ms_at(window: Window, length: int) -> float:
    """Returns the milliseconds of a typical step of this padded length.

    This is the median of the length's timed steps if the pool has it. Otherwise it is interpolated linearly between the nearest
    lengths, since most of a step is linear in the number of tokens. Outside the range of lengths, the line has the slope of a
    least-squares fit to all of them, which one odd neighbor does not tilt.
    """
    by_length: dict[int, list[float]] = {}
    for times in window.passes:
        for batch_length, step_ms in zip(window.lengths, times, strict=True):
            by_length.setdefault(batch_length, []).append(step_ms)
    known = sorted(by_length)
    medians = [statistics.median(by_length[batch_length]) for batch_length in known]
    if known[0] <= length <= known[-1]:
        return float(np.interp(length, known, medians))
    slope = max(0.0, statistics.linear_regression(known, medians).slope) if len(known) > 1 else 0.0
    end = 0 if length < known[0] else -1
    return max(0.0, medians[end] + slope * (length - known[end]))


def _t975(freedom: int) -> float:
    return _T975[freedom] if freedom < len(_T975) else 1.96 + 2.5 / freedom
