"""The project's own proposer: the setting that is expected to add most hypervolume for each second it will take.

What a search begins with, before results can guide it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search.candidates import Candidates, Untried
from orchestrator.search.outlook import Left, Outlook

GOOD_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "captioning base": (
        "scope=regional,dynamic=auto",
        "scope=regional,dynamic=mark",
        "scope=regional,mode=reduce-overhead",
        "scope=full,mode=reduce-overhead,dynamic=mark,optimizer=fused,group_window=100,attention=unmasked,"
        "inductor.triton.mix_order_reduction=off",
    )
}
"""Settings that were worth using, by the workload and size they were found on (docs/results.md, docs/log.md)."""


DESIGNED = 6
"""Settings to begin with; with 4 to 8 of them searches of recorded tables end as soon (docs/search.md)."""


def good_elsewhere(workload: str, good: Mapping[str, Sequence[str]] = GOOD_ELSEWHERE) -> list[CompileSettings]:
    """Settings that are known to be good for other workloads.

    Args:
        workload: and its size, as in the mapping: what was found on itself is not news from elsewhere.
        good: where they are known from.
    """
    return [CompileSettings.parse(key) for origin, keys in good.items() if origin != workload for key in keys]


def designed(
    candidates: Candidates,
    guessed_s: Sequence[float],
    known_good: Iterable[CompileSettings] = (),
    *,
    seed: int = 0,
) -> Iterator[int]:
    """Places of the settings to begin with: eager ones of each padding, known good ones, and ones that show most.

    A setting shows the values of its fields. Up to `DESIGNED` in all, the one with most values that were not met yet, for each
    second it would take, comes next; chance decides between equals.

    Args:
        candidates: all of them.
        guessed_s: seconds each would probably take.
        known_good: settings from elsewhere; eager ones, and those that are not candidates, are left out.
        seed: of the choice between equals.
    """
    chance = random.Random(seed)
    settings = candidates.settings
    by_cost = sorted(range(len(settings)), key=lambda index: (guessed_s[index], _unusual(settings[index]), chance.random()))
    eager: dict[str | None, int] = {}
    for index in by_cost:
        if settings[index].scope is Scope.EAGER:
            eager.setdefault(settings[index].padding, index)
    # An eager one is on a front because it compiles nothing, which is not news.
    compiling = (setting for setting in known_good if setting.scope is not Scope.EAGER)
    known = [place for setting in compiling if (place := candidates.index(setting.key)) is not None]
    begun = list(dict.fromkeys([*eager.values(), *known]))
    yield from begun
    # Columns are fields, so a column's number tells apart values of the same code.
    fields = np.arange(candidates.codes.shape[1])
    is_met = np.zeros((len(fields), 1 + int(candidates.codes.max(initial=0))), dtype=bool)
    is_met[fields, candidates.codes[begun]] = True
    for _ in range(DESIGNED - len(begun)):
        new = (~is_met[fields, candidates.codes]).sum(axis=1)
        best = max(by_cost, key=lambda index: new[index] / guessed_s[index])
        if not new[best]:
            return
        is_met[fields, candidates.codes[best]] = True
        yield best


def _unusual(setting: CompileSettings) -> int:
    """How many fields say something else than a setting of this scope and dynamic strategy says of itself."""
    usual = CompileSettings(scope=setting.scope, dynamic=setting.dynamic, padding=setting.padding).fields_that_apply()
    own = setting.fields_that_apply()
    return sum(own.get(name) != usual.get(name) for name in own.keys() | usual.keys())


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
