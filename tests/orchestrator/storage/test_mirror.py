"""Results at a URI: copied while a sweep runs, and copied back when it is resumed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from samples import wait_until

from compile_sweep.schema.errors import StorageError, SweepFolderError
from compile_sweep.schema.settings import CompileSettings
from orchestrator import sweep
from orchestrator.config import AUTO, NONE, SweepConfig
from orchestrator.run.stages import Stages
from orchestrator.run.sweep_folder import read_sweep
from orchestrator.storage import filesystem
from orchestrator.storage import mirror as storage_module
from orchestrator.storage.mirror import Storage, below, chosen, normalized


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep's folder with a record, a log and files that are not copied."""
    made = tmp_path / "sweep"
    (made / "logs" / "001-a").mkdir(parents=True)
    (made / "sweep.json").write_text("{}")
    (made / "trials.jsonl").write_text("one\n")
    (made / "logs" / "001-a" / "worker-0.log").write_text("up\n")
    (made / ".train-x" / "state").mkdir(parents=True)
    (made / ".train-x" / "state" / "snapshot").write_text("no")
    (made / ".sweep.json.abc").write_text("half")
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "bucket" / "sweep"


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_changed_is_copied_and_nothing_else(folder: Path, place: Path) -> None:
    storage = Storage(str(place), folder)
    assert not storage.holds_sweep()
    assert storage.copy() == 3
    assert names(place) == ["logs/001-a/worker-0.log", "sweep.json", "trials.jsonl"]
    assert storage.copy() == 0
    with (folder / "trials.jsonl").open("a") as log:
        log.write("two\n")
    assert storage.copy() == 1
    assert (place / "trials.jsonl").read_text() == "one\ntwo\n"
    assert storage.holds_sweep()


