"""The log of records: durable appends, torn ends, damage that is told, and writers that are killed or race."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_record import SETTINGS, record

from compile_sweep.schema.errors import RecordsError
from compile_sweep.schema.record import (
    TRIALS_FILE,
    append,
    follow,
    read,
    recover,
)


def test_a_folder_without_a_log_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    (tmp_path / TRIALS_FILE).touch()
    assert read(tmp_path) == []


def _append_many(folder: Path, writer: int, count: int) -> None:
    for number in range(count):
        append(folder, record(f"{writer}-{number}", reason="×" * 5_000))  # larger than a pipe's and a page's atomic size


@pytest.mark.slow
def test_processes_that_append_at_once_leave_whole_lines(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_append_many, args=(tmp_path, writer, 25)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=60)
    assert [process.exitcode for process in writers] == [0] * 4
    ids = [r.trial_id for r in read(tmp_path)]
    assert sorted(ids) == sorted(f"{writer}-{number}" for writer in range(4) for number in range(25))
    for writer in range(4):  # each writer's records are in order
        assert [i for i in ids if i.startswith(f"{writer}-")] == [f"{writer}-{number}" for number in range(25)]


def test_an_append_waits_for_the_one_that_holds_the_lock(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    before = (tmp_path / TRIALS_FILE).read_bytes()
    writer = threading.Thread(target=append, args=(tmp_path, record("2")))
    with (tmp_path / TRIALS_FILE).open("ab") as held:  # like an append on a full disk until it has removed its part
        fcntl.flock(held, fcntl.LOCK_EX)
        writer.start()
        writer.join(timeout=0.3)
        assert writer.is_alive()
        assert (tmp_path / TRIALS_FILE).read_bytes() == before
    writer.join(timeout=30)
    assert [r.trial_id for r in read(tmp_path)] == ["1", "2"]


@contextmanager
def files_end_at(size_bytes: int) -> Iterator[None]:
    """Limits files of this process to the size: a write across it is cut short, one beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room_bytes", [0, 1, 100])
def test_a_record_that_does_not_fit_the_disk_leaves_the_log_as_it_was(tmp_path: Path, room_bytes: int) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    before = log.read_bytes()
    with files_end_at(len(before) + room_bytes), pytest.raises(OSError, match=r"fitted on the disk|too large"):
        append(tmp_path, record("2"))
    assert log.read_bytes() == before
    append(tmp_path, record("3"))
    assert [r.trial_id for r in read(tmp_path)] == ["1", "3"]


def test_a_record_that_the_disk_refuses_only_when_it_is_synced_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    before = log.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            append(tmp_path, record("2"))
    assert log.read_bytes() == before
    append(tmp_path, record("2"))
    assert [r.trial_id for r in read(tmp_path)] == ["1", "2"]


