"""The table for GitHub: the text of its cells, and that nothing in a record breaks it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sweep_folders import MakeSweep, trial

import analysis
from analysis import picture, report, table
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import Caches, TrialRecord


def rows_of(markdown: str) -> list[dict[str, str]]:
    """Returns the table's rows by heading; fails if a row's number of cells differs from that of the headings."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def markdown_of(make_sweep: MakeSweep, records: list[TrialRecord] | None = None) -> str:
    return analysis.markdown_table(analysis.load(make_sweep(records)))


def test_every_trial_has_a_row_the_fastest_usable_first_the_others_last(make_sweep: MakeSweep) -> None:
    rows = rows_of(markdown_of(make_sweep))
    assert [row["samples/s"].split(" ")[0] for row in rows] == ["1,046", "902", "766", "730", "696", "586", "947", "—", "—"]
    assert rows[0]["status"] == "ok, on the front"
    assert [row["status"] for row in rows[6:]] == ["infeasible: nan", "infeasible: compile-deadline", "failed: worker-died"]


def test_a_row_has_intervals_phases_memory_and_numerics(make_sweep: MakeSweep) -> None:
    (row,) = rows_of(markdown_of(make_sweep, [trial("scope=full", 900, 50)]))
    assert row == {
        "id": "A1",
        "setting": "full, default, static",
        "samples/s": "900 (891–909)",
        "vs eager interleaved": "1.50× (1.49–1.51)",
        "compile s": "50.0",
        "Dynamo s": "4.0",
        "AOTAutograd s": "11.0",
        "Inductor s": "17.0",
        "kernel compilation s": "12.0",
        "CUDA-graph capture s": "1.0",
        "other s": "5.0",
        "peak GiB": "18.0",
        "numerics": "ok, 30% of tolerance",
        "status": "ok, on the front",
    }


def test_a_figure_to_be_doubted_says_so(make_sweep: MakeSweep) -> None:
    records = [
        trial(
            "scope=full",
            900,
            50,
            outliers=2,
            contended=True,
            clock_drift=0.031,
            step_ms_ci95=(70.0, 72.2),
            pipeline="real",
            data_wait_share=0.02,
        )
    ]
    (row,) = rows_of(markdown_of(make_sweep, records))
    assert row["status"] == "ok, on the front, 2 outliers, contended, drift 3.1%, real pipeline, 2.0% waiting"


def test_an_interval_that_nothing_bounds_upwards_says_from_where_on(make_sweep: MakeSweep) -> None:
    (row,) = rows_of(markdown_of(make_sweep, [trial("scope=full", 577, 9, samples_per_s_ci95=(204.6, math.inf))]))
    assert row["samples/s"] == "577 (205 or more)"


def test_warm_compile_times_have_a_column_of_their_own_and_an_estimate_of_the_cold_ones(make_sweep: MakeSweep) -> None:
    again = trial("scope=full", 890, 6, caches=Caches.WARM, cold_equivalent_s=50.4)
    cold, warm = rows_of(markdown_of(make_sweep, [trial("scope=full", 900, 50), again]))
    assert (cold["compile s"], cold["warm compile s"]) == ("50.0", "—")
    assert (warm["compile s"], warm["warm compile s"]) == ("≈ 50.4", "6.0")


def test_a_sweep_without_records_is_a_heading(make_sweep: MakeSweep) -> None:
    assert rows_of(markdown_of(make_sweep, [])) == []


def test_text_of_a_record_ends_no_cell_and_begins_no_mark_up(make_sweep: MakeSweep) -> None:
    hostile = "a | b\n<img src=x> `c` [d](e) *f* \\"
    markdown = markdown_of(make_sweep, [trial("scope=full", 900, 50, status=Status.INFEASIBLE, label=hostile)])
    (row,) = markdown.splitlines()[2:]
    assert row.endswith(r"infeasible: a \| b \<img src=x> \`c\` \[d](e) \*f\* \\ |")


@pytest.mark.slow
def test_the_command_prints_the_table_and_nothing_else(make_sweep: MakeSweep, repository: Path) -> None:
    folder = make_sweep()
    command = [sys.executable, "-W", "error", "-m", "analysis.table", str(folder)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == analysis.markdown_table(analysis.load(folder))
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("main", "words", "complaint"),
    [
        (table.main, [], "DIR is missing; see python -m analysis.table --help"),
        (table.main, ["DIR", "--colour"], "no option or argument '--colour'"),
        (report.main, [], "DIR is missing; see python -m analysis.report --help"),
        (report.main, ["DIR", "--port", "http"], "--port cannot be 'http'"),
        (report.main, ["DIR", "--port", "5"], "--port is where --watch serves the report; give both, or neither"),
        (picture.main, ["DIR"], "OUT is missing; see python -m analysis.picture --help"),
        (picture.main, ["DIR", "OUT", "--scale", "2"], "no option or argument '--scale'"),
    ],
)
def test_words_that_do_not_fit_are_one_sentence(
    main: Callable[[Sequence[str]], int], words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert said.count("\n") == 1


def test_the_command_refuses_bad_input_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "holds no trials.jsonl" in captured.err
