"""Untrusted archives: bundles to import, artifacts to restore. One sentence or files below their folder; nothing runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import HOSTILE, flipped, nested, nothing_runs, said, texts, thoroughly, values
from hypothesis import given
from hypothesis import strategies as st

from compile_sweep.harness.compile_cache import bundles
from compile_sweep.harness.compile_cache import folders as cache_folders
from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.folders import ArtifactKind, CacheFolders
from compile_sweep.harness.compile_cache.transfer import make_bundle, restore_artifacts
from orchestrator import cache
from orchestrator.artifacts import SigningKey, open_store

KEY = SigningKey(b"k" * 32)


class Bomb:
    """Would run when unpickled, which shows as `pickle.find_class` before it can do anything."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("planted_payload",)


BOMB = pickle.dumps(Bomb())
CHOICE = {"system": {"hash": "abc"}, "path": ["addmm", "16x64", "highest"], "value": {"triton": 1.0}}


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name or "x"), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


GOOD = [
    Artifact(kind=ArtifactKind.INDUCTOR, key="fgraph/0123456789abcdef", content=BOMB),
    Artifact(kind=ArtifactKind.AOT_AUTOGRAD, key="agraph/0123456789abcdef", content=BOMB),
    Artifact(kind=ArtifactKind.AUTOTUNE, key="ab/cabc.best_config", content=b"{}"),
    Artifact(kind=ArtifactKind.CODE, key="cd/ccode.so", content=b"\x7fELF"),
    Artifact(kind=ArtifactKind.PGO, key="job", content=BOMB),
    Artifact(kind=ArtifactKind.PRECOMPILE, key="function", content=BOMB),
    Artifact(kind=ArtifactKind.CHOICES, key="abc/def", content=json.dumps(CHOICE).encode()),
    Artifact(kind=ArtifactKind.TRITON, key="KERNEL", content=zipped({"add.cubin": b"\x7fELF", "add.json": b'{"a": "b"}'})),
]
BUNDLE = make_bundle(GOOD)

climbing = st.sampled_from(
    ["..", "../x", "a/../..", "/etc/x", "a/b/c", "cache/abc", "locks/x", ".hidden", "a\\..\\b", "a\0b", "x" * 300]
)
names = climbing | texts | st.sampled_from(sorted({artifact.key for artifact in GOOD}))
kinds = st.sampled_from([*map(str, ArtifactKind)]) | texts
archives = st.dictionaries(
    names.filter(lambda name: "\0" not in name and "\ud800" not in name), st.binary(max_size=20), max_size=3
)
contents = (
    st.binary(max_size=60)
    | archives.map(zipped)
    | values.map(lambda value: json.dumps(value).encode())
    | st.builds(lambda name, value: json.dumps({**CHOICE, name: value}).encode(), st.sampled_from(sorted(CHOICE)), values)
    | flipped(GOOD[-1].content)
    | st.just(BOMB)
)
hostile = st.builds(Artifact, kind=kinds, key=names | st.builds("/".join, st.lists(names, max_size=3)), content=contents)


def sealed(body: bytes) -> bytes:
    """Adds the checksum that torch verifies, so that the content is read."""
    return zlib.crc32(body).to_bytes(4, "big") + body


def everything_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


@thoroughly
@given(st.binary(max_size=80) | flipped(BUNDLE[4:]).map(sealed) | flipped(BUNDLE) | st.binary(max_size=80).map(sealed))
def test_any_bundle_is_split_or_refused(content: bytes) -> None:
    with nothing_runs():
        try:
            found = bundles.split_bundle(content)
        except ValueError:
            return
    assert all(artifact.kind in list(ArtifactKind) for artifact in found)


@thoroughly
@given(st.lists(st.tuples(kinds, st.lists(st.tuples(names, contents), max_size=3)), max_size=3))
def test_a_bundle_of_hostile_names_is_refused_or_can_be_restored(tmp_path: Path, groups: list[Any]) -> None:
    writer = bundles.AppendingByteSerializer(serialize_fn=bundles._write_group)
    try:
        writer.extend(groups)
    except UnicodeEncodeError:  # torch's own format cannot represent such text
        return
    with nothing_runs():
        try:
            found = bundles.split_bundle(writer.to_bytes())
        except ValueError:
            return
    root = tmp_path / "restored"
    restore_artifacts(found, CacheFolders(inductor=root / "inductor", triton=root / "triton"))
    assert {path.relative_to(tmp_path).parts[0] for path in everything_below(tmp_path)} <= {"restored"}


@thoroughly
@given(hostile)
def test_a_hostile_artifact_is_refused_or_stays_below_its_folder(tmp_path: Path, artifact: Artifact) -> None:
    around = tmp_path / "around"
    folders = CacheFolders(inductor=around / "deep" / "down" / "inductor", triton=around / "deep" / "down" / "triton")
    before = everything_below(tmp_path)
    try:
        restore_artifacts([artifact], folders)
    except ValueError as error:
        said(error)
        assert everything_below(tmp_path) == before
        return
    new = everything_below(tmp_path) - before
    assert all(path.is_relative_to(folders.inductor) or path.is_relative_to(folders.triton) for path in new)
    assert not any(path.is_symlink() for path in new)


