"""What a worker does with a store that is good, damaged, foreign, slow or down: it restores what is ours and never fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager
from toy_workloads import Toy

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.transfer import make_bundle
from compile_sweep.harness.warm_start import Start
from compile_sweep.schema.errors import CacheError
from compile_sweep.schema.settings import CompileSettings
from orchestrator import cache
from orchestrator.artifacts import KEY_VARIABLE, ArtifactStore, open_store, sharing
from orchestrator.artifacts.sharing import Sharing
from orchestrator.environment import fingerprint
from orchestrator.run.trial_spec import Assignment, TrialPlan

pytestmark = pytest.mark.slow

FULL, REGIONAL = "scope=full", "scope=regional"
TUNED = "ab/cab1.best_config"
"""A file in Inductor's folder that is an artifact by itself."""

START = Start(device="cpu", load_s=0.5, first_step_s=1.0, warmup_s=2.0, warmup_steps=3, compile_phases_s={})


class Measured:
    """The part of a measurement that caches concern."""

    def to_dict(self) -> dict[str, Any]:
        return {"compile_s": 10.0}


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's environment, with empty caches, and without anything that earlier tests compiled in this process."""
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    fresh(tmp_path / "first", monkeypatch)
    with CacheArtifactManager.with_fresh_cache():
        yield


def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another process's empty caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    return folder / "inductor"


def made(tmp_path: Path, name: str = TUNED, content: bytes = b"{}") -> None:
    """Writes an artifact to the first process's caches."""
    path = tmp_path / "first" / "inductor" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def sharing_of(tmp_path: Path, settings: str = FULL, *, rank: int = 0, trial_id: str = "1", **plan: Any) -> Sharing:
    usual: dict[str, Any] = {
        "folder": str(tmp_path),
        "workload": "toy_workloads:Toy",
        "size": "only",
        "seed": 0,
        "num_workers": 1,
        "use_gpu": False,
        "pipeline": "resident",
        "workers_at_once": 1,
        "claimed_cpus": 0.5,
        "compile_deadline_s": 60.0,
        "trial_deadline_s": 60.0,
        "cache": str(tmp_path / "cache"),
    }
    assignment = Assignment(plan=TrialPlan(**{**usual, **plan}), trial_id=trial_id, settings=CompileSettings.parse(settings))
    return Sharing(assignment, Toy("only", 0), rank)


def worked(one: Sharing, seconds_left: float = 60.0) -> dict[str, Any]:
    """Does everything that a worker does with it; returns the record's figures."""
    one.restore(seconds_left)
    with one.watching():
        pass
    measured: Any = START if one.assignment.plan.warm_start else Measured()
    return {**one.figures(measured), **one.publish(seconds_left)}


def blobs(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "blobs").rglob("*") if path.is_file()]


def test_a_cold_trial_restores_nothing_and_publishes_what_it_made(tmp_path: Path) -> None:
    made(tmp_path)
    figures = worked(sharing_of(tmp_path))
    assert (figures["caches"], figures["cache_made"], figures["cache_made_bytes"]) == ("cold", 1, 2)
    assert figures["cache_faults"] == []
    assert figures["cache_new_bytes"] == 2
    assert figures["publish_s"] > 0
    assert "restore_s" not in figures
    (manifest,) = open_store(str(tmp_path / "cache")).manifests().manifests
    key = CompileSettings.parse(FULL).key
    assert (manifest.maker, manifest.settings_key, manifest.workload) == ("1", key, "toy_workloads:Toy")


def test_a_warm_trial_finds_what_a_cold_one_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    folder = fresh(tmp_path / "second", monkeypatch)
    figures = worked(sharing_of(tmp_path, restores=True, trial_id="2"))
    assert (folder / TUNED).read_bytes() == b"{}"
    assert (figures["caches"], figures["cache_restored"], figures["cache_refused"]) == ("warm", 1, 0)
    assert figures["cold_equivalent_s"] == 10.0 + figures["cache_saved_s"]
    assert figures["restore_s"] > 0
    assert figures["cache_new_bytes"] == 0  # what was restored is not stored again


def test_a_trial_finds_what_was_imported_for_its_settings(tmp_path: Path) -> None:
    (tmp_path / "given.bin").write_bytes(make_bundle([Artifact(kind="autotune", key=TUNED, content=b"{}")]))
    settings = "scope=full,dynamic=mark,dynamic_max=64,autocast=bf16"
    words = ["--workload", "toy_workloads:Toy", "--settings", settings, "--cache-store", str(tmp_path / "cache")]
    assert cache.main(["import", str(tmp_path / "given.bin"), *words]) == 0
    figures = worked(sharing_of(tmp_path, settings, restores=True, use_gpu=bool(fingerprint().gpu)))
    assert (figures["caches"], figures["cache_restored"]) == ("warm", 1)


