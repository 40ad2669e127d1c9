"""Arguments that the commands of `analysis` share."""

from __future__ import annotations

import subprocess
import sys


def test_a_reader_that_stops_before_the_end_is_no_traceback() -> None:
    program = "from compile_sweep.command_line import run; raise SystemExit(run(lambda: print('x' * 10_000_000) or 0))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.read(10) == b"x" * 10
        writer.stdout.close()
        assert writer.stderr.read() == b""
        assert writer.wait(60) == 1


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    program = "from compile_sweep.command_line import run; raise SystemExit(run(lambda: print('x' * 10_000) or 0))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written (No space left on device); send it elsewhere\n"
