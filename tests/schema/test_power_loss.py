"""Logs and JSON files after a power failure or a failed system call: what was recorded is there, and nothing is damaged.

A test records, at every system call that changes files, what a disk that loses power then may contain. Data is safe once its file
was fsynced, a name once its folder was. Of later changes the disk may have written all, nothing, the beginning, or some pages.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import TrialRecord, append, read, recover
from compile_sweep.schema.settings import CompileSettings
from orchestrator.run.sweep_folder import write_json

Files = dict[str, bytes]

CHANGES = ("open", "write", "fsync", "ftruncate", "replace")
"""Functions of `os` around which the power may fail."""

PAGE_BYTES = 4096
SETTINGS = CompileSettings.parse("scope=full")


class Disk:
    """Tracks what in a folder is safe, and what only the kernel knows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._safe_names: dict[str, int] = {}
        self._safe_data: dict[int, bytes] = {}

    def synced(self, descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if target == self._folder:
            self._safe_names = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        elif target.parent == self._folder:
            self._safe_data[os.fstat(descriptor).st_ino] = target.read_bytes()

    def after_power_loss(self) -> Iterator[Files]:
        """Yields what may be in the folder after the power failure."""
        names = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        data = {path.stat().st_ino: path.read_bytes() for path in self._folder.iterdir()}
        for found in (names, self._safe_names):
            for lose in (_nothing, _everything, _the_end, _a_page):
                yield {
                    name: lose(self._safe_data.get(inode, b""), data.get(inode, self._safe_data.get(inode, b"")))
                    for name, inode in found.items()
                }


def _nothing(safe: bytes, written: bytes) -> bytes:
    return written


def _everything(safe: bytes, written: bytes) -> bytes:
    return safe


def _the_end(safe: bytes, written: bytes) -> bytes:
    return written[: (len(safe) + len(written)) // 2] if len(written) > len(safe) else safe


def _a_page(safe: bytes, written: bytes) -> bytes:
    """Zeros the first page that lies completely in the added data, or all of that data if there is none."""
    if len(written) <= len(safe):
        return written
    begin = -(-len(safe) // PAGE_BYTES) * PAGE_BYTES
    begin, end = (begin, begin + PAGE_BYTES) if begin + PAGE_BYTES <= len(written) else (len(safe), len(written))
    return written[:begin] + bytes(end - begin) + written[end:]


def watched(disk: Disk, look: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Calls `look` before and after each system call that changes a file."""
    is_looking = False

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            nonlocal is_looking
            if is_looking:
                return call(*arguments, **options)
            result = call(*arguments, **options)
            is_looking = True
            try:
                if name == "fsync":
                    look()
                    disk.synced(arguments[0])
                look()
            finally:
                is_looking = False
            return result

        return called

    for name in CHANGES:
        patch.setattr(os, name, around(name, getattr(os, name)))


def record(number: int) -> TrialRecord:
    """A record whose line is longer than two pages."""
    return TrialRecord(
        trial_id=f"{number:03d}", settings=SETTINGS.to_dict(), settings_key=SETTINGS.key, status=Status.FAILED,
        label="exception", reason="x" * 3 * PAGE_BYTES,
    )  # fmt: skip


def put(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
def test_after_a_power_failure_every_recorded_trial_is_there_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    disk, appended, seen = Disk(folder), list[str](), list[str]()

    def look() -> None:
        for files in disk.after_power_loss():
            later = put(tmp_path / f"later-{len(seen)}", files)
            before = [one.trial_id for one in read(later)]
            torn = recover(later)
            seen.append("torn" if torn else "whole")
            assert [one.trial_id for one in read(later)] == before, "recovering changes no record"
            assert before in (appended, [*appended, f"{len(appended):03d}"])
            if len(before) == len(appended):
                append(later, record(len(before)))
            assert [one.trial_id for one in read(later)] == [f"{number:03d}" for number in range(len(appended) + 1)]

    with monkeypatch.context() as patch:
        watched(disk, look, patch)
        for number in range(3):
            append(folder, record(number))
            appended.append(f"{number:03d}")
    assert len(seen) > 80
    assert seen.count("torn") > 10


def test_after_a_power_failure_a_json_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    disk, written, number_of_looks = Disk(folder), [None], 0

    def look() -> None:
        nonlocal number_of_looks
        for files in disk.after_power_loss():
            found = json.loads(files["sweep.json"])["run"] if "sweep.json" in files else None
            assert found in (written[-1], len(written))
            number_of_looks += 1

    with monkeypatch.context() as patch:
        watched(disk, look, patch)
        for number in range(1, 4):
            write_json(folder / "sweep.json", {"run": number, "long": "x" * 3 * PAGE_BYTES})
            written.append(number)
    assert number_of_looks > 40


@pytest.mark.parametrize("begin", ["", "torn"])
def test_whichever_system_call_fails_a_record_is_there_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """The caller gets an error, and can try again."""
    for fails_at in range(1, 100):
        folder = put(tmp_path / str(fails_at), {})
        append(folder, record(0))
        with (folder / "trials.jsonl").open("a") as log:
            log.write(begin)
        failing, has_failed = FailingCalls(fails_at), False
        with monkeypatch.context() as patch:
            for name in (*CHANGES, "pread"):
                patch.setattr(os, name, failing.counted(getattr(os, name)))
            try:
                append(folder, record(1))
            except OSError:
                has_failed = True
        if failing.num_calls < fails_at:
            break
        found = [one.trial_id for one in read(folder)]
        assert found == (["000"] if has_failed else ["000", "001"])  # a folder that cannot be fsynced is no failure
        try:
            append(folder, record(1))
        except RecordsError:
            assert not has_failed
        assert [one.trial_id for one in read(folder)] == ["000", "001"]
    assert fails_at > 5


class FailingCalls:
    """Counts calls, and makes one of them fail as on a broken disk."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at = fails_at
        self.num_calls = 0

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*arguments, **options)

        return called