def test_what_another_setting_left_and_nothing_hit_is_not_named_as_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path, REGIONAL))
    fresh(tmp_path / "second", monkeypatch)
    figures = worked(sharing_of(tmp_path, restores=True, trial_id="2"))
    assert figures["cache_restored"] == 1
    assert "cache_made" not in figures


def test_a_start_restores_its_own_artifacts_alone_and_publishes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path, REGIONAL))
    fresh(tmp_path / "second", monkeypatch)
    of_another = worked(sharing_of(tmp_path, restores=True, warm_start=True))
    assert of_another["cache_restored"] == 0
    own = worked(sharing_of(tmp_path, REGIONAL, restores=True, warm_start=True))
    assert own["cache_restored"] == 1
    assert own["warm_start_s"] == pytest.approx(own["restore_s"] + 2.5)
    assert "cache_made" not in own
    assert len(open_store(str(tmp_path / "cache")).manifests().manifests) == 1


@pytest.mark.parametrize(("restores", "settings"), [(True, FULL), (True, "scope=eager"), (False, FULL)])
def test_a_trial_for_which_there_is_nothing_is_cold(tmp_path: Path, restores: bool, settings: str) -> None:
    figures = worked(sharing_of(tmp_path, settings, restores=restores))
    assert figures["caches"] == "cold"
    assert figures["cold_equivalent_s"] is None
    assert figures.get("cache_restored") == (0 if restores and settings == FULL else None)


def test_only_the_first_worker_publishes_and_every_one_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    assert "cache_made" not in worked(sharing_of(tmp_path, rank=1))
    assert worked(sharing_of(tmp_path, rank=0))["cache_made"] == 1
    fresh(tmp_path / "second", monkeypatch)
    assert worked(sharing_of(tmp_path, rank=1, restores=True))["cache_restored"] == 1


