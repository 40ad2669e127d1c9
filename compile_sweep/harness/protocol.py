"""How long a measurement takes, and how the figures of workers that step together are combined."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from compile_sweep.harness.distributed import by_rank
from compile_sweep.harness.numerics.trajectory import COMPARED_STEPS
from compile_sweep.harness.steady import Limits
from compile_sweep.schema.attempt_record import figures
from compile_sweep.schema.figure import merged_sentences
from compile_sweep.schema.record import Measurement, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long to measure."""

    compared_steps: int = COMPARED_STEPS
    """Number of first steps, on real batches, that are compared with eager."""
    visits: int = 2
    """How often the warm-up goes through every length."""
    cudagraph_visits: int = 3
    """Visits with CUDA graphs, which torch captures on the second visit of a length and replays from the third."""
    min_passes: int = 4
    max_passes: int = 8
    min_window_s: float = 2.0
    """The window grows until the interval is narrow, or until it has `max_passes` passes and lasts this many seconds."""
    wide_window_s: float = 8.0
    """On GPUs, the same if the interval is still wider than `steady.WIDE`; more steps cost little beside a trial's start."""
    max_window_s: float = math.inf
    """Seconds after which a window of `LEAST_PASSES` or more ends, however wide: for steps of seconds, or a busy host."""
    target_width: float = 0.01
    """Width of the typical step's 95% interval, relative to its median, at which the interval counts as narrow."""
    cpu_target_width: float = 0.10
    """Target width on CPUs, which share their host; only ratios within one run are reported for them."""
    cpu_window_s: float = 12.0
    """Replaces `min_window_s` on CPUs, where disturbances of a step may last for seconds."""
    eager_batches: int = 8
    """Maximum number of batches in a block of eager reference steps."""
    eager_budget_s: float = 10.0
    """Seconds for all eager blocks together; slow steps make blocks shorter, and very slow ones have none."""
    fallback_patience_s: float = 60.0
    """Seconds of compiling and warming up after which a script's run ends if something fell back to eager."""
    remedy_patience_s: float = 0.0
    """The same if a setting is known that may mend it."""
    counts_new_shapes: bool | None = None
    """Whether steps with new shapes, which take longer, counted of the script as it is; None if that is not known."""
    mean_step: Sequence[float] | None = None
    """Samples, tokens and elements of a mean step of the script as it is; None if that is not known."""
    real_passes: int = 3
    """Number of passes over the loader's batches, with pipeline=real."""

    def limits(self, device: torch.device) -> Limits:
        """Returns the limits of the window."""
        on_gpu = device.type == "cuda"
        return Limits(
            min_passes=self.min_passes,
            max_passes=self.max_passes,
            min_window_s=min(self.min_window_s if on_gpu else self.cpu_window_s, self.max_window_s),
            wide_window_s=min(self.wide_window_s, self.max_window_s) if on_gpu else 0.0,
            max_window_s=self.max_window_s,
            target_width=self.target_width if on_gpu else self.cpu_target_width,
        )


def together(measured: Measurement) -> Measurement:
    """Returns the group's measurement in every worker; all workers must call this."""
    return combined(by_rank(measured))


def combined(ranks: Sequence[Measurement]) -> Measurement:
    """Combines the measurements of all workers, in the order of their ranks, by the rule that each figure declares."""
    about = figures(TrialRecord)
    return Measurement(**{one.name: about[one.name].over_ranks(ranks, one.name) for one in fields(Measurement)})


def told_by_all(own: Sequence[str]) -> list[str]:
    """Returns worker 0's sentences, then those that only another worker has, with its rank; all workers must call this."""
    return merged_sentences(by_rank(list(own)))
