"""Gives each worker a share of the host's cores, so that concurrent trials do not slow down each other's compile.

Background: torch compiles with as many processes as it sees cores, up to 32. Four trials on a 64-core host would start 128 of
them next to four main threads, and whichever trial compiles longest decides how long the others take. So the workers that may
share a host divide its cores: worker i of N takes the i-th of N contiguous shares, and everything it starts (compile workers,
compilers, data-loader workers) inherits the affinity.

A file lock says which share is taken. The kernel releases it once the worker and everything it forked are gone, no matter how
they ended. Nothing here imports torch.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path

_SYSFS_CPUS = Path("/sys/devices/system/cpu")
_OWN_THREADS = Path("/proc/self/task")

THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables from which torch reads its number of threads; the first that is set counts."""

MAX_COMPILE_THREADS = 32  # torch's own limit on compile workers (`torch._inductor.config`)

_SLOT_TIMEOUT_S = 5.0
"""How long to wait for the slot of a worker that was killed: its children hold the lock until the reaper has killed them."""

_POLL_S = 0.05

CpuLocation = tuple[int, int]  # NUMA node of a logical CPU, and the lowest logical CPU of its physical core


def cpu_share(slot: int, num_shares: int) -> tuple[int, ...]:
    """Returns the logical CPUs of share number `slot`, from 0, of the CPUs that this process may use."""
    allowed = os.sched_getaffinity(0)
    return split_cpus(allowed, num_shares, {cpu: _cpu_location(cpu) for cpu in allowed})[slot]


def split_cpus(cpus: Collection[int], num_shares: int, locations: Mapping[int, CpuLocation]) -> list[tuple[int, ...]]:
    """Divides logical CPUs into contiguous shares of nearly equal size.

    CPUs are ordered by NUMA node, then by physical core. A physical core is split only if there are fewer cores than shares; if
    there are fewer logical CPUs than shares, some shares get the same CPU.
    """
    by_core: dict[CpuLocation, list[int]] = {}
    for cpu in sorted(cpus):
        by_core.setdefault(locations[cpu], []).append(cpu)
    whole = [by_core[place] for place in sorted(by_core)]
    if len(whole) < num_shares:
        whole = [[cpu] for core in whole for cpu in core]
    if len(whole) < num_shares:
        return [tuple(whole[slot % len(whole)]) for slot in range(num_shares)]
    bounds = _bounds([len(core) for core in whole], num_shares)
    return [tuple(sorted(cpu for core in whole[begin:end] for cpu in core)) for begin, end in pairwise(bounds)]


def _bounds(sizes: Sequence[int], num_shares: int) -> list[int]:
    """Returns the boundaries of the shares, each as close as possible to an equal split of the logical CPUs."""
    reached = [0, *accumulate(sizes)]
    bounds = [0]
    for share in range(1, num_shares):
        possible = range(bounds[-1] + 1, len(sizes) - (num_shares - share) + 1)
        ideal = share * reached[-1] / num_shares
        bounds.append(min(possible, key=lambda bound: abs(reached[bound] - ideal)))
    return [*bounds, len(sizes)]


@contextmanager
def hold_slot(
    num_slots: int, preferred: int | None = None, folder: Path | None = None, wait_s: float = _SLOT_TIMEOUT_S
) -> Iterator[int]:
    """Holds one of the host's slots until the block ends or the process dies.

    Waits up to `wait_s` for a free slot. After that it returns one that is taken: a trial on shared cores is better than none,
    and its `cpu_pressure` will show it.

    Args:
        preferred: The slot to wait for, such as the index of the worker's GPU; any slot if None or out of range.
        folder: Folder of the lock files; by default one that all sweeps of this user on this host share.
    """
    if preferred is not None and not 0 <= preferred < num_slots:
        preferred = None
    if num_slots == 1:  # nothing to divide, and no reason to wait for another sweep on this host
        yield 0
        return
    folder = folder or Path(tempfile.gettempdir()) / f"compile-sweep-cores-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = range(num_slots) if preferred is None else [preferred]
    gives_up_at = time.monotonic() + wait_s
    while (taken := _lock_slot(folder, num_slots, wanted)) is None and time.monotonic() < gives_up_at:
        time.sleep(_POLL_S)
    taken = taken or _lock_slot(folder, num_slots, range(num_slots))
    if taken is None:
        yield preferred or 0
        return
    index, descriptor = taken
    try:
        yield index
    finally:
        os.close(descriptor)


def bind_process(cpus: Collection[int]) -> None:
    """Restricts this process, all its threads, and everything it starts from now on to these logical CPUs.

    Also sets the thread counts that torch and its compiler read from the environment. If torch is already loaded (Ray Train loads
    it before a worker's function starts), the caller must set torch's number of threads as well.
    """
    for thread in _OWN_THREADS.iterdir():
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cpus)
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(len(cpus), MAX_COMPILE_THREADS))


def threads_of(environment: Mapping[str, str], num_cpus: int) -> tuple[int, str]:
    """Returns the number of threads that torch uses in a process with these variables, and the variable that says so, if any."""
    for name in THREADS:
        if (value := environment.get(name, "")).isdecimal() and int(value):
            return min(int(value), num_cpus), f"{name}={value}"
    return num_cpus, ""


def _lock_slot(folder: Path, num_slots: int, wanted: Collection[int]) -> tuple[int, int] | None:
    """Returns a free slot and the descriptor that holds its lock; None if all wanted slots are taken."""
    for index in wanted:
        descriptor = os.open(folder / f"{index}-of-{num_slots}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return index, descriptor
    return None


def _cpu_location(cpu: int) -> CpuLocation:
    """Reads a CPU's location from sysfs; defaults to a core of its own on node 0."""
    described = _SYSFS_CPUS / f"cpu{cpu}"
    nodes = [int(node.name.removeprefix("node")) for node in described.glob("node[0-9]*")]
    try:
        siblings = (described / "topology" / "thread_siblings_list").read_text(encoding="ascii")
        lowest = int(siblings.replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        lowest = cpu
    return (nodes[0] if nodes else 0, lowest)
