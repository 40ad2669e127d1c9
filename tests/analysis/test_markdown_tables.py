"""Tables in Markdown; also tests that the pages of docs/ show what their records say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sweep_folders import MakeSweep, trial

from analysis import compare, recommend


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in printed.splitlines() if line.startswith("|")]


def test_the_recommendation_is_a_row_a_length_and_a_line_a_flip(
    make_sweep: MakeSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_sweep(
        [trial("scope=eager", 500, 0.0), trial("scope=full", 600, 60), trial("scope=regional,dynamic=mark", 900, 100)]
    )
    assert recommend.main([str(folder), "--markdown", "--price-per-gpu-hour", "3600"]) == 0
    printed = capsys.readouterr().out
    headings, rule, *rows = rows_of(printed)
    assert len({len(row) for row in (headings, rule, *rows)}) == 1
    assert [row[:2] for row in rows] == [
        ["1,000", "stay"],
        *([steps, "use"] for steps in ("10,000", "100,000", "1,000,000")),
    ]
    assert [row[2] for row in rows[1:]] == ["A3 regional, mark"] * 3
    assert rows[0][2].startswith("nearest: ")
    assert rows[0][5].startswith("−")
    assert not rows[1][5].startswith("−")
    assert headings[-1] == "costs"
    flips = [line for line in printed.splitlines() if line.startswith(("- up to", "- from"))]
    assert len(flips) == 2
    assert flips[1].endswith(": “A3 regional, mark”")


def test_a_comparison_marks_what_is_beyond_noise_and_no_label_is_mark_up(
    make_sweep: MakeSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = make_sweep([trial("scope=full", 900, 50), trial("scope=regional", 600, 9, label="a|<b>*", status="failed")])
    after = after.rename(tmp_path / "after")
    before = make_sweep([trial("scope=full", 700, 50), trial("scope=regional", 600, 9)])
    assert compare.main([str(before), str(after), "--markdown", "--output", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "700 → 900: **+28.6%, better**" in printed
    assert "a\\|\\<b>\\*" in printed
    assert "<b>" not in printed.replace("\\<b>", "")
    assert str(tmp_path / "page.html") not in printed


@pytest.mark.slow
def test_the_tables_in_docs_are_what_the_committed_records_say(repository: Path) -> None:
    command = [sys.executable, str(repository / "docs" / "shown.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"make them again with `python docs/shown.py`: {done.stdout}{done.stderr}"


def test_every_screen_that_docs_name_is_there(repository: Path) -> None:
    page = (repository / "docs" / "report.md").read_text(encoding="utf-8")
    named = {word.rstrip(")") for part in page.split("](")[1:] if (word := part.split(")")[0]).endswith(".png")}
    assert named
    for name in named:
        assert (repository / "docs" / name).read_bytes().startswith(b"\x89PNG")
