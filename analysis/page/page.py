"""The report as one HTML page that does not need a network.

Text from records is never markup: jinja2 escapes it in HTML, figures escape it against plotly's own markup, and the rest travels
as compressed JSON, which the page's script writes as text. The page's content security policy runs only its own scripts.

The report links `best.py` and `compare.html` if they are next to it; otherwise it says how to make them.
"""

import base64
import gzip
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from analysis.best_script import BEST_FILE
from analysis.choose.break_even import USUAL_STEPS, Job
from analysis.choose.decision import NEGLIGIBLE
from analysis.choose.pareto import Summary, summary
from analysis.choose.uncertainty import uncertain_front
from analysis.columns import COMPILE_PHASES
from analysis.decision_text import MEMORY_MORE, SENTENCES, STARTS, TILES
from analysis.figures import BreakEvenInfo, break_even_data, break_even_figure, break_even_info, plotly_script
from analysis.formatting import MISSING, duration, gib, instant, text
from analysis.load import SweepInfo, load_for_analysis, load_sweep
from analysis.page.charts import Chart, as_json, fronts, page_charts
from analysis.page.slowness import reasons
from analysis.page.table import static_table, table, table_data, unusable
from analysis.page.trial_folds import trial_folds
from analysis.page.verdict import cautions, front_list, none_usable
from analysis.recommend import Recommendation, lengths_of, recommend, tiles, verdict
from analysis.training_command import SweptScript, swept_script
from compile_sweep.schema import record
from compile_sweep.schema.errors import ConfigError
from compile_sweep.schema.journal import read_regular
from compile_sweep.schema.record import SWEEP_FILE

RERUN_FILE, COMPARISON_FILE = "best.json", "compare.html"

LINKED = {BEST_FILE: "text/plain", RERUN_FILE: "application/json", COMPARISON_FILE: "text/html"}
"""Files of a sweep's folder that its page may link, and their descriptions."""


class Best(NamedTuple):
    """What `best.json` says about `best.py`. Text is unescaped, as in the file."""

    settings_label: str
    sentence: str  # result of running the program again
    is_offered: bool


class Next(NamedTuple):
    """Files next to the report."""

    best: Best | None  # None if `best.py` was not exported yet
    has_comparison: bool


def what_next(folder: Path) -> Next:
    """Returns what the folder holds besides its records; an unreadable file counts as missing."""
    return Next(best=_best(folder), has_comparison=(folder / COMPARISON_FILE).is_file())


