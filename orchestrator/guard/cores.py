"""A share of the host's cores for each worker, so that trials side by side do not slow each other's compile.

Background: torch compiles with as many processes as it sees cores, up to 32. Four trials on a host of 64 cores would start
128 of them beside four main threads, and whichever compiles longest decides how long the others take. So the workers that may
be on a host at once divide its cores among themselves: worker i of N takes the i-th of N contiguous parts, and everything it
starts (compile workers, compilers, data-loader workers) inherits the affinity.

Which part is free is held by a lock on a file, which the kernel releases when the worker and what it forked are gone, however
they went. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_PROCESS_THREADS = Path("/proc/self/task")

MOST_COMPILE_THREADS = 32
"""Torch's own limit, above which it starts no more compile workers on its own (`torch._inductor.config`)."""

_WAIT_S = 5.0
"""For the slot of a worker that was killed: what it forked holds it until the reaper has seen to it."""

_POLL_S = 0.05

Place = tuple[int, int]
"""Of a logical CPU: its NUMA node, and the lowest logical CPU of the same physical core."""


def share_of(slot: int, num_shares: int) -> tuple[int, ...]:
    """The logical CPUs of one share of those this process may use.

    Args:
        slot: which share, from 0.
        num_shares: into how many the host is divided.
    """
    allowed = os.sched_getaffinity(0)
    return split(allowed, num_shares, {cpu: _place(cpu) for cpu in allowed})[slot]


def split(cpus: Collection[int], num_shares: int, places: Mapping[int, Place]) -> list[tuple[int, ...]]:
    """Divides logical CPUs into contiguous shares of as equal size as can be.

    Neighbours are CPUs of one physical core, then of one NUMA node. A physical core is divided only where there are fewer of
    them than shares; where there are fewer logical CPUs than shares, several shares have the same one.

    Args:
        cpus: what is divided.
        num_shares: how many shares.
        places: of each CPU.
    """
    by_core: dict[Place, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(places[cpu], []).append(cpu)
    whole = [by_core[place] for place in sorted(by_core)]
    if len(whole) < num_shares:
        whole = [[cpu] for core in whole for cpu in core]
    if len(whole) < num_shares:
        return [tuple(whole[slot % len(whole)]) for slot in range(num_shares)]
    bounds = _bounds([len(core) for core in whole], num_shares)
    return [tuple(sorted(cpu for core in whole[begin:end] for cpu in core)) for begin, end in pairwise(bounds)]


def _bounds(sizes: Sequence[int], num_shares: int) -> list[int]:
    """Where shares of so many cores begin and end, each as near as can be to where equal shares of logical CPUs would."""
    reached = [0, *accumulate(sizes)]
    bounds = [0]
    for share in range(1, num_shares):
        possible = range(bounds[-1] + 1, len(sizes) - (num_shares - share) + 1)
        ideal = share * reached[-1] / num_shares
        bounds.append(min(possible, key=lambda bound: abs(reached[bound] - ideal)))
    return [*bounds, len(sizes)]


@contextmanager
def slot(num_slots: int, preferred: int | None = None, folder: Path | None = None, wait_s: float = _WAIT_S) -> Iterator[int]:
    """Holds one of the host's slots while the block lasts, or until the process dies.

    A slot that nobody else holds is given as long as there is one within `wait_s`; after that one that somebody holds, because
    a trial on shared cores is better than none, and its `cpu_pressure` will say so.

    Args:
        num_slots: workers that may be on this host at once.
        preferred: the slot to wait for, such as the index of the worker's GPU; any if None or out of range.
        folder: of the lock files; by default one for all sweeps of this user on this host.
        wait_s: how long to wait.
    """
    if preferred is not None and not 0 <= preferred < num_slots:
        preferred = None
    if num_slots == 1:  # nobody to divide with, and a second sweep on this host is not this one's to wait for
        yield 0
        return
    folder = folder or Path(tempfile.gettempdir()) / f"compile-sweep-cores-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = range(num_slots) if preferred is None else [preferred]
    gives_up_at = time.monotonic() + wait_s
    while (taken := _lock_one(folder, num_slots, wanted)) is None and time.monotonic() < gives_up_at:
        time.sleep(_POLL_S)
    taken = taken or _lock_one(folder, num_slots, range(num_slots))
    if taken is None:
        yield preferred or 0
        return
    index, descriptor = taken
    try:
        yield index
    finally:
        os.close(descriptor)


def bind(cpus: Collection[int]) -> None:
    """Keeps this process, every thread it has and whatever it starts from now on to these logical CPUs.

    Torch may be loaded already (Ray Train does so before a worker's function starts) and then has to be told its number of
    threads besides; the compiler, which is not, reads it from the environment.
    """
    for thread in _PROCESS_THREADS.iterdir():
        with suppress(OSError):  # ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(len(cpus), MOST_COMPILE_THREADS))


def _lock_one(folder: Path, num_slots: int, wanted: Collection[int]) -> tuple[int, int] | None:
    """A slot and the descriptor that holds it; None if all of the wanted ones are held."""
    for index in wanted:
        descriptor = os.open(folder / f"{index}-of-{num_slots}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return index, descriptor
    return None


def _place(cpu: int) -> Place:
    """Where the kernel says a logical CPU is; alone on node 0 where it says nothing."""
    described = _CPUS / f"cpu{cpu}"
    nodes = [int(node.name.removeprefix("node")) for node in described.glob("node[0-9]*")]
    try:
        siblings = (described / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        lowest = int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        lowest = cpu
    return (nodes[0] if nodes else 0, lowest)
