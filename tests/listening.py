"""The addresses that processes listen on, according to the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path

_LISTENS = "0A"
"""State of listening TCP sockets in /proc/net."""


def addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Returns address and port of these processes' sockets that wait for others: listening TCP, bound UDP."""
    bound = dict(_bound())
    return {bound[inode] for pid in pids for inode in _sockets(pid) if inode in bound}


def is_loopback(address: str) -> bool:
    """Tells whether only this host can reach it; an IPv6 socket may represent an IPv4 address."""
    found = ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _bound() -> Iterator[tuple[str, tuple[str, int]]]:
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            remote = fields[2].partition(":")[0]
            if fields[3] == _LISTENS if table.startswith("tcp") else not remote.strip("0"):
                address, _, port = fields[1].partition(":")
                raw = bytes.fromhex(address)
                packed = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))  # words of the host's byte order
                family = socket.AF_INET6 if len(packed) == 16 else socket.AF_INET
                yield fields[9], (socket.inet_ntop(family, packed), int(port, 16))


def _sockets(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:  # ended in the meantime
        return