def _best(folder: Path) -> Best | None:
    try:
        told = json.loads(read_regular(folder / RERUN_FILE))
        return Best(
            settings_label=text(told["settings_label"]) or "",
            sentence=text(told["sentence"]) or "",
            is_offered=(folder / BEST_FILE).is_file(),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


_MOST_RANKS = 5  # as many as the page's script shows, break_even.js

_SCRIPTS = ("chart_fits.js", "charts.js", "trials.js", "decision.js", "break_even.js", "page.js")


_NOSCRIPT_CSS = (
    ".of-chart, nav > ul > li:not(:has(li:not(.of-chart))), #theme, #job, .choices, .controls, .chart, .copy-command, "
    "section:has(> .wide > .chart), .chart + .note, #why:not(:has(+ #slow)), #table > .note { display: none; } "
    "@media print { details::details-content { content-visibility: visible; } }"
)
"""Hides what needs a script: without one, charts are empty and controls do nothing. Unfolds on paper what the script unfolds."""


def report_page(folder: Path, *, version: str = "") -> str:
    """Renders a folder's report; with a server's `version` of the folder, as a page that checks for a newer one."""
    df, attempts = load_for_analysis(folder)
    sweep = load_sweep(folder)
    found = summary(df)
    over = fronts(df, attempts)
    charts = page_charts(df, attempts, record.read_warm_starts(folder), sweep)
    headings, rows = table(df, usable_only=False)
    uncertain = uncertain_front(df, attempts=attempts).trials
    apart, folds = unusable(folder, df), trial_folds(folder, df)
    jobs = break_even_info(df, attempts)
    script = None
    with suppress(ConfigError):  # the rest of the page does not need it
        script = swept_script(sweep.config)
    data = {
        "figures": over.figures
        | {chart.name: chart.figure for chart in charts}
        | {"break-even": as_json(break_even_figure(jobs))},
        "break_even": _job_data(jobs) if jobs.settings else None,
        "table": table_data(headings, rows, *_command(sweep, script)),
    }
    why, details = ([chart for chart in charts if chart.is_detail is wanted] for wanted in (False, True))
    recommended, slow = _recommended(df, attempts), reasons(df)
    static_headings, static_rows = static_table(headings, rows)
    plotly, own_script, theme = plotly_script(), _script(), asset("theme.js")
    return template("report.html").render(
        version=version,
        title=sweep.what or "sweep",
        where=_where(sweep),
        said=[_unknown(df, found)] if recommended is None else verdict(recommended),
        jobs=jobs,
        has_warm=bool(jobs.settings) and break_even_data(jobs)["has_warm"],
        num_workers=max((setting.num_workers for setting in jobs.settings), default=1),
        tiles=[] if recommended is None else tiles(recommended),
        cautions=cautions(df, sweep),
        counts={str(status): count for status, count in found.counts.items()},
        fronts=over,
        front=front_list(df, found, uncertain),
        next=what_next(folder),
        training_command=None if script is None or recommended is None else script.command(recommended.trial, "DIR"),
        training_setting="" if recommended is None else str(recommended.trial["setting_name"]),
        usual_steps=USUAL_STEPS,
        ranking=_ranking(jobs),
        reigns=[(lengths_of(reign), str(reign.trial["setting_name"])) for reign in jobs.reigns],
        chart_names={chart.name for chart in charts},
        why_charts=why,
        detail_charts=details,
        rows=rows,
        unusable=apart,
        folds=folds,
        num_without_fold=len(df) - len(folds),
        contents=_contents(why, details, has_jobs=bool(jobs.settings), has_slow=bool(slow)),
        slow=slow,
        static_headings=static_headings,
        static_rows=static_rows,
        all_phases=COMPILE_PHASES.values(),
        environment=_facts(sweep.environment),
        config=_facts(sweep.config),
        started_at=instant(sweep.started_at) or MISSING,
        environment_key=sweep.environment_key or MISSING,
        csp=_policy(theme, plotly, own_script, live=bool(version)),
        css=Markup(asset("report.css")),
        noscript_css=Markup(_NOSCRIPT_CSS),
        theme=Markup(theme),
        script=Markup(own_script),
        plotly=_packed_plotly(),
        data=packed(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))),
    )


class Rank(NamedTuple):
    """One of the fastest settings for a job of usual length."""

    label: str
    total_s: float
    total: str
    starts: str


def _ranking(jobs: BreakEvenInfo) -> list[Rank]:
    """Returns the fastest settings for a job of usual length that starts once, cold; the page's script does it for any job."""
    ranks = [(one.cold_s + USUAL_STEPS * one.step_s, one) for one in jobs.settings]
    fastest = sorted(ranks, key=lambda rank: rank[0])[:_MOST_RANKS]
    return [Rank(one.label, total_s, duration(total_s), duration(one.cold_s)) for total_s, one in fastest]


def _job_data(jobs: BreakEvenInfo) -> dict[str, Any]:
    """Returns the data by which the page's script decides for any job, and the sentences for it."""
    text = {
        "sentences": SENTENCES,
        "tiles": list(TILES.items()),
        "memory_more": MEMORY_MORE,
        "starts": {str(one): words for one, words in STARTS.items()},
    }
    return break_even_data(jobs) | {"text": text, "negligible": NEGLIGIBLE}


