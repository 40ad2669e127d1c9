"""The steady state of a script: a stream of steps, cut into passes, until the interval of their median is narrow.

Background: the figures are those of `steady.py`, whose passes go over a pool of batches. Here a pass is as many steps as take
about 0.3 s, followed by one step that is not timed, because the device was waited for. Steps that include an evaluation or a
checkpoint are left out, unless most do, in which case they belong to a typical step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compile_sweep.harness import steady
from compile_sweep.harness.distributed import agreed, agreed_numbers
from compile_sweep.harness.protocol import Protocol
from compile_sweep.harness.steady import Window
from compile_sweep.script.clock import StepTime

PASS_S = 0.3  # approximate seconds of a pass
PASS_STEPS = (2, 50)  # minimum and maximum number of steps in a pass
USUAL_SHARE = 0.3  # fraction of steps that include an evaluation, above which it belongs to a typical step


@dataclass(slots=True, kw_only=True)
class Stream:
    """Timed steps."""

    protocol: Protocol
    device: torch.device
    pass_steps: int
    keeps_interrupted: bool
    times: list[StepTime] = field(default_factory=list)
    """Steps that count."""
    left_out: int = 0
    """Number of steps that do not count."""
    passes: list[list[float]] = field(default_factory=list)
    """Milliseconds of steps that count, minus their wait for data."""
    _began: float = field(default_factory=time.monotonic)
    _look_again_at: int = 0

    @classmethod
    def after(cls, warmup: Sequence[StepTime], protocol: Protocol, device: torch.device) -> Stream:
        """Returns a stream whose passes fit the last steps of a warm-up."""
        (step_ms,) = agreed_numbers([statistics.median(one.ms for one in warmup[-5:])], device)
        least, most = PASS_STEPS
        interrupted = sum(one.interrupted for one in warmup)
        return cls(
            protocol=protocol,
            device=device,
            pass_steps=int(min(most, max(least, round(1e3 * PASS_S / max(step_ms, 1e-3))))),
            keeps_interrupted=interrupted > USUAL_SHARE * len(warmup),
        )

    @property
    def window(self) -> Window:
        """Returns the passes in the form that `steady.py` takes, with all steps alike."""
        return Window(lengths=[1] * self.pass_steps, passes=self.passes)

    @property
    def median_ms(self) -> float:
        """Median milliseconds of a step."""
        return steady.stratified_median(self.passes, self.window.lengths)

    @property
    def wait_share(self) -> float:
        """Fraction of the time that was waiting for data."""
        return sum(one.wait_ms for one in self.times) / sum(one.ms for one in self.times)

    @property
    def is_stable(self) -> bool:
        """Whether the interval of the median is narrow."""
        return steady.relative_width(self.window) <= self.protocol.limits(self.device).target_width

    def take(self, times: Sequence[StepTime]) -> None:
        """Adds consecutive steps."""
        kept = [one for one in times if self.keeps_interrupted or not one.interrupted]
        self.left_out += len(times) - len(kept)
        self.times += kept
        whole = len(self.times) // self.pass_steps * self.pass_steps
        compute = [one.compute_ms for one in self.times[:whole]]
        self.passes = [compute[at : at + self.pass_steps] for at in range(0, whole, self.pass_steps)]

    def is_long_enough(self) -> bool:
        """Tells whether to stop; worker 0 decides for all."""
        limits = self.protocol.limits(self.device)
        if steady.is_late(limits, time.monotonic() - self._began, len(self.passes), self.device):
            return True
        if len(self.passes) < max(self._look_again_at, limits.min_passes):
            return agreed(False, self.device)
        self._look_again_at = max(len(self.passes) + 1, math.ceil(1.1 * len(self.passes)))
        elapsed_s, width = time.monotonic() - self._began, steady.relative_width(self.window)
        long_enough = elapsed_s >= limits.min_window_s
        at_limit = long_enough and len(self.passes) >= limits.max_passes
        is_narrow = width <= limits.target_width and elapsed_s >= min(steady.LEAST_S, limits.min_window_s)
        return agreed(at_limit or is_narrow or (long_enough and steady.is_hopeless(self.window, width, limits)), self.device)

    def throughput(self, samples: float, tokens: float) -> steady.Throughput:
        """Returns the rate, given the samples and tokens of a mean step."""
        return steady.throughput(self.passes, samples=samples * self.pass_steps, tokens=tokens * self.pass_steps)
