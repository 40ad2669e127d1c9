"""`python -m analysis.compare A B`: the settings that two sweeps share, side by side, as text and as `compare.html`.

With `--fail-on RULE` it is a gate: exit code 1, and a reason for each setting that breaks a rule (`fail_on.py`).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from analysis.arguments import Parser, run
from analysis.changes import FIGURES, Change, Comparison, News, Pair, compare, mean_change
from analysis.fail_on import NEWS_KINDS, Finding, Rule, check, signed_percent
from analysis.formatting import MISSING, figure, gib, text, times
from analysis.load import SweepInfo, load, load_sweep
from analysis.pareto import Goal
from analysis.report import renew_report
from analysis.report_next import COMPARISON_FILE
from orchestrator.errors import SweepFolderError
from orchestrator.records import Status

GATE_FAILED = 1

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The page runs no script and loads nothing."""

_TITLES = {
    "samples_per_s": "samples/s",
    "speedup_eager": "vs eager interleaved",
    "compile_s": "compile s",
    "warm_start_s": "warm start s",
    "peak_memory_bytes": "peak memory",
}

_WRITERS = {"peak_memory_bytes": gib, "speedup_eager": times}


class Cell(NamedTuple):
    """A figure of a setting in both sweeps, as the page shows it."""

    before: str
    after: str
    change: str
    between: str
    """The change's 95 % interval."""
    verdict: str
    """better, worse or same."""
    mark: tuple[float, float, float] | None
    """The change and its interval's ends on the bar, 0 to 100 with 50 for none; None where it has none."""


class Row(NamedTuple):
    """A setting."""

    label: str
    key: str
    status: str
    """What it was in A and in B; empty if usable in both."""
    cells: list[Cell | None]
    news: Sequence[News]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, 1 if a rule is broken, or 2 for what it cannot work with."""
    return run(lambda: _command(arguments))


def write_comparison(
    path: Path, comparison: Comparison, sweeps: tuple[SweepInfo, SweepInfo], names: tuple[str, str], *,
    rules: Sequence[Rule] = (), findings: Sequence[Finding] = (),
) -> Path:  # fmt: skip
    """Writes the comparison as a page that needs no network and no script, whole or not at all.

    Raises:
        SweepFolderError: it cannot be written there.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    shown = [name for name in FIGURES if any(name in pair.changes for pair in comparison.pairs)]
    page = environment.get_template("compare.html").render(
        title=sweeps[1].what or "sweep",
        names=names,
        sweeps=sweeps,
        said=sentences(comparison),
        rules=rules,
        broken=[finding for finding in findings if finding.fails],
        noise_only=[finding for finding in findings if not finding.fails],
        titles=[_TITLES[name] for name in shown],
        rows=[_row(pair, shown) for pair in comparison.pairs],
        comparison=comparison,
        csp=_POLICY,
        css=Markup((files("analysis") / "templates" / "compare.css").read_text(encoding="utf-8")),
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); name another file with --output") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def sentences(comparison: Comparison) -> list[str]:
    """What changed, in words."""
    said = []
    for name, goal in FIGURES.items():
        if (mean := mean_change(comparison.pairs, name)) is None:
            continue
        usable = [pair for pair in comparison.pairs if name in pair.changes and not _status(pair)]
        better, worse = (_count(usable, name, goal, way) for way in ("better", "worse"))
        settings = "the one setting" if len(usable) == 1 else f"the {len(usable)} settings"
        said.append(
            f"{_TITLES[name]}: {signed_percent(mean)}, the geometric mean of {settings} usable in both; "
            f"beyond noise {better} better, {worse} worse."
        )
    kinds = Counter(news.kind for pair in comparison.pairs for news in pair.news)
    told = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    said.append(f"Settings with other changes: {told}." if told else "Nothing beside figures changed.")
    return said


