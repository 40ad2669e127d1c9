"""What a figure of a record declares: its meaning, unit and limits, and how several workers' values are combined.

`attempt_record.py` and `record.py` declare each figure once. The validation of a line, `analysis.COLUMNS`, a group's measurement
and the table in docs/records.md are derived from these declarations.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import pairwise
from typing import Any

NOT_MEASURED = "not measured"  # value of `missing` for most figures

Rule = Callable[[Sequence[Any], str], Any]
"""Combines all workers' measurements, in the order of their ranks, into the group's figure of that name."""


def first(ranks: Sequence[Any], name: str) -> Any:
    """Returns worker 0's value: steps end for all workers together, when gradients are reduced."""
    return getattr(ranks[0], name)


def most(ranks: Sequence[Any], name: str) -> Any:
    """Returns the largest value: the group waits for its slowest worker and needs room for its largest."""
    return max((value for one in ranks if (value := getattr(one, name)) is not None), default=None)


def total(ranks: Sequence[Any], name: str) -> Any:
    """Returns the sum, for example of rates."""
    return sum(getattr(one, name) for one in ranks)


def mean(ranks: Sequence[Any], name: str) -> Any:
    """Returns the mean."""
    return total(ranks, name) / len(ranks)


def merged(ranks: Sequence[Any], name: str) -> list[str]:
    """Returns worker 0's sentences, then those that only another worker has, with its rank."""
    return merged_sentences([getattr(one, name) for one in ranks])


def of_slowest(ranks: Sequence[Any], name: str) -> Any:
    """Returns the value of the worker that compiled longest."""
    return getattr(max(ranks, key=lambda one: one.compile_s), name)


def gravest(ranks: Sequence[Any], name: str) -> Any:
    """Returns the worst numerics check: numbers hold only if every worker's do."""
    return min((getattr(one, name) for one in ranks), key=lambda numerics: _SEVERITY.index(str(numerics["status"])))


def scaled(with_total_of: str) -> Rule:
    """Returns a rule that scales worker 0's interval like the named figure: workers in lockstep vary together."""

    def rule(ranks: Sequence[Any], name: str) -> Any:
        share = total(ranks, with_total_of) / getattr(ranks[0], with_total_of)
        return tuple(end * share for end in getattr(ranks[0], name))

    return rule


def mean_of(of: str) -> Rule:
    """Returns a rule that takes the mean of another figure."""
    return lambda ranks, _: mean(ranks, of)


def each(of: str) -> Rule:
    """Returns a rule that lists another figure of every worker."""
    return lambda ranks, _: [getattr(one, of) for one in ranks]


def merged_sentences(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Returns the first list, then the sentences of the others that are new, with their rank."""
    found = list(by_rank[0])
    for rank, told in enumerate(by_rank[1:], start=1):
        found += [f"worker {rank}: {text}" for text in told if not any(text in known for known in found)]
    return found


_SEVERITY = ("nan", "diverges", "eager_unstable", "ok")  # results of the numerics check, the worst first
_LARGEST = 1e15  # upper limit of every figure, in any unit
SMALLEST_POSITIVE = 1e-12  # lower limit of every measured rate, ratio or step, in any unit
ANY_NUMBER = (-1e100, 1e100)
DIFFERENCE = (-_LARGEST, _LARGEST)  # limits of a figure that is a difference
SHARE = (0.0, 1.0 + 1e-6)
BYTES = (0.0, 2.0**60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Declaration of a record's field, from which validation, `analysis.COLUMNS` and docs/records.md are derived."""

    meaning: str
    unit: str = ""
    missing: str = "never"
    """When the field is null or empty."""
    over_ranks: Rule = first
    """Combines several workers' figures into one."""
    limits: tuple[float, float] = (0.0, _LARGEST)
    """Smallest and largest number that the field can hold."""
    is_positive: bool = False
    """Whether the number is above 0."""


def figure(meaning: str, *, default: Any = None, missing: str = "", unit: str = "", **more: Any) -> Any:
    """Declares a record's field that is null or empty by default; `list` and `dict` give a new empty one.

    A field that is null by default is so if it was not measured, unless `missing` says otherwise.
    """
    if unit == "bytes":
        more["limits"] = BYTES
    missing = missing or (NOT_MEASURED if default is None else "never")
    about = {"figure": Figure(meaning=meaning, missing=missing, unit=unit, **more)}
    return field(default_factory=default, metadata=about) if callable(default) else field(default=default, metadata=about)


def required(meaning: str, **more: Any) -> Any:
    """Declares a field that every record has."""
    return field(metadata={"figure": Figure(meaning=meaning, **more)})


def field_docs(kind: type[Any]) -> dict[str, str]:
    """Returns the string below each field of a dataclass and its bases, on one line."""
    found: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for name, below in pairwise(ast.iter_child_nodes(definition)):
            match name, below:
                case ast.AnnAssign(target=ast.Name(id=field_name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[field_name] = " ".join(text.split())
    return found
