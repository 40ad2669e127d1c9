"""Decides when a search has done enough: a front that no longer moves, or a spent budget."""

import math
import re
from dataclasses import dataclass
from typing import Self

from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import Aims, Record, figure
from compile_sweep.schema.pareto import Losses, extended


@dataclass(frozen=True, slots=True)
class StableFront:
    """Ends a search when this many consecutive trials, including failures, did not change the front."""

    trials: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a rule such as `front stable for 6 trials`; raises ConfigError for other text."""
        found = re.fullmatch(r"\s*front\s+stable\s+for\s+([1-9]\d{0,5})\s+trials?\s*", text)
        if found is None:
            raise ConfigError(f'--stop "{text}" is not a rule; write it like "front stable for 6 trials"')
        return cls(int(found.group(1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a search may spend; None for no limit. Trials count in full, including their compile time."""

    time_s: float | None = None
    """Wall seconds."""
    gpu_s: float | None = None
    """Seconds of trials times their workers: what a host with one GPU would take for them sequentially."""

    def __post_init__(self) -> None:
        for name, value in (("--time-budget-s", self.time_s), ("--gpu-budget-s", self.gpu_s)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value:g} is not a time; use a finite number of seconds above 0")


class Spending:
    """Tracks what finished trials took, and how long the front has not moved."""

    def __init__(self, aims: Aims, *, rule: StableFront | None = None, budget: Budget | None = None) -> None:
        self._aims = aims
        self._rule = rule
        self._budget = budget or Budget()
        self._front: list[Losses] = []
        self.gpu_s = 0.0
        """GPU-seconds so far."""
        self.unmoved = 0
        """Number of trials since the front last changed; 0 before there is one."""

    def tell(self, record: Record) -> None:
        """Counts a finished attempt."""
        self.spend(record)
        losses = self._aims.losses(record)
        after = extended(self._front, losses) if losses is not None and self._aims.is_usable(record) else self._front
        self.unmoved = 0 if after != self._front or not after else self.unmoved + 1
        self._front = after

    def spend(self, record: Record) -> None:
        """Counts the cost of an attempt that says nothing new about the front: a repeat, or a warm start."""
        self.gpu_s += gpu_s(record)

    def reason_to_stop(self, elapsed_s: float = 0.0) -> str | None:
        """Says why no further trial should start; None if one may."""
        if self._rule is not None and self.unmoved >= self._rule.trials:
            return f"the front has not moved for {self.unmoved} trials"
        if self._budget.time_s is not None and elapsed_s >= self._budget.time_s:
            return f"the budget of {self._budget.time_s:g} s is spent"
        if self._budget.gpu_s is not None and self.gpu_s >= self._budget.gpu_s:
            return f"the budget of {self._budget.gpu_s:g} GPU-seconds is spent"
        return None

    def left_s(self, *, num_workers: int = 1, elapsed_s: float = 0.0, under_way_gpu_s: float = 0.0) -> float:
        """Returns the longest that a trial may take within the remaining budget, in seconds; infinite without one."""
        by_time_s = math.inf if self._budget.time_s is None else self._budget.time_s - elapsed_s
        if self._budget.gpu_s is None:
            return by_time_s
        return min(by_time_s, (self._budget.gpu_s - self.gpu_s - under_way_gpu_s) / num_workers)


def gpu_s(record: Record) -> float:
    """Returns the GPU-seconds of an attempt, including earlier attempts that it repeats."""
    return ((figure(record, "wall_s") or 0.0) + (figure(record, "retried_s") or 0.0)) * (figure(record, "num_workers") or 1.0)
