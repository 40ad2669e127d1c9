"""The table of faults: rewritten in place; rows that were not reported again are kept."""

from __future__ import annotations

from pathlib import Path

from arena import HERE
from fault_table import BEGIN, END, FaultTable, Row, described


def row(name: str, recovery_s: float | None) -> Row:
    return Row(name=name, how="so", outcome="measured", tries=1, recovery_s=recovery_s)


def table(path: Path, *rows: Row) -> list[str]:
    """Returns the file's rows after these were reported."""
    told = FaultTable()
    for one in rows:
        told.tell(one)
    told.write(path)
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("CPU cores with") == 1
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def test_rows_are_written_between_the_marks_and_kept_until_told_anew(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\n\n{END}\nafter\n")
    assert table(path, row("a", 1.234), row("b", None)) == ["| a | so | measured | 1 | 1.2 |", "| b | so | measured | 1 | – |"]
    assert table(path, row("b", 7.0)) == ["| a | so | measured | 1 | 1.2 |", "| b | so | measured | 1 | 7.0 |"]
    assert table(path) == ["| a | so | measured | 1 | 1.2 |", "| b | so | measured | 1 | 7.0 |"]


def test_an_outcome_is_told_by_the_record() -> None:
    assert described({"label": None, "status": "ok", "tries": 1, "phase": "done"}) == "measured"
    assert described({"label": None, "status": "ok", "tries": 2, "phase": "done"}) == "measured at the next try"
    died = {"label": "crashed", "status": "failed", "tries": 1, "phase": "steady"}
    assert described(died) == "`crashed` (failed), last phase steady"


def test_the_page_has_the_marks() -> None:
    text = (HERE.parents[1] / "docs" / "reliability.md").read_text()
    assert text.index(BEGIN) < text.index(END)
