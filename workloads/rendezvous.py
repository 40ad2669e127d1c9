"""Where workers that train together find each other: a store that listens on one address, not on every interface of the host.

torch's own rendezvous (`env://`) starts its store on all of them, without asking who connects (torch 2.11 to 2.13), also for a
single worker. Here the socket is bound before the store gets it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it where it is built in, which types cannot say

_served: list[TCPStore] = []


def serve(address: str, num_workers: int, timeout_s: float) -> int:
    """Starts the store in this process, on this address of the host alone; returns its port."""
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
    """Makes this process a member of the group whose store is there; rank 0 has started it.

    Between workers of one host that is known by a loopback address, the group's own sockets stay on the loopback, too.
    """
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if address.startswith("127."):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    store = _served[0] if rank == 0 else TCPStore(address, port, num_workers, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_workers, timeout=timeout)
