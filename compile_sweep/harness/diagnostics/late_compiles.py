"""Graphs that are compiled after the warm-up because the work changes with the step: counters, schedules, late unfreezing.

Background: a step that compiles is not an ordinary step, and steps before it may do other work than those after it. So the window
of timed steps restarts after a pass in which something was compiled (`steady.py`), at most a few times. If compiling goes on,
its seconds belong to the throughput, and their rate says what to expect of a longer job.

Output: sentences that say at which step something compiled, how long it took and why.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._dynamo.utils import counters

from compile_sweep.contract.base import Batch
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.causes.slowness import STILL_COMPILING

JOB_STEPS = 100_000  # steps of a job that the rate of compiling is projected to


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCompile:
    """A step after the warm-up in which something was compiled."""

    step: int  # steps that the model had made before
    graphs: int
    seconds: float  # duration of the whole call, in seconds
    reasons: Sequence[str]  # recompiles that torch reported, as in records; empty if a function ran for the first time


class LateCompiles:
    """Watches the steps of a run for compiles; `reasons` is the list that grows as recompiles are reported."""

    def __init__(self, step: Callable[[Batch], Tensor], reasons: Sequence[str], steps: int) -> None:
        self._step, self._reasons = step, reasons
        self.steps = self.first_step = steps
        self.found: list[LateCompile] = []

    def __call__(self, batch: Batch) -> Tensor:
        """Trains on a batch."""
        graphs, reasons, began = _graphs(), len(self._reasons), time.perf_counter()
        loss = self._step(batch)
        if (now := _graphs()) != graphs:
            self.found.append(
                LateCompile(
                    step=self.steps,
                    graphs=now - graphs,
                    seconds=time.perf_counter() - began,
                    reasons=self._reasons[reasons:],
                )
            )
        self.steps += 1
        return loss

    @property
    def graphs(self) -> int:
        """Number of graphs compiled since watching began."""
        return sum(one.graphs for one in self.found)

    def sentences(self, *, has_stopped: bool) -> list[str]:
        """Says what was compiled late, and what that means."""
        if not self.found:
            return []
        seconds, last = sum(one.seconds for one in self.found), self.found[-1]
        graphs = f"{self.graphs} {'graph' if self.graphs == 1 else 'graphs'}"
        at = ", ".join(str(one.step) for one in self.found[:3]) + (f", … {last.step}" if len(self.found) > 3 else "")
        what = f"compiled {graphs} after the warm-up, at step {at}, in {seconds:.1f} s: {self._why()}"
        if has_stopped:
            return [f"{what}; the work changes with the step, and only steps after the last of these are timed"]
        share = self.graphs / max(1, self.steps - self.first_step)
        job_s = seconds / self.graphs * share * JOB_STEPS
        projected = f"at this rate {JOB_STEPS:,} steps compile {share * JOB_STEPS:,.0f} graphs in {job_s / 60:,.0f} min"
        return [f"{what}; {STILL_COMPILING} and is part of every figure: {projected}, unless recompile_limit ends it"]

    def _why(self) -> str:
        series = fold_recompiles(reason for one in self.found for reason in one.reasons)
        return "; ".join(one.text for one in series[:2]) if series else "code that had not run before"


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
