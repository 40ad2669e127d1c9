"""Graphs that are compiled after the warm-up, because the work changes with the step: counters, schedules, late unfreezing.

Background: a step that compiles is not an ordinary step, and steps before it may do other work than those after it. So the window
of timed steps begins anew after a pass in which something was compiled (`steady.py`), a few times at most: if compiling goes on,
its seconds belong to the throughput, and their rate says what a longer job has to expect.

Output: sentences for a person, which say at which step, how long it took and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._dynamo.utils import counters

from compile_sweep.contract.base import Batch
from compile_sweep.schema.recompiles import fold_recompiles

JOB_STEPS = 100_000
"""Steps of a job that a rate of compiling is projected onto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCompile:
    """A step after the warm-up in which something was compiled."""

    step: int
    """Steps that the model had made before."""
    graphs: int
    seconds: float
    """Of the whole call."""
    reasons: Sequence[str]
    """Recompiles that torch reported, as records have them; none where a function ran for the first time."""


class LateCompiles:
    """Watches the steps of a run.

    Args:
        step: trains on a batch.
        reasons: recompiles so far, which grows as they are reported.
        steps: how many steps the model has made already.
    """

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
        """Graphs compiled since watching began."""
        return sum(one.graphs for one in self.found)

    def sentences(self, *, has_stopped: bool) -> list[str]:
        """What was compiled late, and what that means.

        Args:
            has_stopped: whether a whole window of steps was timed after the last compile.
        """
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
        return [f"{what}; compiling has not stopped and is part of every figure: {projected}, unless recompile_limit ends it"]

    def _why(self) -> str:
        series = fold_recompiles(reason for one in self.found for reason in one.reasons)
        return "; ".join(one.text for one in series[:2]) if series else "code that had not run before"


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]
