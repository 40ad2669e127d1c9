"""The sweep's folder: created, reopened, or refused."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from samples import H200

from compile_sweep.schema.choices import Pipeline
from compile_sweep.schema.errors import RecordsError, SweepFolderError
from compile_sweep.schema.outcome import Status
from compile_sweep.schema.record import SWEEP_FILE, TRIALS_FILE, TrialRecord, append
from compile_sweep.schema.settings import CompileSettings
from orchestrator.config import Device, SweepConfig
from orchestrator.run import sweep_folder
from orchestrator.run.sweep_folder import begin, held, read_sweep, resume, write_json

EAGER, FULL = CompileSettings.parse("scope=eager"), CompileSettings.parse("scope=full")


def config(**fields: Any) -> SweepConfig:
    """A sweep of two settings, with these fields changed."""
    usual: dict[str, Any] = {"recipe": "quickstart", "workload": "captioning", "size": "tiny", "device": Device.CPU}
    return SweepConfig(**{**usual, "settings": (EAGER, FULL), **fields})


def eager_done() -> TrialRecord:
    return TrialRecord(trial_id="001-a", settings=EAGER.to_dict(), settings_key=EAGER.key, status=Status.OK, samples_per_s=5.0)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns every file below the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sweep_json(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / SWEEP_FILE).read_text(), parse_constant=lambda name: pytest.fail(name))
    return values


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a sweep that has one recorded trial."""
    begin(tmp_path / "sweep", config(), H200, "c0ffee")
    append(tmp_path / "sweep", eager_done())
    return tmp_path / "sweep"


@pytest.mark.parametrize("was_there", [False, True])
def test_a_folder_that_cannot_be_begun_is_removed_only_if_it_is_new(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sweep_folder, "_keep_room", full)
    folder = tmp_path / "sweep"
    if was_there:
        folder.mkdir()
        (folder / "notes.txt").touch()
    with (
        pytest.raises(SweepFolderError, match=r"cannot be written .No space left on device.; name another --output"),
        held(folder),
    ):
        begin(folder, config(), H200, None)
    assert folder.exists() == (folder / "notes.txt").exists() == was_there


def test_a_folder_that_was_moved_while_its_sweep_ran_is_a_sweeps_again(begun: Path) -> None:
    description = (begun / SWEEP_FILE).read_bytes()
    assert sweep_folder.put_back(begun, description) == []
    begun.rename(begun.with_name("elsewhere"))
    (sentence,) = sweep_folder.put_back(begun, description)
    assert "was moved or removed while the sweep ran" in sentence
    assert resume(begun, config(), H200, None) == []
    assert sweep_json(begun)["seed"] == sweep_json(begun.with_name("elsewhere"))["seed"]