def full_disk(descriptor: int) -> None:
    """`os.fsync` on a disk that allocates blocks only on writing, and has none left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kept", [-2, -100])
def test_a_last_line_cut_anywhere_is_no_record_and_is_set_aside_by_the_next_append(tmp_path: Path, kept: int) -> None:
    append(tmp_path, record("1"))
    append(tmp_path, record("2"))
    log = tmp_path / TRIALS_FILE
    torn = log.read_bytes()[:kept]
    log.write_bytes(torn)
    assert [r.trial_id for r in read(tmp_path)] == ["1"]
    append(tmp_path, record("3"))
    assert [r.trial_id for r in read(tmp_path)] == ["1", "3"]
    assert (tmp_path / f"{TRIALS_FILE}.torn").read_bytes() == torn.partition(b"\n")[2] + b"\n"


def test_a_torn_end_is_recovered_and_said_once(tmp_path: Path) -> None:
    assert recover(tmp_path) == []
    append(tmp_path, record("1", reason="×" * (3 << 20)))  # of several blocks
    append(tmp_path, record("2", reason="×" * (3 << 20)))
    log = tmp_path / TRIALS_FILE
    log.write_bytes(log.read_bytes()[:-5])
    (sentence,) = recover(tmp_path)
    assert sentence == f"{log} ended in the middle of a line, which is now in {TRIALS_FILE}.torn; the lines before it are intact"
    assert recover(tmp_path) == []
    assert [r.trial_id for r in read(tmp_path)] == ["1"]


@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_last_line_that_lacks_only_its_line_break_is_a_record(tmp_path: Path, has_checksum: bool) -> None:
    log = tmp_path / TRIALS_FILE
    append(tmp_path, record("1"))
    log.write_text(log.read_text().rstrip("\n") if has_checksum else record("1").to_json())
    assert [r.trial_id for r in read(tmp_path)] == ["1"]
    append(tmp_path, record("2"))
    assert [r.trial_id for r in read(tmp_path)] == ["1", "2"]
    assert not (tmp_path / f"{TRIALS_FILE}.torn").exists()


def test_what_follows_a_log_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    followed = follow(tmp_path)
    assert [r.trial_id for r in followed.fresh()] == ["1"]
    with (tmp_path / TRIALS_FILE).open("a") as log:
        log.write(record("2").to_json()[:50])
    assert followed.fresh() == []
    append(tmp_path, record("3"))
    assert [r.trial_id for r in followed.fresh()] == ["3"]


def test_a_log_that_cannot_be_followed_any_more_is_one_sentence(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    followed = follow(tmp_path)
    (tmp_path / TRIALS_FILE).unlink()
    assert followed.fresh() == []
    (tmp_path / TRIALS_FILE).mkdir()
    with pytest.raises(RecordsError, match=r"trials.jsonl cannot be read .Is a directory.; name a folder"):
        followed.fresh()


def test_a_line_that_was_changed_does_not_match_its_checksum_and_one_without_is_read(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    log.write_text(log.read_text().replace('"wall_s":61.5', '"wall_s":62.5'))
    with pytest.raises(RecordsError, match=r"line 1 is not a trial record: its checksum does not match"):
        read(tmp_path)
    log.write_text(record("1", wall_s=62.5).to_json() + "\n")  # as an older version wrote it
    assert read(tmp_path)[0].wall_s == 62.5


def test_a_line_that_another_program_wrote_again_does_not_match_its_checksum(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    log.write_text(json.dumps(json.loads(log.read_text())) + "\n")  # with spaces, as json and jq write it
    with pytest.raises(RecordsError, match=r"its checksum does not match; if the line was edited on purpose, remove the"):
        read(tmp_path)


def test_a_copy_with_another_systems_line_ends_and_mark_is_read(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes().replace(b"\n", b"\r\n"))
    assert [one.trial_id for one in read(tmp_path)] == ["1"]


def test_a_secret_that_is_a_word_of_a_setting_damages_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "reduce-overhead")
    append(tmp_path, record("1", reason="the password is reduce-overhead"))
    (found,) = read(tmp_path)
    assert (found.settings_key, found.reason) == (SETTINGS.key, "the password is ***")


def test_an_id_is_recorded_once(tmp_path: Path) -> None:
    append(tmp_path, record("1", reason='its "trial_id":"2", and\n"trial_id":"2"'))
    append(tmp_path, record("2"))
    with pytest.raises(RecordsError, match='already has a record with "trial_id":"2"'):
        append(tmp_path, record("2"))
    append(tmp_path, record("22"))
    assert [r.trial_id for r in read(tmp_path)] == ["1", "2", "22"]


@pytest.mark.parametrize("act", [read, recover, lambda folder: append(folder, record())])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_log_that_is_no_regular_file_is_refused_and_not_waited_for(
    tmp_path: Path, make: Callable[[Path], object], act: Callable[[Path], object]
) -> None:
    make(tmp_path / TRIALS_FILE)
    with pytest.raises(RecordsError, match="is not a regular file"):
        act(tmp_path)


def test_a_log_that_is_a_link_to_nothing_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / TRIALS_FILE).symlink_to("elsewhere.jsonl")
    with pytest.raises(RecordsError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "elsewhere.jsonl").touch()
    append(tmp_path, record())
    assert len(read(tmp_path)) == 1


KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from compile_sweep.schema.record import TRIALS_FILE, TrialRecord, append, recover
from compile_sweep.schema.settings import CompileSettings
settings = CompileSettings.parse("scope=full")
known = {"settings": settings.to_dict(), "settings_key": settings.key}
folder, kills, number, torn = Path(sys.argv[1]), int(sys.argv[2]), 0, 0
log = folder / TRIALS_FILE
for kill in range(kills):
    reason = "x" * random.choice([2_000, 20_000, 4_000_000])
    told, tell = os.pipe()
    if (writer := os.fork()) == 0:
        while True:
            append(folder, TrialRecord(trial_id=str(number), status="failed", reason=reason, **known))
            os.write(tell, b"%d " % number)
            number += 1
    os.close(tell)
    time.sleep(random.random() * 0.03)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    appended = [int(one) for one in os.fdopen(told).read().split()]
    torn += len(recover(folder))
    lines = log.read_text().split("\\n") if log.exists() else [""]
    assert lines.pop() == ""
    found = [int(json.loads(line)["trial_id"]) for line in lines]
    assert found == list(range(len(found))), "lost, doubled or out of order"
    assert found[number : number + len(appended)] == appended, "what was recorded is not there"
    assert len(found) <= number + len(appended) + 1
    number = len(found)
    if number and log.stat().st_size > 20_000_000:
        log.unlink()
        number = 0
print(torn)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [60, pytest.param(1000, marks=pytest.mark.nightly("a minute of kills; `make test` kills 60 times"))]
)
def test_of_a_writer_killed_at_any_time_no_record_is_lost_or_doubled(tmp_path: Path, kills: int) -> None:
    """The records that were confirmed are there, in order, plus at most the one being added."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), str(kills)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    print(f"{done.stdout.strip()} of {kills} kills left part of a line")


