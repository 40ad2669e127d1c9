"""Shares of a host's cores: disjoint, contiguous, held by a process while it lives, and inherited by its children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from samples import REPOSITORY

from orchestrator.guard.cores import CpuLocation, cpu_share, hold_slot, split_cpus, threads_of

HOLDER = """
import sys, time
from pathlib import Path
from orchestrator.guard.cores import hold_slot
with hold_slot(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[1])) as index:
    print(index, flush=True)
    time.sleep(60)
"""

BOUND = """
import json, os, subprocess, sys, threading, time
from orchestrator.guard.cores import bind_process
def seen(): return sorted(os.sched_getaffinity(0))
before, done, old = [], threading.Event(), []
thread = threading.Thread(target=lambda: (done.wait(), old.extend(seen())))
thread.start()
bind_process([int(sys.argv[1])])
done.set()
thread.join()
code = "import os; print(*os.sched_getaffinity(0), os.environ['TORCHINDUCTOR_COMPILE_THREADS'], os.environ['OMP_NUM_THREADS'])"
print(json.dumps([seen(), old, subprocess.check_output([sys.executable, "-c", code], text=True).strip()]))
"""


def places(cpus: int, *, nodes: int = 1, threads: int = 1) -> dict[int, CpuLocation]:
    """A host as numbered by Linux: second hyperthreads come after all first ones; cores are assigned to nodes in order."""
    num_cores = cpus // threads
    return {cpu: ((cpu % num_cores) * nodes // num_cores, cpu % num_cores) for cpu in range(cpus)}


def test_cores_are_divided_in_order() -> None:
    assert split_cpus(range(8), 4, places(8)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert split_cpus(range(8), 1, places(8)) == [tuple(range(8))]
    assert split_cpus(range(7), 2, places(7)) == [(0, 1, 2), (3, 4, 5, 6)]
    assert split_cpus({9, 3, 4, 8}, 2, places(16)) == [(3, 4), (8, 9)]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (4, "")),
        ({"OMP_NUM_THREADS": "2"}, (2, "OMP_NUM_THREADS=2")),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "3"}, (3, "MKL_NUM_THREADS=3")),
        ({"OMP_NUM_THREADS": "64"}, (4, "OMP_NUM_THREADS=64")),
        ({"OMP_NUM_THREADS": "2,1", "MKL_NUM_THREADS": "0"}, (4, "")),
    ],
)
def test_torch_uses_as_many_threads_as_its_variables_say(variables: dict[str, str], expected: tuple[int, str]) -> None:
    assert threads_of(variables, 4) == expected


def test_the_hyperthreads_of_a_core_stay_together() -> None:
    assert split_cpus(range(8), 2, places(8, threads=2)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert split_cpus(range(8), 8, places(8, threads=2)) == [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]


def test_a_share_stays_on_one_node_where_the_numbers_allow() -> None:
    interleaved = {cpu: (cpu % 2, cpu) for cpu in range(8)}
    assert split_cpus(range(8), 2, interleaved) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert split_cpus(range(16), 4, places(16, nodes=2, threads=2))[2:] == [(4, 5, 12, 13), (6, 7, 14, 15)]


def test_more_shares_than_cores_have_one_each_and_share_it() -> None:
    assert split_cpus(range(2), 5, places(2)) == [(0,), (1,), (0,), (1,), (0,)]


@example(
    cpus={0, 1, 2, 3, 58, 10, 42, 25, 26, 57}, num_shares=2, nodes=1, threads=2
)  # some cores with both threads, some with one
@given(
    cpus=st.sets(st.integers(0, 63), min_size=1),
    num_shares=st.integers(1, 16),
    nodes=st.integers(1, 4),
    threads=st.sampled_from([1, 2]),
)
def test_every_core_belongs_to_one_share_of_equal_size(cpus: set[int], num_shares: int, nodes: int, threads: int) -> None:
    shares = split_cpus(cpus, num_shares, places(64, nodes=nodes, threads=threads))
    assert len(shares) == num_shares
    assert set().union(*shares) <= cpus
    assert all(shares)
    if num_shares <= len(cpus):
        assert sorted(cpu for share in shares for cpu in share) == sorted(cpus)
        assert max(map(len, shares)) - min(map(len, shares)) <= 2 * (threads - 1) + 1


def test_the_shares_of_this_host_are_of_what_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    assert set(cpu_share(0, 1)) == allowed
    assert set(cpu_share(0, 2)) | set(cpu_share(1, 2)) == allowed


def start_holder(folder: Path, num_slots: int, preferred: int) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(num_slots), str(preferred)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == f"{preferred}\n"
    return holder


def test_a_slot_is_held_by_one_process_until_it_dies_however_it_dies(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, 3, preferred=0)
    try:
        with hold_slot(3, None, tmp_path) as mine, hold_slot(3, None, tmp_path) as next_one:
            assert (mine, next_one) == (1, 2)
        with hold_slot(3, None, tmp_path) as free_again:
            assert free_again == 1
    finally:
        holder.kill()
        holder.communicate()
    with hold_slot(3, None, tmp_path) as freed:
        assert freed == 0


def test_the_preferred_slot_is_waited_for_while_its_last_holder_goes(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, 2, preferred=1)
    holder.kill()  # without waiting for it: it may still be ending
    try:
        with hold_slot(2, 1, tmp_path, wait_s=30) as mine:
            assert mine == 1
    finally:
        holder.communicate()


def test_a_slot_that_nobody_leaves_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with hold_slot(2, 1, tmp_path) as mine:
        began = time.monotonic()
        with hold_slot(2, 1, tmp_path, wait_s=0.2) as other:
            assert (mine, other) == (1, 0)
            with hold_slot(2, 1, tmp_path, wait_s=0.2) as shared:
                assert shared == 1
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("preferred", [7, -1])
def test_a_preference_out_of_range_is_none(tmp_path: Path, preferred: int) -> None:
    with hold_slot(2, preferred, tmp_path) as mine:
        assert mine == 0


def test_all_threads_and_children_are_bound() -> None:
    cpu = max(os.sched_getaffinity(0))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.check_output([sys.executable, "-c", BOUND, str(cpu)], env=environment, text=True, timeout=60)
    assert json.loads(printed) == [[cpu], [cpu], f"{cpu} 1 1"]