def test_whatever_a_library_raises_disturbs_no_sweep(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems of fsspec have errors of their own, which are not OSError."""

    def fails(*arguments: object) -> None:
        raise RuntimeError("the server said 500")

    storage, went_on = Storage(str(place), folder), []
    monkeypatch.setattr(filesystem, "write_whole", fails)
    with pytest.raises(StorageError, match="the server said 500; the sweep is whole"), storage.copying():
        went_on.append(storage)
    assert went_on
    monkeypatch.setattr(filesystem, "opened", fails)
    for call in (Storage(str(place), folder).holds_sweep, Storage(str(place), folder).bring_back):
        with pytest.raises(StorageError, match="the server said 500"):
            call()


def test_another_machine_brings_all_of_it_back(folder: Path, place: Path, tmp_path: Path) -> None:
    Storage(str(place), folder).copy()
    there = Storage(str(place), tmp_path / "elsewhere")
    assert there.bring_back() == 3
    assert names(tmp_path / "elsewhere") == ["logs/001-a/worker-0.log", "sweep.json", "trials.jsonl"]
    assert there.bring_back() == 0


def test_a_folder_that_is_ahead_stays_and_one_that_is_behind_catches_up(folder: Path, place: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    Storage(str(place), folder).copy()
    Storage(str(place), other).bring_back()
    (other / "trials.jsonl").write_text("one\ntwo\n")
    (other / "sweep.json").write_text('{"runs": 2}')
    assert Storage(str(place), other).bring_back() == 0
    Storage(str(place), other).copy()
    assert Storage(str(place), folder).bring_back() == 2
    assert (folder / "trials.jsonl").read_text() == "one\ntwo\n"
    assert (folder / "sweep.json").read_text() == '{"runs": 2}'


def test_a_folder_with_other_records_is_refused_untouched(folder: Path, place: Path, tmp_path: Path) -> None:
    Storage(str(place), folder).copy()
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "trials.jsonl").write_text("mine\n")
    with pytest.raises(SweepFolderError, match=r"hold different records in trials\.jsonl; name another --output"):
        Storage(str(place), other).bring_back()
    assert names(other) == ["trials.jsonl"]


def test_logs_that_are_there_already_are_not_copied_again(folder: Path, place: Path, tmp_path: Path) -> None:
    Storage(str(place), folder).copy()
    other = tmp_path / "elsewhere"
    there = Storage(str(place), other)
    there.bring_back()
    (other / "logs" / "002-b").mkdir()
    (other / "logs" / "002-b" / "worker-0.log").write_text("new\n")
    assert there.copy() == 3  # the new one, and what every sweep begins with
    with (other / "logs" / "001-a" / "worker-0.log").open("a") as log:
        log.write("more\n")
    assert there.copy() == 1


def test_nothing_is_brought_back_from_an_empty_place(place: Path, tmp_path: Path) -> None:
    assert Storage(str(place), tmp_path / "new").bring_back() == 0
    assert not (tmp_path / "new").exists()


def test_copies_follow_while_a_sweep_runs_and_at_its_end(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "EVERY_S", 0.05)
    with Storage(str(place), folder).copying():
        wait_until(lambda: (place / "trials.jsonl").exists(), 20)
        monkeypatch.setattr(storage_module, "EVERY_S", 1000.0)
        (folder / "report.html").write_text("done")
    assert (place / "report.html").read_text() == "done"


def test_a_storage_that_is_away_for_a_while_does_not_disturb(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "EVERY_S", 0.05)
    place.parent.mkdir()
    place.write_text("a file where the folder should be")
    with Storage(str(place), folder).copying():
        (folder / "trials.jsonl").write_text("one\ntwo\n")
        place.unlink()
    assert (place / "trials.jsonl").read_text() == "one\ntwo\n"


def test_one_that_cannot_be_written_to_is_refused_before_a_sweep(
    folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(place))  # root may write everywhere
    with pytest.raises(StorageError, match="is not a folder that can be written to"):
        Storage(str(place), folder).refuse_another()


def test_one_that_stays_away_is_said_at_the_end(folder: Path, place: Path) -> None:
    place.parent.mkdir()
    place.write_text("a file")
    with (
        pytest.raises(
            StorageError, match=r"the storage at .* cannot be used: .*; the sweep is whole in .*, and --resume copies it"
        ),
        Storage(str(place), folder).copying(),
    ):
        pass


def test_the_sweep_in_memory_of_another_file_system(folder: Path, tmp_path: Path) -> None:
    place = f"fsspec+memory://{tmp_path}"
    Storage(place, folder).copy()
    assert Storage(place, tmp_path / "elsewhere").bring_back() == 3


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\x", ""])
def test_a_name_that_leaves_the_folder_is_told_from_others(name: str) -> None:
    assert not storage_module._is_inside(name)
    assert storage_module._is_inside("logs/001-a/worker-0.log")


@pytest.mark.parametrize(
    ("location", "complaint"),
    [
        ("", "no results can be kept at an empty location"),
        ("s3://", "no results can be kept at s3://: it names no bucket; write it like s3://bucket/folder"),
        ("gs:///x?y=1", "no results can be kept at gs:///x: it names no bucket"),
        ("s3://u:secret@/x", "it names no bucket"),
        ("ftp://u:secret@host/x", "no results can be kept at ftp://host/x; use a folder"),
    ],
)
def test_a_place_that_is_none_is_refused_in_one_sentence(location: str, complaint: str) -> None:
    with pytest.raises(StorageError, match=complaint) as caught:
        normalized(location)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "whole"),
    [
        ("s3://bucket/sweeps", "s3://bucket/sweeps/mine"),
        ("s3://bucket/", "s3://bucket/mine"),
        ("s3://bucket?region=eu-west-1", "s3://bucket/mine?region=eu-west-1"),
        ("/results", "/results/mine"),
    ],
)
def test_a_folder_below_a_uri_keeps_its_options(base: str, whole: str) -> None:
    assert below(base, "mine") == whole


@pytest.mark.parametrize(
    ("asked", "environ", "expected"),
    [
        (AUTO, {}, None),
        ("s3://mine/sweep", {storage_module.VARIABLE: "s3://bucket"}, "s3://mine/sweep"),
        (NONE, {storage_module.VARIABLE: "s3://bucket"}, None),
        (None, {storage_module.VARIABLE: "s3://bucket"}, None),
        (AUTO, {storage_module.VARIABLE: "s3://bucket/"}, "s3://bucket/captioning"),
    ],
)
def test_where_results_are_kept(asked: str | None, environ: dict[str, str], expected: str | None) -> None:
    assert chosen(asked, Path("results/captioning"), environ) == expected


def test_a_storage_whose_password_was_not_written_down_has_to_be_given_again() -> None:
    with pytest.raises(StorageError, match=r"the password of s3://\*\*\*@bucket/x was not written down; give --storage again"):
        chosen("s3://***@bucket/x", Path("results/captioning"), {})


@pytest.mark.parametrize("spelled", ["{0}/sweep/copy", "file://{0}/sweep/copy", "fsspec+file://{0}/sweep", "{0}/link/copy"])
def test_a_storage_in_the_sweeps_own_folder_is_refused(spelled: str, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    with pytest.raises(StorageError, match="lies in the sweep's own folder, whose copy it would be"):
        chosen(spelled.format(tmp_path), tmp_path / "sweep", {})


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_sweep_that_lies_where_the_cluster_keeps_results_is_not_copied_onto_itself(scheme: str, tmp_path: Path) -> None:
    assert chosen(AUTO, tmp_path / "sweep", {storage_module.VARIABLE: f"{scheme}{tmp_path}"}) is None


SWEEP = ("--settings", "scope=eager", "--size", "tiny", "--device", "cpu", "--cache-store", "none")


def test_a_new_sweep_is_not_copied_over_another(
    folder: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stages, "run", lambda *arguments: pytest.fail("the sweep was started"))
    Storage(str(place), folder).copy()
    assert sweep.main([*SWEEP, "--output", str(tmp_path / "new"), "--storage", str(place)]) == 2
    assert f"{place} holds a sweep already; add --resume to go on with it" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_sweep_is_copied_with_its_report_and_goes_on_from_its_storage_alone(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(Stages, "run", lambda *arguments: True)  # as if stopped at once
    assert sweep.main([*SWEEP, "--output", str(tmp_path / "first"), "--storage", str(place)]) == 130
    assert f"results: {place}" in capsys.readouterr().out
    assert {"report.html", "sweep.json", "trials.jsonl"} <= set(names(place))
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["--resume", "--storage", str(place), "--cache-store", "none"]) == 130
    assert read_sweep(tmp_path / "results" / place.name)["config"]["storage"] == str(place)
    assert len(read_sweep(place)["runs"]) == 1


def test_a_password_in_a_storage_is_not_written_down(tmp_path: Path) -> None:
    config = SweepConfig(
        recipe="given",
        workload="captioning",
        size="tiny",
        settings=(CompileSettings.parse("scope=eager"),),
        storage="s3://key:secret@bucket/sweep",
    )
    assert config.to_dict()["storage"] == "s3://***@bucket/sweep"


def test_a_dry_run_says_where_results_go_and_trials(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*SWEEP, "--dry-run", "--storage", "s3://key:secret@bucket/sweep", "--placement", "spread"]
    assert sweep.main([*words, "--output", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "results are copied to s3://***@bucket/sweep" in printed
    assert "each trial has a host to itself" in printed
    assert not (tmp_path / "new").exists()
