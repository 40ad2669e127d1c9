"""Runs in this process what a script would run in training processes of its own (`torch.multiprocessing.spawn`).

A trial has a process for each worker already, and so has a launcher such as torchrun: each runs the function for its own rank.
"""

import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
import torch.multiprocessing

from compile_sweep.script.monkeypatch import replaced


class SpawnInPlace:
    """Takes the place of `torch.multiprocessing.spawn` while a script runs.

    Args:
        refuse: Called if a script spawns another number of processes than this host has workers, with that in words, and both
            numbers; must not return.
    """

    def __init__(self, refuse: Callable[[str, int, int], Any]) -> None:
        self._refuse = refuse
        self._rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._num_workers = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
        self._address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        self._has_spawned = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Takes its place in the block."""
        spawning = sys.modules["torch.multiprocessing.spawn"]  # as an attribute, a function has its name
        with (
            replaced(torch.multiprocessing, "start_processes", self._in_place),
            replaced(spawning, "start_processes", self._in_place),
            replaced(torch.distributed, "init_process_group", self._at_own_address),
        ):
            yield

    def _in_place(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(
            fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *rest: Any, **named: Any
        ) -> Any:
            if nprocs == 0:
                return start(fn, args, nprocs, join, *rest, **named)
            if nprocs != self._num_workers:
                processes = "1 training process" if nprocs == 1 else f"{nprocs} training processes"
                said = f"the script starts {processes} by torch.multiprocessing.spawn"
                return self._refuse(said, nprocs, self._num_workers)
            self._has_spawned = True
            fn(self._rank, *args)
            return None if join else _Ended()

        return started

    def _at_own_address(self, connect: Callable[..., None]) -> Callable[..., None]:
        """Lets spawned ranks meet at this trial's address: the script's own is the same in trials that run side by side."""

        def connected(*args: Any, **named: Any) -> None:
            given = inspect.signature(connect).bind(*args, **named)
            if self._has_spawned and given.arguments.get("store") is None:
                os.environ.update(self._address or _free_address())
                given.arguments["init_method"] = "env://"
            connect(*given.args, **given.kwargs)

        return connected


class _Ended:
    """Stands for the processes of `spawn(..., join=False)`, which have ended."""

    processes: Sequence[Any] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _free_address() -> Mapping[str, str]:
    """Returns where a single process can meet with itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