def _command(arguments: Sequence[str] | None) -> int:
    options = Parser(prog="python -m analysis.compare", description="Compares two sweeps of the same workload.")
    options.add_argument("before", metavar="A", type=Path, help="the folder of the sweep to compare with")
    options.add_argument("after", metavar="B", type=Path, help="the folder of the sweep that is judged")
    options.add_argument(
        "--fail-on", action="append", default=[], metavar="RULE",
        help="exit with 1 where a setting breaks it: 'compile_s>+15%%', 'samples_per_s<-3%%', 'graph_breaks>0', "
        f"'peak_memory_bytes>40GiB', or one of {', '.join(NEWS_KINDS)}; may be repeated",
    )  # fmt: skip
    options.add_argument("--output", metavar="FILE", type=Path, default=None, help=f"the page (B/{COMPARISON_FILE})")
    told = options.parse_args(arguments)
    rules = [Rule.parse(words) for words in told.fail_on]
    folders = (told.before, told.after)
    before, after = (load(folder) for folder in folders)
    attempts = pd.concat([load(folder, all_attempts=True) for folder in folders], ignore_index=True)
    sweeps = (load_sweep(told.before), load_sweep(told.after))
    comparison = compare(before, after, sweeps=sweeps, attempts=attempts)
    findings = check(comparison, rules)
    path = told.output or told.after / COMPARISON_FILE
    names = (str(told.before), str(told.after))
    write_comparison(path, comparison, sweeps, names, rules=rules, findings=findings)
    if told.output is None:
        renew_report(told.after)
    print(*_lines(comparison), sep="\n")
    print(path)
    for finding in findings:
        print(f"{'FAILS' if finding.fails else 'passes'} {finding.rule}: “{finding.label}”: {finding.sentence}")
    return GATE_FAILED if any(finding.fails for finding in findings) else 0


def _lines(comparison: Comparison) -> Iterator[str]:
    """The comparison as text."""
    for name, before, after in comparison.circumstances:
        yield f"{name}: {before} → {after}"
    yield from sentences(comparison)
    for pair in comparison.pairs:
        status = _status(pair)
        yield f"“{pair.label}”{', ' if status else ''}{status}"
        for name, found in pair.changes.items():
            cell = _cell(name, found)
            between = f" (95 %: {cell.between})" if cell.between else ""
            beyond = f", {cell.verdict}" if cell.verdict != "same" else ""
            yield f"  {_TITLES[name]}: {cell.before} → {cell.after}, {cell.change}{between}{beyond}"
        yield from (f"  {news.kind}: {news.sentence}" for news in pair.news)
    for labels, where in ((comparison.only_before, "A"), (comparison.only_after, "B")):
        if labels:
            yield f"Only in {where}: {', '.join(f'“{label}”' for label in labels)}"


def _row(pair: Pair, shown: Sequence[str]) -> Row:
    cells = [_cell(name, pair.changes[name]) if name in pair.changes else None for name in shown]
    return Row(pair.label, str(pair.after["settings_key"]), _status(pair), cells, pair.news)


def _status(pair: Pair) -> str:
    words = [str(row["status"]) + (f" ({label})" if (label := text(row["label"])) else "") for row in (pair.before, pair.after)]
    if words == [str(Status.OK)] * 2:
        return ""
    return f"{words[0]} in both" if words[0] == words[1] else f"{words[0]} in A, {words[1]} in B"


def _cell(name: str, found: Change) -> Cell:
    write = _WRITERS.get(name, figure)
    is_exact = found.low is None or found.low == found.high
    between = "" if is_exact else f"{signed_percent(found.low)} to {signed_percent(found.high)}"
    change = MISSING if found.share is None else signed_percent(found.share) if found.share else "unchanged"
    return Cell(write(found.before), write(found.after), change, between, _verdict(FIGURES[name], found), _mark(found))


def _verdict(goal: Goal, found: Change) -> str:
    if not found.is_significant:
        return "same"
    return "better" if (found.after > found.before) == (goal is Goal.MAX) else "worse"


_BAR_SHARE = 0.25
"""The change at which a bar ends; a longer one is cut off there."""


def _mark(found: Change) -> tuple[float, float, float] | None:
    if found.share is None or found.low is None or found.high is None or found.low == found.high:
        return None
    at, low, high = (50 + 50 * max(-1.0, min(1.0, share / _BAR_SHARE)) for share in (found.share, found.low, found.high))
    return at, low, high


def _count(pairs: Sequence[Pair], name: str, goal: Goal, way: str) -> int:
    return sum(_verdict(goal, pair.changes[name]) == way for pair in pairs if name in pair.changes)


if __name__ == "__main__":
    sys.exit(main())