def test_an_artifact_that_may_be_restored_is_not_read_as_code(tmp_path: Path) -> None:
    """Restoring only writes files; torch unpickles the content when it compiles."""
    root = tmp_path / "restored"
    opened: list[str] = []
    for artifact in GOOD:
        restore_artifacts([artifact], CacheFolders(inductor=root / "inductor", triton=root / "triton"))
        opened.append(artifact.kind)
    assert len(everything_below(root)) == len(GOOD) + 1  # the kernel's folder has two
    with nothing_runs():
        assert {str(artifact.kind) for artifact in bundles.split_bundle(BUNDLE)} == {*map(str, opened)} - {"triton", "code"}


@pytest.mark.parametrize("key", ["../../x", "cache/../../x", "/etc/passwd", "cache//x", "", "cache/", "locks/x"])
def test_a_climbing_name_in_a_bundle_is_refused_by_name(key: str) -> None:
    writer = bundles.AppendingByteSerializer(serialize_fn=bundles._write_group)
    writer.extend([("autotune", [(key, json.dumps({"cache": {"a": {"b": {"c": 1}}}, "system": {"hash": "../x"}}).encode())])])
    with pytest.raises(ValueError, match="cannot be restored"):
        bundles.split_bundle(writer.to_bytes())


def test_a_bundle_that_claims_to_be_long_is_refused_at_once() -> None:
    huge = (2**64 - 1).to_bytes(8, "big")
    one = (1).to_bytes(8, "big")
    for body in (
        one + huge,
        one + one + b"x",
        one + (4).to_bytes(8, "big") + b"YQ==" + huge,
        one + (0).to_bytes(8, "big") + huge,
    ):
        with pytest.raises(ValueError, match=r"longer than it is|base64"):
            bundles.split_bundle(sealed(body))


def test_timings_survive_a_bundle(tmp_path: Path) -> None:
    found = [artifact for artifact in bundles.split_bundle(BUNDLE) if artifact.kind == ArtifactKind.CHOICES]
    restore_artifacts(found, CacheFolders(inductor=tmp_path / "inductor", triton=tmp_path / "triton"))
    assert json.loads((tmp_path / "inductor" / "cache" / "abc").read_text())["cache"]["addmm"]["16x64"]["highest"] == {
        "triton": 1.0
    }


def test_an_archive_that_unpacks_to_more_than_it_may_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folders, "_MOST_UNPACKED_BYTES", 2**20)
    bomb = Artifact(kind=ArtifactKind.TRITON, key="KERNEL", content=zipped({"a": bytes(2**20), "b": b"x"}))
    assert len(bomb.content) < 2000
    with pytest.raises(ValueError, match="cannot be restored"):
        cache_folders.unpack_kernel(bomb)


def test_a_link_in_an_archive_is_a_file(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("link.json")
    info.external_attr = 0o120777 << 16
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    restore_artifacts(
        [Artifact(kind=ArtifactKind.TRITON, key="KERNEL", content=packed.getvalue())],
        CacheFolders(inductor=tmp_path, triton=tmp_path),
    )
    assert not (tmp_path / "KERNEL" / "link.json").is_symlink()
    assert (tmp_path / "KERNEL" / "link.json").read_text() == "/etc/passwd"


@thoroughly
@given(st.binary(max_size=60) | flipped(BUNDLE[4:]).map(sealed) | st.just(nested(50_000).encode()))
def test_import_publishes_or_says_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bundle").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILE_SWEEP_CACHE_KEY", KEY.secret.hex())
        code = cache.main(["import", str(tmp_path / "bundle"), "--cache-store", str(tmp_path / "store")])
    assert code in (0, 2)


def test_what_was_imported_is_signed_and_still_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_SWEEP_CACHE_KEY", KEY.secret.hex())
    (tmp_path / "bundle").write_bytes(BUNDLE)
    words = ["--cache-store", str(tmp_path / "store")]
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    for command in (["import", str(tmp_path / "bundle")], ["list"], ["verify"], ["show", "import of bundle"]):
        assert cache.main([*command, *words]) == 0
    assert cache.main(["export", "import of bundle", str(tmp_path / "again"), *words]) == 0
    assert ran == []
    assert open_store(str(tmp_path / "store"), key=KEY).manifests().refused == ()


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_special_names_no_file(tmp_path: Path, text: str) -> None:
    folders = CacheFolders(inductor=tmp_path / "a" / "b", triton=tmp_path / "a" / "c")
    for kind in ArtifactKind:
        for key in (text, f"{text}/x", f"x/{text}", f"f{text}/x"):
            before = everything_below(tmp_path)
            try:
                restore_artifacts([Artifact(kind=kind, key=key, content=b"{}")], folders)
            except ValueError:
                assert everything_below(tmp_path) == before
    assert {path.relative_to(tmp_path).parts[0] for path in everything_below(tmp_path)} <= {"a"}