def test_a_new_sweep_makes_the_folder_with_what_it_is_and_an_empty_log(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    assert begin(folder, config(seed=7), H200, "c0ffee") == []
    values = sweep_json(folder)
    assert values["config"]["settings"] == values["planned"] == [EAGER.key, FULL.key]
    assert values["seed"] == values["config"]["seed"] == 7
    assert values["environment"] == {**H200.to_dict(), "commit": "c0ffee"}
    assert values["environment_key"] == H200.key
    assert values["runs"] == []
    assert values["cluster"] is False
    assert values["started_at"].endswith("+00:00")
    assert (folder / TRIALS_FILE).read_bytes() == b""
    assert (folder / sweep_folder.LOGS).is_dir()
    assert sorted(contents(folder)) == [sweep_folder.ROOM_FILE, SWEEP_FILE, TRIALS_FILE]


def test_a_new_sweep_in_an_unrelated_folder_leaves_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    begin(tmp_path, config(), H200, None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_new_sweep_is_refused_where_there_is_one(begun: Path) -> None:
    before = contents(begun)
    with pytest.raises(SweepFolderError, match="holds a sweep already; add --resume"):
        begin(begun, config(), H200, None)
    assert contents(begun) == before


def test_a_new_sweep_is_refused_where_there_are_records_of_one(begun: Path) -> None:
    (begun / SWEEP_FILE).unlink()
    before = contents(begun)
    with pytest.raises(SweepFolderError, match="holds a sweep already"):
        begin(begun, config(), H200, None)
    assert contents(begun) == before


def test_a_sweep_taken_up_again_knows_what_is_recorded_and_who_began_it(begun: Path) -> None:
    assert resume(begun, config(compile_deadline_s=300.0), H200, "beef") == [eager_done()]
    values = sweep_json(begun)
    assert values["config"]["compile_deadline_s"] == 300.0
    assert values["environment"]["commit"] == "beef"
    assert [run["commit"] for run in values["runs"]] == ["c0ffee"]
    resume(begun, config(), H200, "cafe")
    assert [run["commit"] for run in sweep_json(begun)["runs"]] == ["c0ffee", "beef"]


def test_a_sweep_that_was_never_begun_is_begun(tmp_path: Path) -> None:
    assert resume(tmp_path / "new", config(), H200, None) == []
    assert sweep_json(tmp_path / "new")["runs"] == []


def test_a_driver_killed_while_it_began_the_folder_can_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sweep_folder.os, "replace", lambda *paths: pytest.fail("killed"))  # the last act of either file
        with pytest.raises(pytest.fail.Exception, match="killed"):
            begin(tmp_path, config(), H200, None)
    assert resume(tmp_path, config(), H200, None) == []
    assert sweep_json(tmp_path)["planned"] == [EAGER.key, FULL.key]


def test_a_sweep_goes_on_after_a_change_that_no_figure_depends_on(begun: Path) -> None:
    assert resume(begun, config(), dataclasses.replace(H200, cores=64, driver="580.95.05", ray="2.61.0"), None)


def test_a_script_s_sweep_goes_on_where_an_older_version_wrote_fewer_of_its_options(tmp_path: Path) -> None:
    job = {"path": "/mine/train.py", "arguments": ["--lr", "1"], "in_place": False}
    begin(tmp_path, config(script=job), H200, None)
    resume(tmp_path, config(script={**job, "batch_argument": None}), H200, None)
    with pytest.raises(SweepFolderError, match="its script's in place is False, not True;"):
        resume(tmp_path, config(script={**job, "in_place": True}), H200, None)
    with pytest.raises(SweepFolderError, match="its script's arguments are '--lr 1', not '--lr 2';"):
        resume(tmp_path, config(script={**job, "arguments": ["--lr", "2"]}), H200, None)


def test_a_script_whose_code_changed_is_not_resumed_because_figures_of_two_versions_cannot_be_compared(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "sweep"
    job = {"path": str(script), "arguments": []}
    script.write_text("raise RuntimeError('no data')\n")
    begin(folder, config(script=job), H200, None)
    script.write_text("loss = model(x).relu()\n")  # mended before anything was measured
    resume(folder, config(script=job), H200, None)
    append(folder, eager_done())
    script.write_text("# only a remark\nloss = model( x ).relu()\n")
    resume(folder, config(script=job), H200, None)
    script.write_text("loss = model(x).gelu()\n")
    with pytest.raises(SweepFolderError, match="was changed since the sweep in"):
        resume(folder, config(script=job), H200, None)
    written = sweep_json(folder)
    del written["script_code"]  # as an older version wrote it
    (folder / "sweep.json").write_text(json.dumps(written))
    resume(folder, config(script=job), H200, None)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"workload": "mine:Mine"}, "its workload is 'captioning', not 'mine:Mine'"),
        ({"size": "base"}, "its size is 'tiny', not 'base'"),
        ({"seed": 1}, "its seed is 0, not 1"),
        ({"workers_per_trial": 2}, "its workers_per_trial is 1, not 2"),
        ({"pipeline": Pipeline.REAL}, "its pipeline is 'resident', not 'real'"),
    ],
)
def test_another_sweep_is_not_taken_up(begun: Path, fields: dict[str, Any], named: str) -> None:
    before = contents(begun)
    with pytest.raises(SweepFolderError) as refusal:
        resume(begun, config(**fields), H200, None)
    assert "holds another sweep" in str(refusal.value)
    assert named in str(refusal.value)
    assert contents(begun) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", "2.12.0"),
        ("gpu", "NVIDIA A100-SXM4-40GB"),
        ("triton", "3.6.0"),
        ("cuda", "12.9"),
        ("transformers", "5.18.0"),
        ("python", "3.12.3"),
    ],
)
def test_figures_of_another_environment_are_not_added(begun: Path, name: str, value: str) -> None:
    before = contents(begun)
    with pytest.raises(SweepFolderError) as refusal:
        resume(begun, config(), dataclasses.replace(H200, **{name: value}), None)
    assert f"measured with {name} {getattr(H200, name)}, and this is {value}" in str(refusal.value)
    assert contents(begun) == before