def _as_array(log: bytes) -> bytes:
    return json.dumps([json.loads(line) for line in log.splitlines()]).encode()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (lambda log: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "fetch them with git lfs pull"),
        (gzip.compress, "is compressed by gzip; unpack it"),
        (lambda log: log.decode().encode("utf-16"), "is text in UTF-16; write it as UTF-8"),
        (lambda log: log.decode().encode("utf-16-le"), "is text in UTF-16; write it as UTF-8"),
        (_as_array, "is one JSON array; write one record a line"),
        (lambda log: b"\xef\xbb\xbf" + _as_array(log) + b"\n", "is one JSON array; write one record a line"),
        (lambda log: b"[]", "is one JSON array"),
        (lambda log: json.dumps(json.loads(log.splitlines()[0]), indent=1).encode(), "is JSON with records of several lines"),
    ],
)
def test_a_log_in_another_format_is_called_that_and_left_as_it_is(
    tmp_path: Path, changed: Callable[[bytes], bytes], complaint: str
) -> None:
    append(tmp_path, record("1"))
    append(tmp_path, record("2"))
    log = tmp_path / TRIALS_FILE
    log.write_bytes(other := changed(log.read_bytes()))
    uses: list[Callable[[], object]] = [
        lambda: read(tmp_path),
        lambda: recover(tmp_path),
        lambda: append(tmp_path, record("3")),
        lambda: follow(tmp_path).fresh(),
    ]
    for use in uses:
        with pytest.raises(RecordsError) as error:
            use()
        assert complaint in str(error.value)
        assert "removed" not in str(error.value)
    assert log.read_bytes() == other


def test_a_line_that_is_no_record_is_shown_as_it_begins(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    with (tmp_path / TRIALS_FILE).open("a") as log:
        log.write("\x1b[31m<<<<<<< HEAD\n")
    with pytest.raises(
        RecordsError, match=r"line 2 .*begins '\\x1b\[31m<<<<<<< HEAD'; the line before it is intact, and its trial"
    ):
        read(tmp_path)


def test_records_of_another_version_are_not_to_be_removed(tmp_path: Path) -> None:
    append(tmp_path, record("1"))
    log = tmp_path / TRIALS_FILE
    log.write_text(log.read_text().partition(',"checksum"')[0].replace('"schema_version":2', '"schema_version":3') + "}\n")
    with pytest.raises(RecordsError, match="schema version 3, and this version reads 2; the version of compile-sweep") as error:
        read(tmp_path)
    assert "removed" not in str(error.value)
