"""The C++ headers are made once for a host, however many trials begin at the same time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WARMS = """
import subprocess, sys, time
import compile_sweep.harness.toolchain as toolchain

folder, code = sys.argv[1], int(sys.argv[2])

def compiles(*words, **options):
    print("compiles", flush=True)
    time.sleep(0.5)
    return subprocess.CompletedProcess(words, code)

toolchain.default_cache_dir = lambda: folder
toolchain.subprocess = type("Nothing", (), {"run": staticmethod(compiles)})
print("ready", flush=True)
sys.stdin.readline()
toolchain.warm_cpp_headers()
"""


def begun(folder: Path, code: int = 0) -> subprocess.Popen[str]:
    """A process that is about to make the headers; its compile takes half a second and ends with the code."""
    words = [sys.executable, "-c", WARMS, str(folder), str(code)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compiles_of(*processes: subprocess.Popen[str]) -> list[str]:
    """What each printed, once all are ready and go on together."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return said


@pytest.mark.slow
def test_of_processes_that_begin_together_one_makes_the_headers(tmp_path: Path) -> None:
    said = compiles_of(*(begun(tmp_path) for _ in range(3)))
    assert sorted(said) == ["", "", "compiles\n"]
    assert compiles_of(begun(tmp_path)) == [""]


@pytest.mark.slow
def test_headers_that_could_not_be_made_are_tried_again(tmp_path: Path) -> None:
    for code in (1, -9, 0):
        assert compiles_of(begun(tmp_path, code)) == ["compiles\n"]
    assert compiles_of(begun(tmp_path)) == [""]