def test_a_record_from_another_environment_is_not_counted_as_done(begun: Path) -> None:
    append(begun, dataclasses.replace(eager_done(), trial_id="002-elsewhere", environment_key="deadbeef"))
    before = contents(begun)
    with pytest.raises(RecordsError, match=r"line 2 was measured in another environment .*'deadbeef'"):
        resume(begun, config(), H200, None)
    assert contents(begun) == before


def test_records_of_a_cluster_may_be_from_hosts_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a-cluster:6379")
    begin(tmp_path, config(), H200, None)
    append(tmp_path, dataclasses.replace(eager_done(), environment_key="deadbeef"))
    assert len(resume(tmp_path, config(), H200, None)) == 1
    monkeypatch.delenv("RAY_ADDRESS")
    assert len(resume(tmp_path, config(), H200, None)) == 1
    assert sweep_json(tmp_path)["cluster"] is True


def test_a_second_driver_is_kept_out_until_the_first_has_ended(begun: Path) -> None:
    with held(begun), pytest.raises(SweepFolderError, match="a sweep is running in"), held(begun):
        pytest.fail("two drivers write")
    with held(begun):
        assert resume(begun, config(), H200, None) == [eager_done()]


def test_a_file_system_that_locks_no_folders_keeps_nobody_from_a_sweep(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(sweep_folder.fcntl, "flock", refuse)
    with held(begun):
        pass


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_begun:
        begin(tmp_path, config(), H200, None)
    before = contents(tmp_path)
    monkeypatch.setattr(sweep_folder.os, "fsync", full)
    with pytest.raises(SweepFolderError, match=r"cannot be written \(No space left on device\)"):
        resume(tmp_path, config(), H200, None)
    assert contents(tmp_path) == before


def test_of_what_differs_only_what_decides_figures_is_named(begun: Path) -> None:
    with pytest.raises(SweepFolderError, match=r"measured with torch 2\.13\.0, and this is 2\.12\.0"):
        resume(begun, config(), dataclasses.replace(H200, cpu="AMD EPYC 9654", torch="2.12.0"), None)


@pytest.mark.parametrize("device", [Device.CUDA, Device.CPU])
def test_a_head_that_only_drives_may_have_another_processor(tmp_path: Path, device: Device) -> None:
    head = dataclasses.replace(H200, gpu=None, cuda=None, num_gpus=0)
    begin(tmp_path, config(device=device), head, None)
    other = dataclasses.replace(head, cpu="AMD EPYC 9654")
    if device is Device.CUDA:
        assert resume(tmp_path, config(device=device), other, None) == []
    else:
        with pytest.raises(SweepFolderError, match="measured with cpu"):
            resume(tmp_path, config(device=device), other, None)


def test_damaged_records_stop_a_resume_and_stay_as_they_are(begun: Path) -> None:
    with (begun / TRIALS_FILE).open("a") as log:
        log.write('{"schema_version": 1, "trial\n')
    before = contents(begun)
    with pytest.raises(RecordsError, match=r"line 2 .*the line before it is intact"):
        resume(begun, config(), H200, None)
    assert contents(begun) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", '{"config": {}}', '{"schema_version": 1}', '{"schema_version": 1, "config": 3}']
)
def test_a_damaged_description_is_named(begun: Path, text: str) -> None:
    (begun / SWEEP_FILE).write_text(text)
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote"):
        read_sweep(begun)
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote"):
        resume(begun, config(), H200, None)


def test_room_for_records_is_kept_from_the_beginning_and_again_after_it_was_used(begun: Path) -> None:
    room = begun / sweep_folder.ROOM_FILE
    assert room.stat().st_blocks * 512 >= sweep_folder.ROOM_BYTES
    assert sweep_folder.give_room(begun)
    assert not sweep_folder.give_room(begun)
    resume(begun, config(), H200, None)
    assert room.stat().st_size == sweep_folder.ROOM_BYTES


@pytest.mark.parametrize(
    "script",
    [
        {"path": 3},
        {"path": "train.py", "arguments": "--all", "folder": "/"},
        {"path": [], "arguments": [], "folder": "/"},
        {"a": 1},
    ],
)
def test_a_script_that_is_none_in_a_description_is_named(begun: Path, script: dict[str, Any]) -> None:
    values = json.loads((begun / SWEEP_FILE).read_text())
    values["config"]["script"] = script
    write_json(begun / SWEEP_FILE, values)
    with pytest.raises(RecordsError, match="is not a sweep this version wrote"):
        sweep_folder.stored_config(begun)


