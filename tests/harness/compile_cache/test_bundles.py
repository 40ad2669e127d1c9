"""Artifacts of compile caches as files and bundles, the counting of hits, and facts about torch's configuration."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_samples import LIBRARY
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._guards import CompileContext, CompileId
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphCache, PersistentCache
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

from compile_sweep.harness.compile_cache import bundles, kernels
from compile_sweep.harness.compile_cache import folders as cache_folders
from compile_sweep.harness.compile_cache.artifact import FUNCTION_KEYED_KINDS, Artifact
from compile_sweep.harness.compile_cache.transfer import (
    ArtifactKind,
    CacheFolders,
    gather_artifacts,
    make_bundle,
    restore_artifacts,
    torch_configuration,
    watch_caches,
)
from compile_sweep.harness.compile_cache.usage import CacheUsage, Tally, _Follower


def test_a_kernels_folder_is_the_same_artifact_wherever_it_lies(tmp_path: Path) -> None:
    def folders_at(place: str) -> CacheFolders:
        folders = CacheFolders(inductor=tmp_path / place / "inductor", triton=tmp_path / place / "triton")
        kernel = folders.triton / "KERNEL"
        kernel.mkdir(parents=True)
        (kernel / "add.cubin").write_bytes(b"\x7fELF")
        (kernel / "__grp__add.json").write_text(json.dumps({"child_paths": {"add.cubin": str(kernel / "add.cubin")}}))
        return folders

    here, there = (list(cache_folders.read_artifacts(folders_at(place))) for place in ("here", "a longer place"))
    assert [artifact.digest for artifact in here] == [artifact.digest for artifact in there]
    assert [(artifact.kind, artifact.key) for artifact in here] == [("triton", "KERNEL")]
    third = CacheFolders(inductor=tmp_path / "inductor", triton=tmp_path / "triton")
    restore_artifacts(here, third)
    group = json.loads((third.triton / "KERNEL" / "__grp__add.json").read_text())
    assert Path(group["child_paths"]["add.cubin"]).read_bytes() == b"\x7fELF"
    assert Path(group["child_paths"]["add.cubin"]).is_relative_to(third.triton)


def test_kinds_known_by_a_function_alone_are_those_of_dynamo() -> None:
    assert set(FUNCTION_KEYED_KINDS) == {ArtifactKind.PRECOMPILE, ArtifactKind.PGO}


def test_what_was_restored_is_not_read_again(tmp_path: Path) -> None:
    folders = CacheFolders(inductor=tmp_path / "inductor", triton=tmp_path / "triton")
    kernel = folders.triton / "KERNEL"
    kernel.mkdir(parents=True)
    (kernel / "add.cubin").write_bytes(b"\x7fELF")
    (folders.inductor / "ab").mkdir(parents=True)
    (folders.inductor / "ab" / "library.so").write_bytes(LIBRARY)
    given = list(cache_folders.read_artifacts(folders))
    assert [str(artifact.kind) for artifact in given] == ["code", "triton"]
    (kernel / "add.cubin").write_bytes(b"later")  # no cache changes what it has written
    (folders.inductor / "ab" / "own.cubin").write_bytes(b"made here")
    found = list(cache_folders.read_artifacts(folders, given))
    assert [artifact for artifact in found if artifact in given] == given
    assert [(artifact.key, artifact.content) for artifact in found if artifact not in given] == [("ab/own.cubin", b"made here")]
    assert {artifact.digest for artifact in given} <= {artifact.digest for artifact in gather_artifacts(folders, given=given)}
    shutil.rmtree(kernel)
    assert [artifact.key for artifact in cache_folders.read_artifacts(folders, given)] == ["ab/library.so", "ab/own.cubin"]


def choices(place: Path, timings: dict[str, float], inputs: str = "16x64") -> list[Artifact]:
    """Returns what max-autotune leaves behind in a process of its own."""
    folders = CacheFolders(inductor=place, triton=place / "triton")
    (place / "cache").mkdir(parents=True)
    file = {"system": {"hash": "abc"}, "cache": {"addmm": {inputs: {"highest": timings}}, "pad_mm": True}}
    (place / "cache" / "abc").write_text(json.dumps(file))
    return list(cache_folders.read_artifacts(folders))


def test_choices_of_two_trials_are_merged_and_own_measurements_stay(tmp_path: Path) -> None:
    first, second = choices(tmp_path / "1", {"triton": 1.0}), choices(tmp_path / "2", {"triton": 2.0}, inputs="8x8")
    assert {str(artifact.kind) for artifact in first} == {"choices"}
    own = tmp_path / "own"
    choices(own, {"cublas": 3.0, "triton": 4.0})
    restore_artifacts([*first, *second], CacheFolders(inductor=own, triton=own / "triton"))
    merged = json.loads((own / "cache" / "abc").read_text())["cache"]
    assert merged == {
        "addmm": {"16x64": {"highest": {"cublas": 3.0, "triton": 4.0}}, "8x8": {"highest": {"triton": 2.0}}},
        "pad_mm": True,
    }


class SeveralConfigurations:
    """A Triton kernel from a graph, as far as its tuning is concerned."""

    def __init__(self, filename: str, compile_results: list[str]) -> None:
        self.filename, self.compile_results = filename, compile_results

    def recheck_autotune_cache(self, reload_kernel_from_src: Callable[[], Any]) -> None:
        best = Path(self.filename).with_name("best")
        if best.exists():
            self.compile_results = [name for name in self.compile_results if name == best.read_text()] or reload_kernel_from_src()


class Choice:
    """A candidate of max-autotune."""

    def __init__(self, name: str) -> None:
        self._name = name

    def hash_key(self) -> str:
        return self._name


def test_who_is_given_choices_times_no_candidates_and_knows_what_that_saves() -> None:
    candidates = [Choice("triton"), Choice("cublas")]
    with fresh_cache(), watch_caches() as maker:
        PersistentCache().lookup(candidates, "mm", "16x64", lambda some: dict.fromkeys(some, 1.0), None)
        gathered = gather_artifacts(CacheFolders.of_process(), maker)
    given = [artifact for artifact in gathered if artifact.kind == ArtifactKind.CHOICES]
    assert maker.misses == {"choices": 1}
    assert [artifact.cost_s for artifact in given] == list(maker.cost_s.values())
    with fresh_cache(), watch_caches(given) as user:
        restore_artifacts(given, CacheFolders.of_process())
        timings = PersistentCache().lookup(candidates, "mm", "16x64", lambda _: pytest.fail("timed again"), None)
    assert list(timings.values()) == [1.0, 1.0]
    assert (user.hits, user.misses) == ({"choices": 1}, {})
    assert user.saved_s == given[0].cost_s > 0


def test_a_kernel_from_elsewhere_finds_its_best_configuration_here(tmp_path: Path) -> None:
    made_elsewhere = "/another/host/ab/kernel.py"
    kernel = SimpleNamespace(filename=made_elsewhere, inductor_meta={}, launchers=["the best"])
    best = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=4, num_stages=1)

    with fresh_cache(), watch_caches() as maker:
        tuned = AutotuneCache.create({}, made_elsewhere, "configs")
        assert tuned is not None
        tuned.save(best, 1)
        followed = {name: by for _, name, by in kernels.functions_to_wrap(Tally(maker))}
        followed["autotune_to_one_config"](lambda _: None, kernel)
        given = [
            artifact for artifact in gather_artifacts(CacheFolders.of_process(), maker) if artifact.kind == ArtifactKind.AUTOTUNE
        ]
    assert [artifact.key.partition("/")[0] for artifact in given] == ["ab"]
    assert given[0].cost_s == maker.cost_s["autotune", given[0].key] > 0
    assert maker.misses == {"autotune": 1}

    with fresh_cache(), watch_caches(given) as user:
        restore_artifacts(given, CacheFolders.of_process())
        followed = {name: by for _, name, by in kernels.functions_to_wrap(Tally(user))}
        followed["precompile"](lambda _: None, kernel)
        found = AutotuneCache.create({}, made_elsewhere, "configs")
        assert found is not None
        assert found._read()["XBLOCK"] == 64
    assert user.hits == {"autotune": 1}
    assert user.saved_s == given[0].cost_s


def test_a_restored_kernel_that_was_tuned_here_is_passed_on_with_its_best_configuration_alone() -> None:
    kernel = SeveralConfigurations("/another/host/ab/kernel.py", ["slow", "fast"])
    bundle_of = SimpleNamespace(static_autotuners=[SimpleNamespace(kernel=kernel)])
    entry = SimpleNamespace(guards_expr=None, _time_taken_ns=1, _triton_bundle=bundle_of)
    found = Artifact(kind=ArtifactKind.INDUCTOR, key="graph", content=pickle.dumps(entry))
    with fresh_cache():
        assert bundles.read_graph_entry(found).content == found.content, "nothing is known to be best"
        tuned_here = CacheFolders.of_process().inductor / "ab" / "best"
        tuned_here.parent.mkdir(parents=True)
        tuned_here.write_text("fast")
        (passed_on,) = pickle.loads(bundles.read_graph_entry(found).content)._triton_bundle.static_autotuners
        assert (passed_on.kernel.compile_results, passed_on.kernel.filename) == (["fast"], "/another/host/ab/kernel.py")
        tuned_here.write_text("found by coordinate descent")
        assert bundles.read_graph_entry(found).content == found.content


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("inductor", "../../elsewhere"),
        ("inductor", ""),
        ("aot_autograd", ".."),
        ("autotune", "../x.best_config"),
        ("autotune", "ab/../../x"),
        ("code", "/etc/passwd"),
        ("code", "fxgraph/ab"),
        ("triton", "../x"),
        ("triton", ".hidden"),
        ("precompile", "a\0b"),
        ("no kind of ours", "key"),
    ],
)
def test_a_key_that_names_no_cache_file_is_refused_and_nothing_written(kind: str, key: str, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    (packed / "K").mkdir(parents=True)
    (packed / "K" / "a.cubin").write_bytes(b"")
    (archive,) = cache_folders.read_artifacts(CacheFolders(inductor=tmp_path / "none", triton=packed))
    into = CacheFolders(inductor=tmp_path / "into" / "inductor", triton=tmp_path / "into" / "triton")
    with pytest.raises(ValueError, match="names no cache file"):
        restore_artifacts([Artifact(kind=kind, key=key, content=archive.content)], into)
    assert [path for path in (tmp_path / "into").rglob("*") if path.is_file()] == []


def test_a_process_that_saved_twice_loses_no_entry() -> None:
    with CacheArtifactManager.with_fresh_cache():
        for key in ("first", "second"):
            CacheArtifactManager.record_artifact("inductor", key, key.encode())
            saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        assert [artifact.key for artifact in bundles.split_bundle(saved[0])] == ["first", "second"]


def test_a_bundle_of_entries_is_split_into_the_same_entries() -> None:
    artifacts = [Artifact(kind="inductor", key="graph/guards", content=b"1"), Artifact(kind="code", key="ab/x.so", content=b"2")]
    again = bundles.split_bundle(make_bundle(artifacts))
    assert [(artifact.kind, artifact.key, artifact.content) for artifact in again] == [
        ("inductor", "graph", b"1"),
        ("autotune", "ab/x.so", b"2"),
    ]


def graph(guards: str, nanoseconds: int) -> Artifact:
    entry = SimpleNamespace(guards_expr=guards, _time_taken_ns=nanoseconds)
    return Artifact(kind=ArtifactKind.INDUCTOR, key="graph", content=pickle.dumps(entry))


def test_a_graph_under_other_guards_is_another_artifact_but_not_one_that_took_longer() -> None:
    one, slower, other = map(bundles.read_graph_entry, (graph("s0 < 9", 10**9), graph("s0 < 9", 2 * 10**9), graph("s0 >= 9", 1)))
    assert one.key == slower.key != other.key
    assert (one.cost_s, slower.cost_s) == (1.0, 2.0)
    assert one.key.startswith("graph/")


def test_an_entry_that_does_not_load_is_kept_by_its_content() -> None:
    broken = Artifact(kind=ArtifactKind.INDUCTOR, key="graph", content=b"no pickle")
    assert bundles.read_graph_entry(broken) == replace(broken, key=f"graph/{broken.digest[:16]}")


def test_torch_is_as_before_when_watching_ends() -> None:
    functions = [(AOTAutogradCache, "try_load"), (FxGraphCache, "load_with_key"), (PersistentCache, "lookup")]
    before = [owner.__dict__[name] for owner, name in functions]

    def compile_and_fail() -> None:
        with watch_caches():
            assert all(owner.__dict__[name] is not was for (owner, name), was in zip(functions, before, strict=True))
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        compile_and_fail()
    assert [owner.__dict__[name] for owner, name in functions] == before


def test_a_hit_counts_once_and_never_on_what_the_process_made_itself() -> None:
    use = CacheUsage(cost_s={("inductor", "given"): 5.0})
    tally = Tally(use)
    assert tally.hit(("inductor", "given"), otherwise_s=1.0, took_s=0.5) == 4.5
    assert tally.hit(("inductor", "given")) == 0
    tally.made(("inductor", "own"), 3.0)
    assert tally.hit(("inductor", "own")) == 0
    assert tally.hit(("inductor", "of unknown cost"), took_s=1.0) == 0
    assert (use.saved_s, use.hits) == (4.5, {"inductor": 2})


def test_a_frame_that_dynamo_starts_again_misses_only_if_its_last_lookup_did(monkeypatch: pytest.MonkeyPatch) -> None:
    use = CacheUsage()
    follower = _Follower(Tally(use))

    def look_up(frame: int, found: object) -> None:
        monkeypatch.setattr(CompileContext, "current_compile_id", lambda: CompileId(frame_id=frame, frame_compile_id=0))
        follower.load_aot(lambda: found)

    look_up(0, None)
    look_up(0, None)
    look_up(1, None)
    assert use.misses == {"aot_autograd": 2}
    look_up(0, object())
    assert use.misses == {"aot_autograd": 1}


def test_configuration_names_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_configuration()

    def changed() -> set[str]:
        now = torch_configuration()
        return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}

    assert changed() == set()
    with inductor_config.patch(shape_padding=not inductor_config.shape_padding):
        assert changed() == {"inductor.shape_padding"}
    with torch._dynamo.config.patch(recompile_limit=3):
        assert changed() == {"dynamo.recompile_limit"}
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        assert changed() == {"environment.TORCHINDUCTOR_MAX_AUTOTUNE"}
    with monkeypatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
            patch.setenv(name, "7")
        assert changed() == set(), "where and with how many threads says nothing of what is made"
    torch.set_float32_matmul_precision("high")
    try:
        assert "float32_matmul_precision" in changed()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_configuration_has_the_attention_backends_that_autograds_keys_leave_out() -> None:
    before = torch_configuration()
    assert "ptxas" in before
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert torch_configuration()["attention_backends"] != before["attention_backends"]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
