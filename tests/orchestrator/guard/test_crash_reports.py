"""What a dead worker's log says about its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from samples import REPOSITORY

from orchestrator.guard import watchdog
from orchestrator.guard.watchdog import OOM_NOTE, CrashReport, parse_crash_report

DIES = """
import sys
from orchestrator.guard import watchdog
log = open(sys.argv[1], "a")
watchdog.log_crashes(log)
{how}
"""


def left_by(folder: Path, how: str) -> CrashReport:
    """Returns the report of a real process that dies, ignoring what was in its log before."""
    before = watchdog.log_sizes(folder)
    command = [sys.executable, "-c", DIES.format(how=how), str(folder / "worker-0.log")]
    subprocess.run(command, timeout=60, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    return watchdog.read_crash_report(folder, before)


def test_a_fatal_signal_is_told_in_pythons_words(tmp_path: Path) -> None:
    assert left_by(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").fatal_signal == "Segmentation fault"
    assert left_by(tmp_path, "import os; os.abort()").fatal_signal == "Aborted"


def test_a_deadline_is_told(tmp_path: Path) -> None:
    assert left_by(tmp_path, "watchdog.set_deadline(0.1, log); import time; time.sleep(30)") == CrashReport(timed_out=True)


def test_what_an_earlier_attempt_left_is_not_this_ones(tmp_path: Path) -> None:
    left_by(tmp_path, "import os; os.abort()")
    assert left_by(tmp_path, "import os; os._exit(7)") == CrashReport()


def test_an_out_of_memory_kill_is_told() -> None:
    assert parse_crash_report(f"steady\n{OOM_NOTE} 1 process of this host as the worker went\n") == CrashReport(oom_killed=True)


def test_words_like_it_are_no_evidence() -> None:
    text = "the log says: Fatal Python error: no\nTimeout (s)!\nRuntimeError: Timeout (0:00:01)! reached\n"
    assert parse_crash_report(text) == CrashReport()


def test_what_torch_compiled_again_is_told() -> None:
    line, text = "V1127 04:54:31.247000 26 torch/_dynamo/guards.py:4760] [0/{0}] [__recompiles] ", ""
    for number, guards in ((1, ["0/0: size mismatch at index 1. expected 223, actual 255"]), (2, ["0/1: first", "0/0: second"])):
        told = ["Recompiling function forward in model.py:3", "    triggered by the following guard failure(s):"]
        text += "".join(f"{line.format(number)}{one}\n" for one in [*told, *(f"    - {guard}" for guard in guards)])
    assert parse_crash_report(f"{text}steady\n").recompiles == (
        "forward (model.py:3): size mismatch at index 1. expected 223, actual 255",
        "forward (model.py:3): first (one of 2 graphs, none of which fits)",
    )


def test_of_a_long_log_its_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("x" * 3_000_000 + "\nFatal Python error: Bus error\n\nThread 0x0:\n")
    assert watchdog.read_crash_report(tmp_path, {}).fatal_signal == "Bus error"


def test_where_there_is_no_log_there_is_no_evidence(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert watchdog.read_crash_report(nowhere, watchdog.log_sizes(nowhere)) == CrashReport()
