"""The project's own proposer: the setting with the largest expected hypervolume gain per second of its trial.

Also chooses the settings that a search begins with, before results can guide it.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from compile_sweep.contract.workload_facts import WorkloadFacts
from compile_sweep.schema.objectives import Aims, Record
from compile_sweep.schema.settings import CompileSettings, Scope
from orchestrator.search.candidates import Candidates, Untried
from orchestrator.search.predictions import Left, Outlook

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
"""Number of settings to begin with; from 4 to 8, searches of recorded tables end equally soon (docs/search.md)."""


def good_elsewhere(workload: str, good: Mapping[str, Sequence[str]] = GOOD_ELSEWHERE) -> list[CompileSettings]:
    """Lists settings that are known to be good for other workloads."""
    return [CompileSettings.parse(key) for origin, keys in good.items() if origin != workload for key in keys]


def designed(
    candidates: Candidates,
    guessed_s: Sequence[float],
    known_good: Iterable[CompileSettings] = (),
    *,
    seed: int = 0,
) -> Iterator[int]:
    """Yields indices of the settings to begin with: eager ones of each padding, known good ones, and the most informative ones.

    A setting is informative through the values of its fields. Until there are `DESIGNED` in all, the next one is that with the
    most values not seen yet per second of its trial; ties are broken at random.

    Args:
        known_good: Settings from elsewhere; eager ones, and those that are not candidates, are left out.
    """
    chance = random.Random(seed)
    settings = candidates.settings
    by_cost = sorted(range(len(settings)), key=lambda index: (guessed_s[index], _unusual(settings[index]), chance.random()))
    eager: dict[str | None, int] = {}
    for index in by_cost:
        if settings[index].scope is Scope.EAGER:
            eager.setdefault(settings[index].padding, index)
    # An eager setting is on a front because it compiles nothing, which is not news.
    compiling = (setting for setting in known_good if setting.scope is not Scope.EAGER)
    known = [place for setting in compiling if (place := candidates.index(setting.key)) is not None]
    begun = list(dict.fromkeys([*eager.values(), *known]))
    yield from begun
    # Columns are fields, so the column's number distinguishes equal codes of different fields.
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
    """Counts the fields that differ from the defaults for the setting's scope and dynamic strategy."""
    usual = CompileSettings(scope=setting.scope, dynamic=setting.dynamic, padding=setting.padding).fields_that_apply()
    own = setting.fields_that_apply()
    return sum(own.get(name) != usual.get(name) for name in own.keys() | usual.keys())


_MOST_ASKED = 300
"""Maximum number of candidates that are compared at a time, sampled anew for each proposal if there are more. Bounds its time."""


class GainPerSecond:
    """Begins with a designed set, then maximizes expected hypervolume gain per expected second."""

    def __init__(
        self,
        candidates: Candidates,
        aims: Aims,
        facts: WorkloadFacts,
        *,
        seed: int = 0,
        known_good: Iterable[CompileSettings] = (),
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._untried = Untried(candidates)
        self._outlook = Outlook(candidates, aims, facts)
        self._design = deque(designed(candidates, self._outlook.guessed_s, known_good, seed=seed))

    def propose(self) -> CompileSettings | None:
        """Returns the next setting of the designed set, then the one with the largest expected gain per second."""
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
        """Returns what untried settings are expected to still add."""
        asked = self._untried.indices()
        return self._outlook.left(asked[:_MOST_ASKED])

    def _begun(self, index: int) -> CompileSettings:
        setting = self._untried.take(index)
        self._outlook.begin(setting)
        return setting
