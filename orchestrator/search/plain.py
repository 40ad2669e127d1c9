"""Proposers that learn nothing: every candidate in order, or in any order."""

from __future__ import annotations

import random

from orchestrator.objectives import Record
from orchestrator.search.candidates import Candidates, Untried
from workloads.settings import CompileSettings


class InOrder:
    """Proposes candidates one after the other.

    Args:
        candidates: what may be proposed.
        seed: shuffles them; None keeps them in the order they came in, which is a grid's.
    """

    def __init__(self, candidates: Candidates, *, seed: int | None = None) -> None:
        self._untried = Untried(candidates)
        self._order = list(range(len(candidates)))
        if seed is not None:
            random.Random(seed).shuffle(self._order)
        self._order.reverse()

    def propose(self) -> CompileSettings | None:
        while self._order:
            if (index := self._order.pop()) in self._untried:
                return self._untried.take(index)
        return None

    def tell(self, record: Record) -> None:
        self._untried.strike(str(record["settings_key"]))
