"""Faults of the machines: processes killed around a sweep's trials, its driver killed, its disk full, its store down."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from arena import Arena, Arenas, setting, when
from fault_table import FaultTable, Row, described

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

FOREVER: dict[str, Any] = {"kind": "hang", "phase": "building", "times": 1}
"""Happens once, so that the sweep continues only if the worker is killed."""

AWHILE: dict[str, Any] = {"kind": "pause", "phase": "building", "times": 1}
USUAL = ("--cache-store", "none")
AROUND_A_TRIAL = {
    2: ("a trial's own process killed", "ray::ImplicitFunc", FOREVER, 2),
    3: ("the sweep's progress actor killed", "ray::ProgressTracker", AWHILE, 1),
    4: ("Train's controller killed", "ray::TrainController", FOREVER, 2),
}
"""By multiple: the name, the killed process, what the worker does meanwhile, and the number of tries."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def resumed(arena: Arena, *, total: int, measured: set[int]) -> float:
    """Resumes the sweep to its end; returns the seconds until its first worker was at work."""
    began, before = time.monotonic(), arena.begun()
    running = arena.start("--resume")
    when(lambda: arena.begun() > before or running.poll() is not None)
    recovery_s = time.monotonic() - began
    done = arena.finish(running)
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=total, measured=measured)
    return recovery_s


@pytest.mark.nightly(
    "a whole sweep with pauses between kills; test_on_ray.py kills a trial, a progress actor and a placement group's creator"
)
def test_processes_killed_around_a_trial_cost_a_try_and_no_trial(arenas: Arenas, fault_table: FaultTable, is_full: bool) -> None:
    hit = {multiple: who for multiple, who in AROUND_A_TRIAL.items() if is_full or multiple != 4}
    arena = arenas({multiple: meanwhile for multiple, (_, _, meanwhile, _) in hit.items()}, further={"pause_s": 5.0})
    multiples = [0, *hit, 1]
    running = arena.start(*USUAL, "--settings", *map(setting, multiples))
    for multiple, (name, words, _, _) in hit.items():
        when(lambda multiple=multiple: arena.has_begun(multiple) or running.poll() is not None)  # type: ignore[misc]
        arena.note_fault(-multiple)
        assert arena.kill(words) >= 1, name
    done = arena.finish(running)
    assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=len(multiples), measured=set(multiples))
    for multiple, (name, _, _, tries) in hit.items():
        record = arena.record(multiple)
        assert (record["tries"], len(record["retry_reasons"])) == (tries, tries - 1), record
        row = Row(
            name=name,
            how="SIGKILL while a worker builds its model",
            outcome=described(record),
            tries=tries,
            recovery_s=arena.recovery_s(-multiple),
        )
        fault_table.tell(row)


@pytest.mark.usefixtures("only_in_full")
def test_a_killed_driver_leaves_nothing_and_what_it_recorded_is_gone_on_from(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({2: FOREVER})
    running = arena.start(*USUAL, "--settings", *map(setting, (0, 2, 1)))
    when(lambda: arena.has_begun(2) or running.poll() is not None)
    assert arena.processes()  # remembers their Unix sessions
    running.kill()
    running.communicate(timeout=60)
    gone_s = arena.check_nothing_is_left()
    assert [record["settings"]["pad_multiple"] for record in arena.records()] == [None]

    arena.damage('{"schema_version":2,"trial_id":"002-abc')
    recovery_s = resumed(arena, total=3, measured={0, 1, 2})
    assert (arena.output / "trials.jsonl.torn").read_text().startswith('{"schema_version":2,"trial_id":"002-abc')
    fault_table.tell(
        Row(
            name="driver killed",
            how="SIGKILL during a trial, then `--resume`",
            outcome=f"nothing left of it after {gone_s:.1f} s; the trial in flight runs again",
            tries=2,
            recovery_s=recovery_s,
        )
    )
    fault_table.tell(
        Row(
            name="damaged tail of the records",
            how="half a line after the last record, then `--resume`",
            outcome="set aside in `trials.jsonl.torn` and reported; the sweep continues",
            tries=2,
            recovery_s=recovery_s,
        )
    )


@pytest.mark.usefixtures("only_in_full")
def test_a_sweep_whose_folder_is_full_ends_in_one_sentence_and_goes_on_when_there_is_room(
    arenas: Arenas, fault_table: FaultTable, small_disk: Path
) -> None:
    arena = arenas({2: AWHILE})
    arena.output = small_disk
    filler = small_disk / "filler"
    running = arena.start(*USUAL, "--settings", *map(setting, (0, 2, 1)))
    when(lambda: arena.has_begun(2) or running.poll() is not None)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    arena.note_fault()
    done = arena.finish(running)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "is full and the room kept for records has been used" in done.stderr
    assert "make room and go on with --resume" in done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=2, measured={0, 2})
    filler.unlink()
    recovery_s = resumed(arena, total=3, measured={0, 1, 2})
    fault_table.tell(
        Row(
            name="sweep's folder on a full disk",
            how="the disk fills up during a trial; then room is made, and `--resume`",
            outcome="ends with one sentence, exit code 2; the trial in flight is measured and recorded in room kept for that",
            tries=1,
            recovery_s=recovery_s,
        )
    )


@pytest.mark.usefixtures("only_in_full")
def test_without_rays_control_service_a_sweep_ends_and_is_gone_on_with(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({2: FOREVER})
    running = arena.start(*USUAL, "--settings", *map(setting, (0, 2, 1)))
    when(lambda: arena.has_begun(2) or running.poll() is not None)
    assert arena.kill("gcs_server") == 1
    began = time.monotonic()
    running.communicate(timeout=300)
    ended_s = time.monotonic() - began
    assert running.returncode != 0
    arena.check_nothing_is_left()
    recovery_s = resumed(arena, total=3, measured={0, 1, 2})
    fault_table.tell(
        Row(
            name="Ray's control service killed",
            how="SIGKILL of `gcs_server` of a local Ray, then `--resume`",
            outcome=f"the sweep ends itself after {ended_s:.0f} s; the trial in flight runs again",
            tries=2,
            recovery_s=recovery_s,
        )
    )
