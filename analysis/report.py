"""`python -m analysis.report DIR`: the sweep in DIR as one HTML file that needs no network.

What comes from a record is text wherever it stands: jinja2 escapes it in HTML and in the embedded JSON, the chart
escapes it against plotly's own mark-up, and the page's content security policy runs no script but the two it was
written with.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis.columns import COMPILE_PHASES
from analysis.figures import compile_phases_figure, compile_phases_info, pareto_figure, pareto_info
from analysis.formatting import MISSING, duration, figure, text, times
from analysis.load import SweepInfo, load, load_sweep
from analysis.pareto import Summary, pareto_front, speedup_over_eager, summary
from analysis.remarks import Remark, remarks
from analysis.report_table import table
from analysis.verdict import cautions, verdict
from orchestrator.errors import SweepFolderError
from orchestrator.records import SWEEP_FILE, Status
from workloads.errors import CompileSweepError

REPORT_FILE = "report.html"


class UnusableTrial(NamedTuple):
    """A trial that is not ok, as the report lists it."""

    settings_label: str
    settings_key: str
    reason: str
    phase: str
    attempt: int
    wall: str
    log: str | None
    """Relative link to its folder under logs/; None if there is none."""


def write_report(folder: str | Path) -> Path:
    """Writes the folder's `report.html`, whole or not at all, and returns its path.

    Raises:
        RecordsError: `sweep.json` or `trials.jsonl` is missing or not what this version writes.
        SweepFolderError: the report cannot be written there.
    """
    folder = Path(folder)
    page = _page(folder, load(folder), load_sweep(folder))
    path = folder / REPORT_FILE
    try:
        _write_whole(path, page)
    except OSError as error:
        raise SweepFolderError(f"{path} cannot be written ({error.strerror}); make the folder writable") from None
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0, or 2 for a folder that cannot be reported on."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description="Writes DIR/report.html.")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder a sweep wrote")
    folder = parser.parse_args(arguments).folder
    try:
        print(write_report(folder))
    except CompileSweepError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _page(folder: Path, df: pd.DataFrame, sweep: SweepInfo) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    found = summary(df)
    shown, phases = pareto_info(df), compile_phases_info(df)
    front = _front(df, found)
    headings, rows = table(df)
    script, plotly = _asset("report.js"), get_plotlyjs()
    return environment.get_template("report.html").render(
        title=sweep.what or "sweep",
        verdict=verdict(df, found),
        cautions=cautions(df, sweep),
        counts={str(status): count for status, count in found.counts.items()},
        figure=json.loads(pareto_figure(shown).to_json()),
        has_points=bool(shown.points),
        phases_figure=json.loads(compile_phases_figure(phases).to_json()),
        phases=phases,
        all_phases=COMPILE_PHASES.values(),
        front=front,
        headings=headings,
        rows=rows,
        unusable=_unusable(folder, df),
        environment=_facts(sweep.environment),
        config=_facts(sweep.config),
        started_at=sweep.started_at or MISSING,
        environment_key=sweep.environment_key or MISSING,
        csp=_policy(script, plotly),
        css=Markup(_asset("report.css")),
        script=Markup(script),
        plotly=Markup(plotly),
    )


class FrontEntry(NamedTuple):
    """One point of the front, as the list under the chart gives it."""

    settings_label: str
    figures: list[str]
    remarks: list[Remark]
    is_knee: bool


def _front(df: pd.DataFrame, found: Summary) -> list[FrontEntry]:
    knee = None if found.knee is None else found.knee.trial.name
    rows = pareto_front(speedup_over_eager(df))
    return [
        FrontEntry(
            settings_label=str(row["settings_label"]),
            figures=_main_figures(row),
            remarks=remarks(row),
            is_knee=index == knee,
        )
        for index, row in rows.iterrows()
    ]


def _main_figures(trial: pd.Series) -> list[str]:
    interleaved = [] if text(trial["speedup_eager"]) is None else [f"{times(trial['speedup_eager'])} eager interleaved"]
    best = f"{times(trial['speedup_best_eager'])} best eager"
    return [figure(trial["samples_per_s"], "samples/s"), f"{figure(trial['compile_s'], 's')} compile", *interleaved, best]


def _unusable(folder: Path, df: pd.DataFrame) -> list[tuple[str, str, list[UnusableTrial]]]:
    """Trials that are not ok as (status, label, trials), the infeasible first, the larger groups first."""
    groups: dict[tuple[str, str], list[UnusableTrial]] = {}
    for _, row in df[df["status"] != Status.OK].iterrows():
        key = (str(row["status"]), text(row["label"]) or "no label")
        groups.setdefault(key, []).append(
            UnusableTrial(
                settings_label=str(row["settings_label"]),
                settings_key=str(row["settings_key"]),
                reason=text(row["reason"]) or "no reason is recorded",
                phase=text(row["phase"]) or "unknown",
                attempt=int(row["attempt"]),
                wall=duration(row["wall_s"]),
                log=_log(folder, str(row["trial_id"])),
            )
        )
    ordered = sorted(groups.items(), key=lambda group: (group[0][0] != Status.INFEASIBLE, -len(group[1]), group[0][1]))
    return [(status, label, trials) for (status, label), trials in ordered]


def _log(folder: Path, trial_id: str) -> str | None:
    """A link to the trial's log folder, if it is really a folder directly under logs/."""
    if not trial_id or Path(trial_id).name != trial_id or "\0" in trial_id or not (folder / "logs" / trial_id).is_dir():
        return None
    return f"logs/{quote(trial_id, safe='')}/"


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A mapping as text; of lists and objects, which the page shows elsewhere, how many there are."""
    return [(str(name), _fact(value)) for name, value in values.items()]


def _fact(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, list | dict):
        return f"{len(value)} in {SWEEP_FILE}" if value else "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _policy(*scripts: str) -> str:
    """A content security policy under which these inline scripts run, and nothing else is run or loaded."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _asset(name: str) -> str:
    return (files("analysis") / "templates" / name).read_text(encoding="utf-8")


def _write_whole(path: Path, page: str) -> None:
    """Publishes under the final name only what is complete; readers see the old report or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
