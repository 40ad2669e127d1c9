"""Untrusted text is shown, not interpreted: on the terminal, in tables and Markdown, in spreadsheets and in the report."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis import compare, export, recommend, table
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord
from orchestrator.view.live import outcome_of

TITLE, RED, CLEARED = "\x1b]0;owned\x07", "\x1b[31m", "\x1b[2J"
HOSTILE = f"{TITLE}{RED}red{CLEARED}\x00 \u202eevil\u2066 \u2028line \x9b31m \ufeff [red]"
FORMULA = "=cmd|' /C calc'!A0"
SOURCE = "from __future__ import annotations\n\nx = 1\n"
OBEYED = set("\x00\x07\x1b\x9b\u202e\u2066\u2028\ufeff")


def hostile_trials() -> list[TrialRecord]:
    return [
        trial("scope=eager", 500, 0.1, workload=FORMULA, device=HOSTILE, size=HOSTILE, source=SOURCE),
        trial("scope=full", 900, 50, workload=FORMULA, device=HOSTILE, size=HOSTILE, source=SOURCE,
              graph_break_reasons=[HOSTILE], perf_hints=[FORMULA]),
        trial("scope=regional", status=Status.FAILED, label=f"{TITLE}{RED}red", reason=HOSTILE, phase=HOSTILE, workload=FORMULA),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_hostile_record_is_only_shown(make_sweep: MakeSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep(hostile_trials(), environment={"gpu": HOSTILE, "torch": FORMULA})
    for main, words in (
        (table.main, [str(folder)]),
        (table.main, [str(folder), "--markdown"]),
        (recommend.main, [str(folder), "--steps", "100k"]),
        (recommend.main, [str(folder), "--steps", "100k", "--markdown"]),
        (compare.main, [str(folder), str(folder)]),
        (compare.main, [str(folder), str(folder), "--markdown"]),
        (export.main, [str(folder), "--no-rerun", "--steps", "100k", "--output", str(tmp_path / "out")]),
    ):
        main(words)
        printed = capsys.readouterr()
        assert not OBEYED.intersection(printed.out + printed.err), words
    page = analysis.write_report(folder).read_text()
    assert not OBEYED.intersection(page)
    compile((tmp_path / "out" / "best.py").read_text(), "best.py", "exec")
    text = (tmp_path / "out" / "trials.csv").read_text()
    assert not OBEYED.intersection(text)
    rows = list(csv.DictReader(text.splitlines()))
    assert {row["workload"] for row in rows} == {f"'{FORMULA}"}
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "@", "+"))]


def test_lines_about_trials_spell_out_what_a_record_holds() -> None:
    for record in hostile_trials():
        assert not OBEYED.intersection(outcome_of(record, "A1"))