@pytest.mark.parametrize(("num_workers", "caches"), [(1, "cold"), (2, "warm")])
def test_of_several_workers_one_that_could_not_restore_is_not_called_cold(
    tmp_path: Path, num_workers: int, caches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a host share its caches, and another one may have restored artifacts there."""
    made(tmp_path)
    worked(sharing_of(tmp_path))
    fresh(tmp_path / "second", monkeypatch)
    away = tmp_path / "away"
    (tmp_path / "cache").rename(away)
    (tmp_path / "cache").touch()
    assert worked(sharing_of(tmp_path, restores=True, num_workers=num_workers))["caches"] == caches
    (tmp_path / "cache").unlink()
    away.rename(tmp_path / "cache")
    for blob in blobs(tmp_path):
        blob.unlink()
    assert worked(sharing_of(tmp_path, restores=True, num_workers=num_workers))["caches"] == caches
    nothing = sharing_of(tmp_path, restores=True, num_workers=num_workers, size="other")
    assert worked(nothing)["caches"] == "cold"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_artifact_is_refused_counted_and_told(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    (blob,) = blobs(tmp_path)
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(b"[]" if damage == "flipped" else b"{")
    folder = fresh(tmp_path / "second", monkeypatch)
    figures = worked(sharing_of(tmp_path, restores=True))
    assert (figures["caches"], figures["cache_restored"], figures["cache_refused"]) == ("cold", 0, 1)
    assert not (folder / TUNED).exists()
    assert "refused: autotune ab/cab1.best_config" in capsys.readouterr().out


def test_what_another_key_signed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    folder = fresh(tmp_path / "second", monkeypatch)
    monkeypatch.setenv(KEY_VARIABLE, "cd" * 32)
    figures = worked(sharing_of(tmp_path, restores=True))
    assert (figures["caches"], figures["cache_restored"], figures["cache_refused"]) == ("cold", 0, 1)
    assert not (folder / TUNED).exists()


@pytest.mark.parametrize(
    "settings", ["scope=full,matmul_precision=high", "scope=full,autocast=bf16", "scope=full,dynamic=mark,dynamic_max=64"]
)
def test_settings_that_torch_does_not_keep_apart_share_nothing(
    tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    fresh(tmp_path / "second", monkeypatch)
    assert worked(sharing_of(tmp_path, settings, restores=True))["cache_restored"] == 0


def test_torch_configured_otherwise_shares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    fresh(tmp_path / "second", monkeypatch)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert worked(sharing_of(tmp_path, restores=True))["cache_restored"] == 0
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "cache", ["s3://no-such-bucket/x?endpoint_override=127.0.0.1:1&scheme=http", "{file}/below", "ftp://h/x"]
)
def test_a_store_that_is_not_there_is_a_sentence_in_the_log(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sharing, "RESTORE_LIMIT_S", 3.0)
    monkeypatch.setattr(sharing, "PUBLISH_LIMIT_S", 3.0)
    (tmp_path / "file").write_text("mine")
    made(tmp_path)
    figures = worked(sharing_of(tmp_path, restores=True, cache=cache.format(file=tmp_path / "file")))
    assert figures["caches"] == "cold"
    assert "cache_made" not in figures
    out = capsys.readouterr().out
    assert [fault.split()[0] for fault in figures["cache_faults"]] == ["restoring", "published"]
    assert all(fault in out for fault in figures["cache_faults"])
    assert "Traceback" not in out


def test_a_slow_store_costs_a_trial_no_more_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    monkeypatch.setattr(sharing, "open_store", lambda *arguments, **options: time.sleep(30))
    monkeypatch.setattr(sharing, "RESTORE_LIMIT_S", 0.2)
    monkeypatch.setattr(sharing, "PUBLISH_LIMIT_S", 0.2)
    began = time.monotonic()
    figures = worked(sharing_of(tmp_path, restores=True))
    assert time.monotonic() - began < 10
    assert (figures["caches"], figures["cache_restored"]) == ("cold", 0)
    assert capsys.readouterr().out.count("TimeoutError") == 2


def test_hits_that_cannot_be_noted_keep_nothing_from_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    worked(sharing_of(tmp_path))
    fresh(tmp_path / "second", monkeypatch)

    def fails(store: ArtifactStore, hits: object) -> None:
        raise CacheError("the server said 500")

    monkeypatch.setattr(ArtifactStore, "note_hits", fails)
    assert worked(sharing_of(tmp_path, restores=True, trial_id="2"))["cache_made"] == 1
    assert "hits are not noted: CacheError: the server said 500" in capsys.readouterr().out


def test_a_trial_at_its_deadline_does_not_begin_to_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path)
    one = sharing_of(tmp_path)
    one.restore(60.0)
    begun = list[object]()
    monkeypatch.setattr(Sharing, "_put", lambda self, artifacts: begun.append(artifacts))
    (fault,) = one.publish(1.0)["cache_faults"]
    assert "there is no time for it" in fault
    assert begun == []
    assert "published nothing" in capsys.readouterr().out


def test_a_torch_that_cannot_be_watched_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from compile_sweep.harness.compile_cache import transfer as compile_cache

    monkeypatch.delattr(compile_cache, "watch_caches")
    made(tmp_path)
    figures = worked(sharing_of(tmp_path))
    assert figures["cache_made"] == 1
    assert "cache_hits" not in figures
    assert "caches are not watched: ImportError" in capsys.readouterr().out


def test_a_remote_cache_is_read_by_the_compiler_and_makes_a_trial_warm(tmp_path: Path) -> None:
    figures = worked(sharing_of(tmp_path, restores=True, cache="redis://127.0.0.1:1"))
    assert (figures["caches"], figures["cache_hits"], figures["cache_saved_s"]) == ("warm", 0, 0.0)
    assert "cache_restored" not in figures
    assert worked(sharing_of(tmp_path, cache="redis://127.0.0.1:1"))["caches"] == "cold"


def test_a_scripts_process_compiles_and_its_worker_publishes_for_the_same_script_and_arguments(tmp_path: Path) -> None:
    script = {"path": str(tmp_path / "train.py"), "arguments": ["--width", "32"]}
    (tmp_path / "train.py").write_text("import torch")
    use = {"hits": {}, "misses": {"inductor": 2}, "hit_keys": [], "saved_s": 0.0, "cost_s": []}

    def trial(plan: dict[str, Any], trial_id: str) -> dict[str, Any]:
        one = replace(sharing_of(tmp_path, trial_id=trial_id, script=plan, restores=trial_id != "1"), workload=None)
        one.restore(60.0)
        assert one.watched is not None
        one.take({**use, "misses": {}} if one.watched else use, b"")
        return {**one.figures({"compile_s": 3.0}), **one.publish(60.0)}

    made(tmp_path)
    first = trial(script, "1")
    assert (first["caches"], first["cache_made"], first["cache_misses"]) == ("cold", 1, 2)
    again = trial(script, "2")
    assert (again["caches"], again["cache_restored"], again["cache_misses"]) == ("warm", 1, 0)
    assert trial({**script, "arguments": ["--tf32"]}, "3")["cache_restored"] == 0
    (tmp_path / "train.py").write_text("import torch, sys")
    assert trial(script, "4")["cache_restored"] == 0
    assert sharing_of(tmp_path, "scope=eager", script=script).watched is None
