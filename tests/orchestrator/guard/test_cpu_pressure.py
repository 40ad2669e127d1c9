"""CPU pressure: its definition, on real processes, and on a kernel that does not report it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import REPOSITORY

from orchestrator.guard import cpu_pressure as module
from orchestrator.guard.cpu_pressure import CONTENDED_ABOVE, PressureGauge, interval_pressure, is_contended

FIGHT = """
import os, subprocess, sys, time
from orchestrator.guard.cpu_pressure import PressureGauge
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
gauge = PressureGauge(cores=1)
gauge.start()
spin = "import time\\nwhile time.process_time() < 1.0: pass"
children = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
while any(child.poll() is None for child in children):
    time.sleep(0.05)
print(gauge.stop())
"""


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "cores", "expected"),
    [
        (0.0, 0.0, 4, 0.0),  # nothing to do
        (1.0, 0.0, 4, 0.0),  # a core of its own
        (0.5, 0.5, 4, 0.5),  # one thread that shares its core evenly
        (2.0, 2.0, 4, 0.5),  # four that do
        (8.0, 8.0, 16, 0.5),
        (0.1, 0.1, 4, 0.1),  # mostly idle: a fraction of wall time, not of its running time
        (1.0, 1.0, 1, 1.0),  # two threads on one core: one of them waits at any time
        (4.0, 12.0, 4, 1.0),
    ],
)
def test_pressure_is_a_share_of_wall_time_whatever_the_number_of_threads(
    ran_s: float, waited_s: float, cores: int, expected: float
) -> None:
    assert interval_pressure(ran_s, waited_s, 1.0, cores) == pytest.approx(expected)
    assert interval_pressure(10 * ran_s, 10 * waited_s, 10.0, cores) == pytest.approx(expected)


def test_an_interval_without_length_has_none() -> None:
    assert interval_pressure(0.0, 0.0, 0.0, 4) == 0.0


@pytest.mark.slow
def test_children_that_fight_for_a_core_are_seen_from_their_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.check_output([sys.executable, "-c", FIGHT], env=environment, text=True, timeout=120)
    assert 0.5 < float(printed) <= 1.0


@pytest.mark.alone
def test_a_process_that_sleeps_waits_for_no_core() -> None:
    gauge = PressureGauge(cores=1)
    gauge.start()
    time.sleep(1.5)
    found = gauge.stop()
    assert found is not None
    assert found < 0.3  # its little work may have to wait on a busy machine


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel that does not report threads' times."""
    (tmp_path / str(os.getpid()) / "task" / str(os.getpid())).mkdir(parents=True)
    (tmp_path / str(os.getpid()) / "stat").write_text(f"{os.getpid()} (a (b) c) S 1 0")
    monkeypatch.setattr(module, "_PROC", tmp_path)
    return tmp_path


def test_pressure_is_not_known_where_the_kernel_says_nothing(proc: Path) -> None:
    gauge = PressureGauge(cores=1)
    gauge.start()
    assert gauge.stop() is None


@pytest.mark.parametrize(
    ("neighbours", "cpu_pressure", "contended"),
    [
        (0, 0.9, False),
        (0, None, False),
        (1, None, True),
        (1, CONTENDED_ABOVE, False),
        (3, CONTENDED_ABOVE + 0.01, True),
        (3, 0.0, False),
    ],
)
def test_contention_needs_a_neighbour_and_if_it_is_known_pressure(
    neighbours: int, cpu_pressure: float | None, contended: bool
) -> None:
    assert is_contended(neighbours, cpu_pressure) is contended
