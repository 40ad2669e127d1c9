"""`python -m analysis.compare A B`: the settings that two sweeps share, side by side, as text and as `compare.html`.

With `--fail-on RULE` it is a gate: exit code 1, and a reason for each setting that breaks a rule (`rules.py`).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import tyro
from markupsafe import Markup

from analysis.choose.break_even import USUAL_STEPS, Job
from analysis.choose.decision import Outcome
from analysis.choose.uncertainty import Attempts
from analysis.command_line import say
from analysis.comparison.change_text import TITLES, Cell, cell_of, comparison_markdown, opening, sentences, status_of
from analysis.comparison.changes import FIGURES, Comparison, Pair, compare, refuse_other_work
from analysis.comparison.rules import Finding, Rule, check
from analysis.formatting import cell, whole
from analysis.load import SweepInfo, load_for_analysis, load_sweep
from analysis.page.page import COMPARISON_FILE, asset, template
from analysis.recommend import recommend
from analysis.report import renew_report
from compile_sweep import command_line
from compile_sweep.command_line import Flag, Repeated
from compile_sweep.schema.errors import ConfigError, SweepFolderError
from compile_sweep.schema.journal import written_whole

PROG = "python -m analysis.compare"
GATE_FAILED = 1

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""The page runs no scripts and loads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Compare two sweeps of the same workload."""

    before: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """The folder of the sweep to compare with."""
    after: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """The folder of the sweep to judge."""
    fail_on: Annotated[tuple[str, ...], Repeated, tyro.conf.arg(metavar="RULE")] = ()
    """Exit with 1 if a setting breaks this rule: compile_s>+15%, samples_per_s<-3%, graph_breaks>0, peak_memory_bytes>40GiB, or
    one of failures, breaks, recompiles, fallbacks, cudagraph-skips, numerics; may be repeated."""
    repeat: Annotated[tuple[Path, ...], Repeated, tyro.conf.arg(metavar="FOLDER")] = ()
    """Another sweep of the same code as A: how it differs from A is noise between runs; may be repeated."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write the page; by default B/compare.html."""
    markdown: Flag = False
    """Print a Markdown table instead."""


def write_comparison(
    path: Path, comparison: Comparison, sweeps: tuple[SweepInfo, SweepInfo], names: tuple[str, str], *,
    rules: Sequence[Rule] = (), findings: Sequence[Finding] = (), lead: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Atomically writes the comparison as a page without scripts or links; raises SweepFolderError if it cannot."""
    shown = [name for name in FIGURES if any(name in pair.changes for pair in comparison.pairs)]
    page = template("compare.html").render(
        title=sweeps[1].what or "sweep",
        names=names,
        sweeps=sweeps,
        lead=lead,
        said=sentences(comparison),
        rules=rules,
        broken=[finding for finding in findings if finding.fails],
        noise_only=[finding for finding in findings if not finding.fails],
        titles=[TITLES[name] for name in shown],
        rows=[(pair, status_of(pair), _cells(pair, shown)) for pair in comparison.pairs],
        comparison=comparison,
        csp=_POLICY,
        css=Markup(asset("compare.css")),
    )
    try:
        if path.is_dir():
            raise SweepFolderError(f"{path} is a folder; name a file with --output")
        with written_whole(path) as unfinished:
            unfinished.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); name another file with --output") from None
    return path


def _command(options: Options) -> int:
    rules = [Rule.parse(words) for words in options.fail_on]
    (before, attempts_before), (after, attempts_after) = load_for_analysis(options.before), load_for_analysis(options.after)
    sweeps = (load_sweep(options.before), load_sweep(options.after))
    repeats = options.repeat
    named = [options.before, options.after, *repeats]
    for at, folder in enumerate(repeats, start=2):
        if folder.resolve() in [other.resolve() for other in named[:at]]:
            raise ConfigError(f"--repeat {folder} is named twice; give a sweep that ran apart from the others")
        refuse_other_work(load_sweep(options.before), load_sweep(folder))
    repeated = [load_for_analysis(folder)[1] for folder in repeats]
    attempts = (pd.concat([attempts_before, *repeated], ignore_index=True), attempts_after)
    comparison = compare(before, after, sweeps=sweeps, attempts=attempts)
    findings = check(comparison, rules)
    path = options.output or options.after / COMPARISON_FILE
    names = (str(options.before), str(options.after))
    lead = opening(comparison, _on_the_recommendation((before, after), attempts))
    write_comparison(path, comparison, sweeps, names, rules=rules, findings=findings, lead=lead)
    if options.output is None:
        renew_report(options.after)
    if options.markdown:
        print(f"{cell(' '.join(lead))}\n\n{comparison_markdown(comparison)}", end="")
    else:
        say(*lead, *_lines(comparison), str(path))
    for finding in findings:
        say(f"{'FAILS' if finding.fails else 'passes'} {finding.rule}: “{finding.label}”: {finding.sentence}")
    return GATE_FAILED if any(finding.fails for finding in findings) else 0


def _on_the_recommendation(trials: tuple[pd.DataFrame, pd.DataFrame], attempts: tuple[pd.DataFrame, pd.DataFrame]) -> str:
    """Says whether another setting is recommended since the change, for a job of usual length, with the same noise for both."""
    before, after = (_recommended(sweep, attempts) for sweep in trials)
    answer = f"is unchanged: {after}" if before == after else f"changed from “{before}” to “{after}”"
    return f"For a job of {whole(USUAL_STEPS)} steps, the recommendation {answer}."


def _recommended(trials: pd.DataFrame, attempts: Attempts) -> str:
    """Returns the recommendation in a few words, without ids of settings, which differ between sweeps."""
    try:
        found = recommend(trials, Job(steps=USUAL_STEPS), attempts=attempts)
    except ConfigError:
        return "cannot tell"
    label = str(found.trial["settings_label"])
    return {Outcome.USE: f"use {label}", Outcome.STAY: f"stay with {label}", Outcome.UNCLEAR: "cannot tell"}[
        found.decision.outcome
    ]


def _lines(comparison: Comparison) -> Iterator[str]:
    yield from sentences(comparison)
    for pair in comparison.pairs:
        status = status_of(pair)
        yield f"“{pair.label}”{', ' if status else ''}{status}"
        for name in pair.changes:
            cell = cell_of(name, pair)
            between = f" (95%: {cell.between})" if cell.between else ""
            beyond = f", {cell.verdict}" if cell.verdict != "same" else ""
            yield f"  {TITLES[name]}: {cell.before} → {cell.after}, {cell.change}{between}{beyond}"
        yield from (f"  {news.kind}: {news.sentence}" for news in pair.news)
    for labels, where in ((comparison.only_before, "A"), (comparison.only_after, "B")):
        if labels:
            yield f"Only in {where}: {', '.join(f'“{label}”' for label in labels)}"


def _cells(pair: Pair, shown: Sequence[str]) -> list[Cell | None]:
    return [cell_of(name, pair) if name in pair.changes else None for name in shown]


main = command_line.main_of(Options, _command, PROG)

if __name__ == "__main__":
    sys.exit(main())
