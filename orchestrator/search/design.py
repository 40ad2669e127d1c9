"""What a search begins with, before results can guide it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    """Places of the settings to begin with: eager ones of each padding, known good ones, then a cheap one of each kind.

    Settings are of a kind by their scope and their dynamic strategy. The cheapest setting of a scope or strategy not yet met
    comes next until each was met once; chance decides between equals.

    Args:
        candidates: all of them.
        guessed_s: seconds each would probably take.
        known_good: settings from elsewhere; those that are no candidates are left out.
        seed: of the choice between equals.
    """
    chance = random.Random(seed)
    settings = candidates.settings
    by_cost = sorted(range(len(settings)), key=lambda index: (guessed_s[index], _unusual(settings[index]), chance.random()))
    met: set[str | None] = set()
    for index in by_cost:
        setting = settings[index]
        if setting.scope is Scope.EAGER and setting.padding not in met:
            met.add(setting.padding)
            yield index
    for setting in known_good:
        if (place := candidates.index(setting.key)) is not None:
            met |= {f"scope={setting.scope}", f"dynamic={setting.dynamic}"}
            yield place
    for index in by_cost:
        setting = settings[index]
        kinds = {f"scope={setting.scope}", f"dynamic={setting.dynamic}"}
        if setting.scope is not Scope.EAGER and not kinds <= met:
            met |= kinds
            yield index


def _unusual(setting: CompileSettings) -> int:
    """How many fields say something else than a setting of this scope and dynamic strategy says of itself."""
    usual = CompileSettings(scope=setting.scope, dynamic=setting.dynamic, padding=setting.padding).fields_that_apply()
    own = setting.fields_that_apply()
    return sum(own.get(name) != usual.get(name) for name in own.keys() | usual.keys())
