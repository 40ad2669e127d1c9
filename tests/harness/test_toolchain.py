"""C++ headers are built, and vector instructions checked, once per host, however many trials begin at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor import cpu_vec_isa

from compile_sweep.harness import toolchain

WARMS = """
import json, os, subprocess, sys, time
import compile_sweep.harness.toolchain as toolchain

folder, rounds = sys.argv[1], json.loads(sys.argv[2])
toolchain.default_cache_dir = lambda: folder

def compiled(code, start):
    def compiles(*words, **options):
        os.write(1, b"compiles ")
        time.sleep(0.5)
        return subprocess.CompletedProcess(words, code)

    toolchain.subprocess = type("Nothing", (), {"run": staticmethod(compiles)})
    os.read(start, 1)
    toolchain.warm_cpp_headers()

for codes in rounds:
    start, begin = os.pipe()
    children = []
    for code in codes:
        if (child := os.fork()) == 0:
            try:
                compiled(code, start)
            finally:
                os._exit(int(sys.exc_info()[0] is not None))
        children.append(child)
    os.write(begin, b"x" * len(codes))
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(codes)
    os.write(1, b"| ")
"""


@pytest.mark.slow
def test_of_processes_that_begin_together_one_makes_the_headers_and_a_failure_is_tried_again(tmp_path: Path) -> None:
    # For processes that begin together, the exit code that the compile of each would have.
    rounds = [[1], [-9], [0, 0, 0], [0]]
    command = [sys.executable, "-c", WARMS, str(tmp_path / "new"), json.dumps(rounds)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert [one.count("compiles") for one in said.split("|")[:-1]] == [1, 1, 1, 0]


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
