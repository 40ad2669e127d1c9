"""The project's own proposer: the setting that is expected to add most hypervolume for each second it will take."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from orchestrator.objectives import Aims, Record
from orchestrator.search.candidates import Candidates, Untried
from orchestrator.search.design import designed
from orchestrator.search.outlook import Left, Outlook
from workloads.settings import CompileSettings

_MOST_ASKED = 300
"""Candidates that are compared at a time, drawn anew for each proposal where there are more. Bounds its time."""


class GainPerSecond:
    """Begins with a designed set, then goes by expected hypervolume gain over expected seconds.

    Args:
        candidates: what may be proposed.
        aims: the objectives and constraints.
        max_length: of the workload, in tokens, by which the number of graphs is told.
        min_length: of the workload, in tokens.
        seed: decides between equals.
        known_good: settings from elsewhere to begin with.
    """

    def __init__(
        self,
        candidates: Candidates,
        aims: Aims,
        *,
        max_length: int,
        min_length: int = 1,
        seed: int = 0,
        known_good: Iterable[CompileSettings] = (),
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._untried = Untried(candidates)
        self._outlook = Outlook(candidates, aims, max_length=max_length, min_length=min_length)
        self._design = deque(designed(candidates, self._outlook.guessed_s, known_good, seed=seed))

    def propose(self) -> CompileSettings | None:
        """The next of the designed set, then the best bargain."""
        while self._design:
            if (index := self._design.popleft()) in self._untried:
                return self._begun(index)
        if not len(self._untried):
            return None
        asked = self._untried.indices()
        if len(asked) > _MOST_ASKED:
            asked = self._random.choice(asked, _MOST_ASKED, replace=False)
        expected = self._outlook.expected(asked)
        bargains = expected.gains / expected.wall_s
        best = np.flatnonzero(bargains >= bargains.max() * (1 - 1e-9))
        return self._begun(int(asked[self._random.choice(best)]))

    def tell(self, record: Record) -> None:
        self._untried.strike(str(record["settings_key"]))
        self._outlook.tell(record)

    def left(self) -> Left:
        """What is expected to be left to gain by what was not tried."""
        asked = self._untried.indices()
        return self._outlook.left(asked[:_MOST_ASKED])

    def _begun(self, index: int) -> CompileSettings:
        setting = self._untried.take(index)
        self._outlook.begin(setting)
        return setting
