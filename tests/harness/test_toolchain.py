"""C++ headers are built, and vector instructions checked, once per host, however many trials begin at the same time."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch._inductor import cpp_builder, cpu_vec_isa
from torch._inductor.exc import InvalidCxxCompiler

from compile_sweep.harness import toolchain


@pytest.mark.slow
def test_of_trials_that_begin_together_one_makes_the_headers_and_a_failure_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes, because a file's lock excludes whoever has opened the file anew."""
    compiled: list[int] = []

    def together(*codes: int) -> int:
        """Returns how many of these trials compile, given the exit code that the compile of each would have."""
        begin, before = threading.Barrier(len(codes)), len(compiled)

        def trial(code: int) -> None:
            begin.wait()
            code_of[threading.get_ident()] = code
            toolchain.warm_cpp_headers()

        with ThreadPoolExecutor(len(codes)) as pool:
            list(pool.map(trial, codes))
        return len(compiled) - before

    def compiles(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
        compiled.append(code := code_of[threading.get_ident()])
        time.sleep(0.2)
        return subprocess.CompletedProcess(words, code)

    code_of: dict[int, int] = {}
    monkeypatch.setattr(toolchain, "default_cache_dir", lambda: str(tmp_path / "new"))
    monkeypatch.setattr(toolchain.subprocess, "run", compiles)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "false")
    assert [together(1), together(-9), together(0, 0, 0), together(0)] == [1, 1, 1, 0]
    # Torch would not use these headers for the same version in another environment, or for another compiler.
    monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    assert [together(0), together(0)] == [1, 0]
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "true")
    assert [together(0), together(0)] == [1, 0]
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", Mock(side_effect=InvalidCxxCompiler))
    assert together(0) == 0  # which is for the trial to report


def test_a_later_process_knows_what_the_checks_of_vector_instructions_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    answers: list[list[bool]] = []

    def check(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        checked.append(code)
        return code == "first"

    def ask() -> None:
        isa = cpu_vec_isa.VecAVX2()
        answers.append([isa.check_build(code) for code in ("first", "second")])

    monkeypatch.setattr(toolchain, "cpp_header_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", ask)
    toolchain.check_vector_instructions()
    toolchain.check_vector_instructions()
    assert answers == [[True, False], [True, False]]
    assert checked == ["first", "second"]
