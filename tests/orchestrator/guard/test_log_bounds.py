"""Logs of trials stay bounded: by holes while a trial runs, and by shortening when it has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.guard import log_bounds
from orchestrator.guard.log_bounds import bound_logs, free_middle

LINES = 3000


@pytest.fixture(autouse=True)
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bounds, "HEAD_BYTES", 2**16)
    monkeypatch.setattr(log_bounds, "TAIL_BYTES", 2**16)


def long_log(folder: Path, name: str = "worker-0.log") -> Path:
    """A log of 3 MB with numbered lines of 1,000 bytes."""
    path = folder / name
    path.write_text("".join(f"{number:>999}\n" for number in range(LINES)), encoding="ascii")
    return path


def test_a_long_log_keeps_its_beginning_and_its_end_in_whole_lines(tmp_path: Path) -> None:
    path = long_log(tmp_path)
    (sentence,) = bound_logs(tmp_path)
    first, *middle, last = path.read_text().splitlines()
    assert (first.strip(), last.strip()) == ("0", str(LINES - 1))
    assert path.stat().st_size < 2 * 2**16 + 200
    (note,) = (line for line in middle if line.startswith("["))
    assert note[1:-1] in sentence
    assert sentence.startswith("log worker-0.log: 2.9 MB of the middle")
    assert all(line.strip().isdigit() for line in middle if line and line != note)
    assert bound_logs(tmp_path) == []


def test_a_short_log_and_what_is_no_log_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("one line\n")
    outside = long_log(tmp_path, "outside.txt")
    (tmp_path / "worker-1.log").symlink_to(outside)
    os.mkfifo(tmp_path / "worker-2.log")
    assert bound_logs(tmp_path) == []
    assert outside.stat().st_size == 1000 * LINES
    assert bound_logs(tmp_path / "missing") == []


def test_one_endless_line_is_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"x" * 10**6)
    assert len(bound_logs(tmp_path)) == 1
    assert (tmp_path / "worker-0.log").stat().st_size < 2 * 2**16 + 200


def test_the_middle_of_a_log_that_is_being_written_takes_no_room(tmp_path: Path) -> None:
    path = long_log(tmp_path)
    with path.open("ab", buffering=0) as log:
        free_middle(log.fileno())
        if path.stat().st_blocks * 512 > 10**6:
            pytest.skip("this file system has no holes")
        log.write(b"the end\n")
    assert path.stat().st_size == 1000 * LINES + len(b"the end\n")
    assert len(bound_logs(tmp_path)) == 1
    kept = path.read_text().splitlines()
    assert (kept[0].strip(), kept[-1]) == ("0", "the end")


def test_what_is_no_file_is_left_alone() -> None:
    reading, writing = os.pipe()
    free_middle(writing)
    os.write(writing, b"x")
    assert os.read(reading, 9) == b"x"
    os.close(reading)
    os.close(writing)
