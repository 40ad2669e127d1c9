"""What the arena calls left behind is nobody's."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from arena import _is_used


def test_a_semaphore_is_used_while_its_process_lives_whatever_name_it_was_mapped_under(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    named = vars(semaphore)["_semlock"].name.removeprefix("/")
    (segment,) = (path for path in set(Path("/dev/shm").iterdir()) - before if path.name == f"sem.{named}")
    assert _is_used(segment)
    (tmp_path / "left").write_text("")
    assert not _is_used(tmp_path / "left")
