"""Decisions that several workers must make alike: they train together, so a worker with an extra step would wait forever.

Also connects workers that train together, through a store that listens on one address, not on every interface of the host.
Torch's own rendezvous (`env://`) listens on all of them without authentication (torch 2.11 to 2.13), even for a single worker.
Here the socket is bound before the store gets it.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

# Torch.distributed re-exports it in builds that have it, which types cannot express.
from torch._C._distributed_c10d import TCPStore

Value = TypeVar("Value")


def num_workers() -> int:
    """Number of workers that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agreed_numbers(values: Sequence[float], device: torch.device) -> list[float]:
    """Returns worker 0's numbers in every worker; all must pass equally many."""
    if num_workers() == 1:
        return list(values)
    shared = torch.tensor(values, device=device, dtype=torch.float64)
    dist.broadcast(shared, src=0)
    return [float(value) for value in shared.cpu()]


def agreed(decision: bool, device: torch.device) -> bool:
    """Returns worker 0's decision in every worker."""
    return bool(agreed_numbers([float(decision)], device)[0])


def everywhere(condition: bool, device: torch.device) -> bool:
    """Tells, in every worker, whether the condition holds in all of them."""
    if num_workers() == 1:
        return condition
    held = torch.tensor(float(condition), device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN)
    return bool(held.item())


def largest_everywhere(values: Sequence[int], device: torch.device) -> list[int]:
    """Returns the element-wise maximum over workers; all must pass equally many."""
    if num_workers() == 1:
        return list(values)
    shared = torch.tensor(values, device=device, dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(value) for value in shared.cpu()]


def by_rank(value: Value) -> list[Value]:
    """Returns the value of each worker, by rank; plain values only, because they are pickled."""
    if num_workers() == 1:
        return [value]
    found: list[Value | None] = [None] * num_workers()
    dist.all_gather_object(found, value)
    return found  # type: ignore[return-value]  # every place was filled


_served: list[TCPStore] = []


def serve(address: str, num_workers: int, timeout_s: float) -> int:
    """Starts the store in this process, on this address only; returns its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        port = int(listener.getsockname()[1])
        _served[:] = [
            TCPStore(
                address,
                port,
                num_workers,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        ]
    return port


def join(backend: str, *, rank: int, num_workers: int, address: str, port: int, timeout_s: float) -> None:
    """Makes this process a member of the group at that store, which rank 0 has started.

    If the address is a loopback address, the group's own sockets stay on the loopback, too.
    """
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if address.startswith("127."):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    store = _served[0] if rank == 0 else TCPStore(address, port, num_workers, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_workers, timeout=timeout)
