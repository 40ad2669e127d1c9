"""Describes in words and figures what changed between two sweeps: for the command, its page and its table.

Also formats two sweeps side by side as a Markdown table, such as for a comment on a pull request. Text from records is escaped.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from analysis.comparison.changes import FIGURES, Change, Comparison, Pair, is_usable, mean_change, ratios
from analysis.comparison.rules import signed_percent
from analysis.formatting import MISSING, cell, figure, gib, percent, text, times
from compile_sweep.schema.objectives import Goal
from compile_sweep.schema.outcome import Status

TITLES = {
    "samples_per_s": "samples/s",
    "speedup_eager": "vs eager interleaved",
    "compile_s": "compile s",
    "warm_start_s": "warm start s",
    "peak_memory_bytes": "peak memory",
}

_WRITERS = {"peak_memory_bytes": gib, "speedup_eager": times}
_UNITS = {"compile_s": " s", "warm_start_s": " s"}  # units of differences, which are shown where ratios are meaningless


class Cell(NamedTuple):
    """A figure of a setting in both sweeps, as the page shows it."""

    before: str
    after: str
    change: str
    between: str
    """95% interval of the change."""
    verdict: str
    """better, worse or same; same also if nothing can be said."""
    mark: tuple[float, float, float] | None
    """The change and its interval's ends on the bar, from 0 to 100, where 50 is no change; None if there is no change to show."""


def opening(comparison: Comparison, on_recommendation: str) -> list[str]:
    """Says what differs around the measurements, such as torch, and then whether the recommendation changed."""
    differs = [f"{name} ({before} → {after})" for name, before, after in comparison.circumstances]
    *others, last = differs or [""]
    around = f"B differs in {', '.join(others)}{' and ' if others else ''}{last}."
    return [*([around] if differs else []), on_recommendation]


def sentences(comparison: Comparison) -> list[str]:
    """Describes what changed."""
    said = []
    for name, goal in FIGURES.items():
        if not (usable := [pair for pair in comparison.pairs if name in pair.changes and is_usable(pair)]):
            continue
        better, worse = (_count(usable, name, goal, way) for way in ("better", "worse"))
        mean = _mean(mean_change(comparison.pairs, name), len(ratios(comparison.pairs, name)), len(usable))
        said.append(f"{TITLES[name]}: {mean}; beyond noise, {better} better, {worse} worse.")
    kinds = Counter(news.kind for pair in comparison.pairs for news in pair.news)
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    said.append(f"Settings with other changes: {told}." if told else "Nothing but figures changed.")
    said.append(noise_sentence(comparison))
    return said


def noise_sentence(comparison: Comparison) -> str:
    """Says how much runs of one setting are assumed to differ, and how that is known, for the figures that are compared."""
    by_origin: dict[str, list[str]] = {}
    for name in FIGURES:
        if any(name in pair.changes for pair in comparison.pairs):
            noise = comparison.noise[name]
            size = f" {percent(noise.relative)}" if noise.relative or noise.repeats else ""
            by_origin.setdefault(noise.origin, []).append(TITLES[name] + size)
    told = "; ".join(f"{', '.join(names)} ({origin})" for origin, names in by_origin.items())
    return f"Noise between runs of one setting: {told or 'the sweeps have no figure in common'}."


def _mean(mean: float | None, of: int, usable: int) -> str:
    settings = "the one setting" if usable == 1 else f"the {usable} settings"
    near_0 = f"{'is' if usable - of == 1 else 'are'} too close to 0 for a ratio"
    if mean is None:
        return f"no mean, because {settings} usable in both {near_0}"
    which = settings if of == usable else f"{of} of {settings}"
    rest = "" if of == usable else f", because {usable - of} {near_0}"
    return f"{signed_percent(mean)}, the geometric mean of {which} usable in both{rest}"


def status_of(pair: Pair) -> str:
    """Returns the setting's status in both sweeps; empty if it was usable in both."""
    words = [str(row["status"]) + (f" ({label})" if (label := text(row["label"])) else "") for row in (pair.before, pair.after)]
    if words == [str(Status.OK)] * 2:
        return ""
    return f"{words[0]} in both" if words[0] == words[1] else f"{words[0]} in A, {words[1]} in B"


def cell_of(name: str, pair: Pair) -> Cell:
    """Formats a figure's change; without better or worse for a setting that is not usable in both sweeps."""
    found = pair.changes[name]
    write = _WRITERS.get(name, figure)
    is_exact = found.low is None or found.low == found.high
    between = "" if is_exact else f"{signed_percent(found.low)} to {signed_percent(found.high)}"
    difference = f"{'−' if found.after < found.before else '+'}{write(abs(found.after - found.before))}{_UNITS.get(name, '')}"
    change = "unchanged" if found.after == found.before else signed_percent(found.share) if found.is_ratio else difference
    verdict = _verdict(FIGURES[name], found) if is_usable(pair) else "same"
    return Cell(write(found.before), write(found.after), change, between, verdict, _mark(found))


def _verdict(goal: Goal, found: Change) -> str:
    if not found.is_significant:
        return "same"
    return "better" if (found.after > found.before) == (goal is Goal.MAX) else "worse"


_BAR_SHARE = 0.25  # the change at the end of a bar; larger ones are cut off there


def _mark(found: Change) -> tuple[float, float, float] | None:
    if found.share is None or found.low is None or found.high is None or found.low == found.high:
        return None
    at, low, high = (50 + 50 * max(-1.0, min(1.0, share / _BAR_SHARE)) for share in (found.share, found.low, found.high))
    return at, low, high


def _count(pairs: Sequence[Pair], name: str, goal: Goal, way: str) -> int:
    return sum(_verdict(goal, pair.changes[name]) == way for pair in pairs if name in pair.changes)


def comparison_markdown(comparison: Comparison) -> str:
    """Returns sentences about what changed, then a row per setting of both sweeps; changes beyond noise are bold."""
    shown = [name for name in FIGURES if any(name in pair.changes for pair in comparison.pairs)]
    lines = [["setting", *(TITLES[name] for name in shown), "what else changed"], ["---"] * (len(shown) + 2)]
    for pair in comparison.pairs:
        status = status_of(pair)
        row = [cell(pair.label + (f" ({status})" if status else ""))]
        for name in shown:
            if name not in pair.changes:
                row.append(MISSING)
                continue
            found = cell_of(name, pair)
            change = found.change if found.verdict == "same" else f"**{found.change}, {found.verdict}**"
            row.append(f"{found.before} → {found.after}: {change}" + (f" ({found.between})" if found.between else ""))
        lines.append([*row, cell("; ".join(f"{news.kind}: {news.sentence}" for news in pair.news)) or MISSING])
    said = [f"- {cell(sentence)}" for sentence in sentences(comparison)]
    return "\n".join([*said, "", *(f"| {' | '.join(row)} |" for row in lines)]) + "\n"
