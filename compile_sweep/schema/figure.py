"""What a figure of a record says of itself: its meaning, unit and limits, and how those of several workers become one.

`record.py` declares each figure with it, once. The checks of a line, `analysis.COLUMNS`, a group's measurement and the table in
docs/records.md are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

NOT_MEASURED = "not measured"
"""When most figures are missing."""

Rule = Callable[[Sequence[Any], str], Any]
"""Makes the group's figure of that name out of all workers' measurements, in the order of their ranks."""


def first(ranks: Sequence[Any], name: str) -> Any:
    """Worker 0's: steps end for all workers together, when gradients are reduced."""
    return getattr(ranks[0], name)


def most(ranks: Sequence[Any], name: str) -> Any:
    """The largest: the group waits for its slowest worker and needs room for its largest."""
    return max((value for one in ranks if (value := getattr(one, name)) is not None), default=None)


def total(ranks: Sequence[Any], name: str) -> Any:
    """The sum, as of rates."""
    return sum(getattr(one, name) for one in ranks)


def mean(ranks: Sequence[Any], name: str) -> Any:
    """The mean."""
    return total(ranks, name) / len(ranks)


def merged(ranks: Sequence[Any], name: str) -> list[str]:
    """Worker 0's sentences, and those that only another worker has, with its rank."""
    return merged_sentences([getattr(one, name) for one in ranks])


def of_slowest(ranks: Sequence[Any], name: str) -> Any:
    """That of the worker that compiled longest."""
    return getattr(max(ranks, key=lambda one: one.compile_s), name)


def gravest(ranks: Sequence[Any], name: str) -> Any:
    """The check that found the worst: numbers hold only where every worker's do."""
    return min((getattr(one, name) for one in ranks), key=lambda numerics: _SEVERITY.index(str(numerics["status"])))


def scaled(with_total_of: str) -> Rule:
    """Worker 0's interval, scaled as the named figure is: workers in lockstep scatter together."""

    def rule(ranks: Sequence[Any], name: str) -> Any:
        share = total(ranks, with_total_of) / getattr(ranks[0], with_total_of)
        return tuple(end * share for end in getattr(ranks[0], name))

    return rule


def mean_of(of: str) -> Rule:
    """The mean of another figure."""
    return lambda ranks, _: mean(ranks, of)


def each(of: str) -> Rule:
    """Another figure of every worker."""
    return lambda ranks, _: [getattr(one, of) for one in ranks]


def merged_sentences(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """The first list, and of the others what no sentence so far contains, with its rank."""
    found = list(by_rank[0])
    for rank, told in enumerate(by_rank[1:], start=1):
        found += [f"worker {rank}: {text}" for text in told if not any(text in known for known in found)]
    return found


_SEVERITY = ("nan", "diverges", "eager_unstable", "ok")
"""Results of the numerics check, the gravest first."""

_LARGEST = 1e15
"""No figure is above this, in any unit."""
SMALLEST_POSITIVE = 1e-12
"""No rate, ratio or step that was measured is below this, in any unit."""
ANY_NUMBER = (-1e100, 1e100)
DIFFERENCE = (-_LARGEST, _LARGEST)
"""Of what comes of a subtraction."""
SHARE = (0.0, 1.0 + 1e-6)
BYTES = (0.0, 2.0**60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What there is to say of a record's field: the checks, `analysis.COLUMNS` and docs/records.md are made of it."""

    meaning: str
    unit: str = ""
    missing: str = "never"
    """When the field is null or empty."""
    over_ranks: Rule = first
    """Makes one figure of those that several workers measured."""
    limits: tuple[float, float] = (0.0, _LARGEST)
    """Least and most that a number in the field can be."""
    is_positive: bool = False
    """Whether it is above 0."""


def figure(meaning: str, *, default: Any = None, **more: Any) -> Any:
    """A field of a record that is null or empty unless it is given.

    Args:
        meaning: What it is, in Markdown.
        default: `list` and `dict` make an empty one.
        more: Other fields of `Figure`.
    """
    about = {"figure": Figure(meaning=meaning, **more)}
    return field(default_factory=default, metadata=about) if callable(default) else field(default=default, metadata=about)


def required(meaning: str, **more: Any) -> Any:
    """A field that every record has, told of in the same way."""
    return field(metadata={"figure": Figure(meaning=meaning, **more)})