def packed(words: str) -> str:
    """Compresses text to characters that are not markup."""
    return base64.b64encode(gzip.compress(words.encode("utf-8", "replace"), 9, mtime=0)).decode("ascii")


def _unknown(df: pd.DataFrame, found: Summary) -> str:
    if found.best is None:
        return none_usable(df, found)
    return "Cannot tell what a job would take: no usable trial has both a throughput and its step times."


def _recommended(df: pd.DataFrame, attempts: pd.DataFrame) -> Recommendation | None:
    """Returns the setting for a job of usual length; None if no trial says how long a job would take."""
    try:
        return recommend(df, Job(steps=USUAL_STEPS), attempts=attempts)
    except ConfigError:
        return None


class Part(NamedTuple):
    """A part of the page, for its table of contents."""

    name: str
    title: str
    sections: list[tuple[str, str]]  # ID of each section, and its name in the table of contents


def _contents(why: Sequence[Chart], details: Sequence[Chart], *, has_jobs: bool, has_slow: bool) -> list[Part]:
    jobs = [("break-even", "Break-even")] if has_jobs else []
    slow = [("slow", "Not faster")] if has_slow else []
    reasons = [*slow, *((chart.name, chart.short_title) for chart in why)]
    shown = [(chart.name, chart.short_title) for chart in details]
    about = [("trials-one-by-one", "Each trial"), ("failures", "Unusable"), ("where", "Environment"), ("meaning", "Method")]
    parts = [
        Part("decide", "Decide", [("verdict", "Verdict"), ("front", "Front"), *jobs]),
        Part("why", "Why", reasons),
        Part("details", "Details", [("table", "Table"), *shown, *about]),
    ]
    return [part for part in parts if part.sections]


def _where(sweep: SweepInfo) -> str:
    """Describes the machine in a few words, as far as `sweep.json` says."""
    gpu, torch = sweep.environment.get("gpu") or sweep.environment.get("cpu"), sweep.environment.get("torch")
    return " · ".join(filter(None, [str(gpu) if gpu else "", f"torch {torch}" if torch else ""])) or "machine not known"


def _command(sweep: SweepInfo, script: SweptScript | None) -> tuple[str, str]:
    """Returns the command that measures a setting as this sweep did, up to `--settings`, and what follows the setting."""
    words, arguments = ["python", "-m", "orchestrator.sweep"], ""
    options = [("--workload", "workload"), ("--size", "size")]
    if script is not None:
        words += ["--script", script.module or script.path]
        words += [] if script.batch_argument is None else [f"--batch-arg={script.batch_argument}"]
        options, arguments = [], f" {shlex.join(['--', *script.arguments])}" if script.arguments else ""
    for option, name in (*options, ("--device", "device")):
        if isinstance(value := sweep.config.get(name), str) and value:
            words += [option, value]
    return shlex.join(words), arguments


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns a mapping as text; lists and objects, which are shown elsewhere, as their length."""
    return [(str(name), _fact(str(name), value)) for name, value in values.items()]


def _fact(name: str, value: Any) -> str:
    if value is None:
        return MISSING
    if name.endswith("_bytes") and isinstance(value, int):
        return gib(value)
    if isinstance(value, list | dict):
        return f"{len(value)} in {SWEEP_FILE}" if value else "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _policy(*scripts: str, live: bool) -> str:
    """Returns a content security policy that allows these inline scripts and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    own = " connect-src 'self';" if live else ""
    return f"default-src 'none'; script-src {allowed};{own} style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


@cache
def template(name: str) -> jinja2.Template:
    """Returns one of the templates beside this module, which escape what they are given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis.page"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["instant"] = instant
    return environment.get_template(name)


def _script() -> str:
    parts = "\n".join(asset(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@cache
def _packed_plotly() -> str:
    return packed(plotly_script())


def asset(name: str) -> str:
    """Returns the text of a style sheet or a script beside the templates."""
    return (files("analysis.page") / "templates" / name).read_text(encoding="utf-8")
