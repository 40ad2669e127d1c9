"""Rules that a comparison must not break, for `--fail-on`: `compile_s>+15%`, `graph_breaks>0`, `failures`. Pure.

A rule about a change is broken only if the change is also significant: a gate that closes because of noise is soon switched off.
A setting that is no longer usable breaks every rule about its figures, because nothing shows that it still obeys them.
"""

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple, Self

import pandas as pd

from analysis.comparison.changes import Change, Comparison, Kind, Pair, change, side_by_side
from analysis.formatting import figure, number, percent, text
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.objectives import FIELDS, Constraint
from compile_sweep.schema.outcome import Status

NEWS_KINDS = tuple(kind for kind in Kind if kind not in (Kind.FIXED, Kind.OTHERWISE))

_FIGURES = (*FIELDS, "speedup_eager")


class Rule(NamedTuple):
    """A condition that must not occur."""

    words: str
    name: str  # a column; empty for news
    is_above: bool
    limit: float  # a fraction for relative changes, otherwise in the column's unit
    is_change: bool  # whether the limit is for the change, rather than for the second sweep's figure
    is_relative: bool
    kind: Kind | None = None  # kind of news, for a rule about news

    @classmethod
    def parse(cls, words: str) -> Self:
        """Parses a rule such as `compile_s>+15%`, `peak_memory_bytes>40GiB` or `failures`; raises ConfigError for other text."""
        if words.strip() in NEWS_KINDS:
            return cls(words.strip(), "", True, 0.0, False, False, Kind(words.strip()))
        found = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([+-]?)(\d+\.?\d*|\.\d+)\s*(%|[A-Za-z]*)\s*", words)
        if found is None:
            raise ConfigError(
                f"--fail-on {words!r} is not a rule; write one like compile_s>+15%, samples_per_s<-3% or graph_breaks>0, "
                f"or one of {', '.join(NEWS_KINDS)}"
            )
        name, side, sign, digits, unit = found.groups()
        if name not in _FIGURES:
            close = get_close_matches(name, [*_FIGURES, *NEWS_KINDS], n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/records.md names them"
            raise ConfigError(f"--fail-on {words!r}: no numeric field of a record is called {name!r}; {hint}")
        if unit == "%":
            if not sign:
                raise ConfigError(f"--fail-on {words!r} does not say which way; write {name}>+{digits}% or {name}<-{digits}%")
            limit = float(digits) / 100
        else:
            try:
                limit = Constraint.parse(f"{name}<={digits}{unit}").bound
            except ConfigError as error:
                raise ConfigError(f"--fail-on {words!r}: {error}") from None
        if not math.isfinite(limit):
            raise ConfigError(f"--fail-on {words[:40]!r}… has a limit that is too large for a number; use a smaller one")
        return cls(words.strip(), name, side == ">", -limit if sign == "-" else limit, bool(sign), unit == "%")

    def exceeds(self, value: float) -> bool:
        """Tells whether the value is on the wrong side of the limit."""
        return value > self.limit if self.is_above else value < self.limit


class Finding(NamedTuple):
    """What a rule says about one setting."""

    rule: str
    label: str
    sentence: str
    fails: bool  # false for a change beyond the limit but within noise


def check(comparison: Comparison, rules: Sequence[Rule]) -> list[Finding]:
    """Returns every setting that breaks a rule, or would without noise; raises ConfigError for a rule that has no figure."""
    found = []
    for rule in rules:
        is_judged = comparison.unfinished or any(_judged(rule, pair, comparison) for pair in comparison.pairs)
        if rule.kind is None and not is_judged:
            raise ConfigError(
                f"--fail-on {rule.words!r}: no setting has a figure for {rule.name} in both sweeps, so the rule cannot be checked"
            )
        for pair in comparison.pairs:
            found += _of_news(rule, pair) if rule.kind else _of_figure(rule, pair, comparison)
    needing = [rule for rule in rules if rule.kind in (None, Kind.FAILURE)]
    found += [
        Finding(rule.words, label, "planned, but without a record", True)
        for rule in needing[:1]
        for label in comparison.unfinished
    ]
    return found


def _judged(rule: Rule, pair: Pair, comparison: Comparison) -> bool:
    if _of_figure(rule, pair, comparison):
        return True  # also for a figure that is missing now
    if not rule.is_change:
        return number(pair.after.get(rule.name)) is not None
    return change(side_by_side(pair.before, pair.after), rule.name, comparison.noise) is not None


def _of_news(rule: Rule, pair: Pair) -> list[Finding]:
    return [Finding(rule.words, pair.label, news.sentence, True) for news in pair.news if news.kind is rule.kind]


def _of_figure(rule: Rule, pair: Pair, comparison: Comparison) -> list[Finding]:
    had, has = (number(row.get(rule.name)) for row in (pair.before, pair.after))
    if pair.before["status"] == Status.OK and pair.after["status"] != Status.OK:
        return [Finding(rule.words, pair.label, f"usable before, {_label(pair.after)} now, so the rule cannot be checked", True)]
    if pair.after["status"] != Status.OK:
        return []  # it was not usable before either
    if has is None:
        missing = f"has no {rule.name} anymore; it was {figure(had)}"
        return [Finding(rule.words, pair.label, missing, True)] if had is not None else []
    if not rule.is_change:
        sentence = f"{rule.name} is {figure(has)}"
        return [Finding(rule.words, pair.label, sentence, True)] if rule.exceeds(has) else []
    found = change(side_by_side(pair.before, pair.after), rule.name, comparison.noise)
    if found is None or not rule.exceeds(_share(found) if rule.is_relative else found.after - found.before):
        return []
    return [Finding(rule.words, pair.label, _moved(rule.name, found), found.is_significant)]


def _share(found: Change) -> float:
    """Returns the relative change; from 0 to anything, it is beyond every limit."""
    if found.share is None:
        return math.copysign(math.inf, found.after) if found.after else 0.0
    return found.share


def _moved(name: str, found: Change) -> str:
    share = f", {signed_percent(found.share)}" if found.is_ratio else ""
    span = "" if found.low is None else f" (95%: {signed_percent(found.low)} to {signed_percent(found.high)})"
    noise = "" if found.is_significant else "; within noise, so it does not fail"
    return f"{name} from {figure(found.before)} to {figure(found.after)}{share}{span}{noise}"


def signed_percent(share: float | None) -> str:
    """Formats a change as `+3.1%` or `−3.1%`; a dash if missing."""
    return percent(share) if share is None else f"{'−' if share < 0 else '+'}{percent(abs(share))}"


def _label(row: pd.Series) -> str:
    return f"{row['status']}: {text(row['label']) or 'no label'}"