@pytest.mark.parametrize("name", [SWEEP_FILE, TRIALS_FILE])
def test_a_file_that_claims_to_be_larger_than_any_memory_is_refused(begun: Path, name: str) -> None:
    os.truncate(begun / name, 300 << 30)
    with pytest.raises(RecordsError, match=r"cannot be read \(it has 322,123 MB, more than"):
        resume(begun, config(), H200, None)


def test_a_description_that_is_a_pipe_is_named_and_not_waited_for(begun: Path) -> None:
    (begun / SWEEP_FILE).unlink()
    os.mkfifo(begun / SWEEP_FILE)
    with pytest.raises(RecordsError, match="it is not a regular file"):
        read_sweep(begun)


def test_a_description_of_another_version_is_named(begun: Path) -> None:
    (begun / SWEEP_FILE).write_text(json.dumps({**sweep_json(begun), "schema_version": 1}))
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote"):
        read_sweep(begun)


def test_a_description_that_is_no_text_is_named(begun: Path) -> None:
    (begun / SWEEP_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote"):
        read_sweep(begun)


@pytest.mark.parametrize("missing", ["config", "environment", "environment_key", "started_at"])
def test_a_description_that_lacks_what_a_resume_needs_is_named(begun: Path, missing: str) -> None:
    (begun / SWEEP_FILE).write_text(json.dumps({k: v for k, v in sweep_json(begun).items() if k != missing}))
    before = contents(begun)
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote"):
        resume(begun, config(), H200, None)
    assert contents(begun) == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "it is not a JSON object"),
        ("{}", "schema version None, and this version reads 2"),
        ('{"schema_version": 2}', "config is missing"),
        ('{"schema_version": 2, "config": [1]}', r"config is \[1\]"),
    ],
)
def test_what_is_wrong_with_a_description_is_said_in_words(begun: Path, text: str, why: str) -> None:
    (begun / SWEEP_FILE).write_text(text)
    with pytest.raises(RecordsError, match=rf"wrote \({why}\); name another --output"):
        read_sweep(begun)


@pytest.mark.parametrize("runs", [5, None, "abc", {"a": 1}, [None], ["a"], [{"commit": 7}], [{"started_at": ["x"]}]])
def test_earlier_runs_that_are_none_are_named_and_stay_as_they_are(begun: Path, runs: object) -> None:
    (begun / SWEEP_FILE).write_text(json.dumps({**sweep_json(begun), "runs": runs}))
    before = contents(begun)
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote \(runs is "):
        resume(begun, config(), H200, None)
    assert contents(begun) == before


@pytest.mark.parametrize("commit", [7, ["c0ffee"], {"a": "b"}])
def test_a_commit_that_would_become_no_earlier_run_is_named(begun: Path, commit: object) -> None:
    described = sweep_json(begun)
    (begun / SWEEP_FILE).write_text(json.dumps({**described, "environment": {**described["environment"], "commit": commit}}))
    with pytest.raises(RecordsError, match=r"sweep\.json is not a sweep this version wrote \(commit is "):
        resume(begun, config(), H200, None)


def test_a_description_from_before_earlier_runs_were_kept_is_taken_up(begun: Path) -> None:
    (begun / SWEEP_FILE).write_text(json.dumps({k: v for k, v in sweep_json(begun).items() if k != "runs"}))
    resume(begun, config(), H200, None)
    assert [run["commit"] for run in sweep_json(begun)["runs"]] == ["c0ffee"]


@pytest.mark.parametrize("start", [begin, resume])
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, start: Any) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SweepFolderError, match=r"cannot be written .*Not a directory.*; name another --output"):
            start(place, config(), H200, None)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_is_published_whole_with_its_usual_rights(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": [1, None], "text": "×"})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert path.read_text().endswith("}\n")
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_file_that_cannot_be_written_leaves_the_one_before_and_no_litter(tmp_path: Path, value: object) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": value})
    assert contents(tmp_path) == {"x.json": b'{\n  "a": 1\n}\n'}


def test_times_are_iso_8601_with_an_offset() -> None:
    from datetime import datetime

    assert datetime.fromisoformat(sweep_folder.now()).utcoffset() is not None
