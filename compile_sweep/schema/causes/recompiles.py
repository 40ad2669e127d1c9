"""Recompiles as records hold them, parsed and grouped: a guard that fails at each of ten values is one finding, not ten.

Background: a record has one text per recompile, `function (file:line): guard # code # file:line in function`. A guard
names a source, which is Dynamo's path to a value, and the value at the time its graph was compiled.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

_BOILERPLATE = (
    re.compile(r" \(HINT: .*?\)(?= \(one of|$)"),
    re.compile(r" \(one of \d+ graphs, none of which fits\)"),
    re.compile(r" # \(unknown source .+?, please file a bug\)"),
    re.compile(r" Guard failed on a parameter, consider using .*?(?=\(one of|$)"),
)
"""Text that torch adds to every guard of this kind, and the number of graphs tried."""

_NOTATIONS = (
    (re.compile(r"___as_tensor\((.+?)\)\.item\(\)"), r"\1"),  # how torch before 2.12 names a Python float that varies
    (re.compile(r"(___check_\w+\([^,]+), \d{6,}\)"), r"\1)"),  # where an object was in this process's memory
    (re.compile(r"(?<=[=<>] )\((-(?:\d[\d.e+-]*|inf))\)"), r"\1"),  # a negative number that is compared with an expression
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]"), r".\1"),
    (re.compile(r"\bG\['__import_\w+'\]\.(\w+)"), r"G['\1']"),  # a global name of another file than that of the compiled function
)
"""How torch writes what has a plainer form."""

_SIZE = re.compile(r"tensor '(?P<source>.+?)' size mismatch at index (?P<index>\d+)\. expected (?P<value>\d+), actual \d+")
_PROPERTY = re.compile(r"tensor '(?P<source>.+?)' (?P<kind>\w+) mismatch")
_LENGTH = re.compile(r"len\((?P<source>.+?)\) (?:==|!=|>=|<=|<|>) (?P<value>\d+)")
_EMPTY = re.compile(r"not (?P<source>\S+)$")
_KEY = re.compile(r"KeyError on (?P<source>\w[\w.]*)\[(?P<value>.+)\]$")
_VALUE = re.compile(r"(?P<source>.+?) (?:==|is) (?P<value>.+)$")

MOST_VALUES = 5  # maximum number of values of one source that are written out


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompile:
    """A recompile: where it happened, and which guard failed."""

    function: str
    """Function and place, such as `forward (model.py:3)`."""
    guard: str
    """The expression that no longer held, without torch's general hints."""
    source: str
    """Dynamo's path to the guarded value, such as `self.model.steps`; the guard itself if its form is not known."""
    kind: str
    """`length`, `size 1`, `dtype`, `key`, `value` or the like; empty if the guard's form is not known."""
    value: str
    """Value when the graph was compiled; empty if the guard does not say."""
    line: str
    """Line of code that the guard comes from, and its place: `code # file:line in function`; empty if torch names none."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a recompile's text."""
        function, separator, rest = text.partition("): ")
        function, rest = (f"{function})", rest) if separator else ("", text)
        guard, _, line = plain_guard(rest).partition(" # ")
        source, kind, value = _parts(guard)
        return cls(function=function, guard=guard, source=source, kind=kind, value=value, line=line)

    @property
    def is_shared(self) -> bool:
        """Whether the function may be that of several modules, such as repeated blocks, which are compiled apart."""
        return re.match(r"\S+ of ", self.function) is not None


def plain_guard(guard: str) -> str:
    """Returns a guard for display: without torch's general hints and addresses, and with modules by their dotted names."""
    for pattern in _BOILERPLATE:
        guard = pattern.sub("", guard)
    for pattern, plain in _NOTATIONS:
        guard = pattern.sub(plain, guard)
    return guard


def _parts(guard: str) -> tuple[str, str, str]:
    if found := _SIZE.match(guard):
        return found["source"], f"size {found['index']}", found["value"]
    if found := _PROPERTY.match(guard):
        return found["source"], found["kind"], ""
    if found := _LENGTH.match(guard):
        return found["source"], "length", found["value"]
    if found := _EMPTY.match(guard):
        return found["source"], "length", "0"
    if found := _KEY.match(guard):
        return found["source"], "key", found["value"]
    if found := _VALUE.match(guard):
        return found["source"], "value", found["value"]
    return guard, "", ""


@dataclass(slots=True, kw_only=True)
class RecompileSeries:
    """Recompiles of one function for one source."""

    first: Recompile
    values: list[str] = field(default_factory=list)  # distinct values, in order
    count: int = 0

    @classmethod
    def of(cls, one: Recompile) -> Self:
        """Returns a series with one recompile."""
        return cls(first=one, values=[one.value], count=1)

    def is_of(self, one: Recompile) -> bool:
        """Tells whether the recompile belongs to this series."""
        return _identity(self.first) == _identity(one)

    @property
    def text(self) -> str:
        """Formats the series as one line."""
        first = self.first
        guard = f"{first.function}: {first.guard}" if first.function else first.guard
        if len(self.values) > 1:
            guard += f", then {_listed(self.values[1:])}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{guard}{times}{f' # {first.line}' if first.line else ''}"


def fold_recompiles(texts: Iterable[str]) -> list[RecompileSeries]:
    """Groups the recompiles of each function that have one source, in the order in which the groups began."""
    found: dict[tuple[str, str, str], RecompileSeries] = {}
    for text in texts:
        one = Recompile.parse(text)
        series = found.setdefault(_identity(one), RecompileSeries(first=one))
        series.count += 1
        if one.value not in series.values:
            series.values.append(one.value)
    return list(found.values())


def _identity(one: Recompile) -> tuple[str, str, str]:
    return one.function, one.source, one.kind


def _listed(values: list[str]) -> str:
    shown = values if len(values) <= MOST_VALUES else [*values[: MOST_VALUES - 1], "…", values[-1]]
    return ", ".join(shown)
