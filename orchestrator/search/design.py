"""What a search begins with, before results can guide it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from orchestrator.search.candidates import Candidates
from workloads.settings import CompileSettings, Scope

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
        workload: and its size, as in the mapping: what was found on itself is no news from elsewhere.
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
        known_good: settings from elsewhere; eager ones, and those that are no candidates, are left out.
        seed: of the choice between equals.
    """
    chance = random.Random(seed)
    settings = candidates.settings
    by_cost = sorted(range(len(settings)), key=lambda index: (guessed_s[index], _unusual(settings[index]), chance.random()))
    eager: dict[str | None, int] = {}
    for index in by_cost:
        if settings[index].scope is Scope.EAGER:
            eager.setdefault(settings[index].padding, index)
    # An eager one is on a front because it compiles nothing, which is no news.
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
