"""A process that is killed while a compiler writes leaves nothing on which another one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor import codecache
from torch._inductor.exc import CppCompileError

from compile_sweep.harness import toolchain
from compile_sweep.harness.compile_cache.artifact import Artifact, is_cut_short
from compile_sweep.harness.compile_cache.folders import CacheFolders, read_artifacts

COMPILES = """
import torch
from compile_sweep.harness.toolchain import compile_whole_files
compile_whole_files()
print(torch.compile(lambda x: (x.relu() * 2).sum(), fullgraph=True)(torch.ones(64)).item())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A compiled library."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "f.c").write_text("int f(void) { return 7; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "f.so", folder / "f.c"], check=True)
    return (folder / "f.so").read_bytes()


def test_a_part_of_a_library_is_told_from_a_whole_one(library: bytes) -> None:
    def cut(name: str, content: bytes) -> bool:
        return is_cut_short(name, content[:64], len(content))

    assert not cut("f.so", library)
    assert all(cut("f.so", library[:size]) for size in (0, 10, 63, 64, 1000, len(library) // 2, len(library) - 1))
    assert cut("f.so", bytes(len(library)))  # its head is written last
    assert not cut("f.h.gch", b"gpch.014")  # nothing in it says how long it is
    assert not cut("kernel.cubin", b"text")


def test_half_a_library_is_neither_published_nor_restored(library: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "inductor" / "ab"
    folder.mkdir(parents=True)
    (folder / "whole.so").write_bytes(library)
    (folder / "half.so").write_bytes(library[:4000])
    folders = CacheFolders(inductor=tmp_path / "inductor", triton=tmp_path / "triton")
    assert [artifact.key for artifact in read_artifacts(folders)] == ["ab/whole.so"]
    assert Artifact(kind="code", key="ab/half.so", content=library[:4000]).is_cut_short
    assert not Artifact(kind="inductor", key="ab", content=b"an entry").is_cut_short


class Builder:
    """Torch's builder of one file, as far as it is used; compiles by writing some bytes at a time."""

    def __init__(self, target: Path, content: bytes) -> None:
        self.target, self.content = target, content
        self._output = f"-o {target}"
        self.built: list[str] = []

    def get_target_file_path(self) -> str:
        return str(self.target)

    def build(self) -> None:
        written = Path(self._output.removeprefix("-o "))
        self.built.append(written.name)
        written.write_bytes(self.content[:100])
        assert not self.target.exists(), "half a file is where others look for it"
        written.write_bytes(self.content)


@pytest.mark.parametrize("there", [None, "half", "whole"])
def test_a_file_appears_complete_and_half_a_file_is_replaced(
    there: str | None, library: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    builder = Builder(tmp_path / "f.so", library)
    if there is not None:
        builder.target.write_bytes(library if there == "whole" else library[:4000])
    toolchain._compile_whole(str(tmp_path / "lock"), [builder])
    assert builder.target.read_bytes() == library
    assert builder.built == ([] if there == "whole" else [f"f.so.{os.getpid()}.part"])
    assert ("f.so was cut short" in capfd.readouterr().err) == (there == "half")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.so", "lock"]


def test_a_torch_without_that_function_compiles_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(codecache, "_worker_compile_cpp")
    toolchain.compile_whole_files()
    assert not hasattr(codecache, "_worker_compile_cpp")


class CppBuilder(Builder):
    """Compiles C++ with a precompiled header, as torch does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "f.so", b"")
        (folder / "h.h").write_text("#include <cstddef>\nstruct Own {};\n")
        (folder / "f.cpp").write_text("Own f() { return {}; }")
        self._build_option = SimpleNamespace(precompiled_header=str(folder / "h.h"))
        self.folder = folder

    def build(self) -> None:
        command = ["g++", "-shared", "-fPIC", "-include", "h.h", "f.cpp", "-o", self._output.removeprefix("-o ")]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CppCompileError(command, done.stderr)


@pytest.mark.parametrize("left", [100, 5000, -4096, -1])
def test_a_precompiled_header_that_was_cut_short_is_removed(left: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    builder = CppBuilder(tmp_path)
    precompiled = tmp_path / "h.h.gch"
    subprocess.run(["g++", "-x", "c++-header", "-fPIC", "h.h", "-o", precompiled], cwd=tmp_path, check=True)
    os.truncate(precompiled, left % precompiled.stat().st_size)
    with pytest.raises(CppCompileError):
        builder.build()
    toolchain._compile_whole(str(tmp_path / "lock"), [builder])
    assert builder.target.exists()
    assert not precompiled.exists()
    assert "h.h.gch was cut short" in capfd.readouterr().err


def test_an_error_in_the_code_is_raised_and_its_header_stays(tmp_path: Path) -> None:
    builder = CppBuilder(tmp_path)
    (tmp_path / "f.cpp").write_text("Own f() { return 7; }")
    (tmp_path / "h.h.gch").touch()
    with pytest.raises(CppCompileError, match="could not convert"):
        toolchain._compile_whole(str(tmp_path / "lock"), [builder])
    assert (tmp_path / "h.h.gch").exists()


@pytest.mark.slow
@pytest.mark.nightly("compiles twice with new headers; the tests above do so with a header of two lines")
def test_a_precompiled_header_and_a_library_that_were_cut_short_cost_no_setting_its_trial(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "USER": "someone"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def compiles() -> str:
        found = subprocess.run(
            [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert found.returncode == 0, found.stderr[-3000:]
        assert float(found.stdout) == 128.0
        return found.stderr

    assert "cut short" not in compiles()
    (headers,) = tmp_path.glob("torchinductor_*/precompiled_headers")
    (precompiled,) = headers.glob("*.gch")
    libraries = list(tmp_path.glob("torchinductor_*/*/*.main.so"))
    os.truncate(precompiled, 5000)
    for path in libraries:
        os.truncate(path, 1000)
    said = compiles()
    assert libraries
    assert all(f"{path} was cut short" in said for path in (precompiled, *libraries))
    assert not precompiled.exists()
    assert not [path for path in libraries if is_cut_short(path.name, path.read_bytes()[:64], path.stat().st_size)]


def test_a_process_that_is_killed_while_it_builds_leaves_no_file_of_that_name(library: bytes, tmp_path: Path) -> None:
    class Killed(Builder):
        def build(self) -> None:
            Path(self._output.removeprefix("-o ")).write_bytes(self.content[:100])
            os.kill(os.getpid(), signal.SIGKILL)

    builder = Killed(tmp_path / "f.so", library)
    if (child := os.fork()) == 0:
        toolchain._compile_whole(str(tmp_path / "lock"), [builder])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not builder.target.exists()
    toolchain._compile_whole(str(tmp_path / "lock"), [Builder(builder.target, library)])  # its lock is free
    assert builder.target.read_bytes() == library
