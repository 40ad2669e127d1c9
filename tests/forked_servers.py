"""Fork servers that are forked from a process which has imported torch, because each would take seconds to import it again.

A test process starts such a parent when it first needs one, which ends with it, and another for servers whose environment
differs in what is read on import.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any

import pytest

from compile_sweep.own_packages import import_path
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run import fork_server
from orchestrator.run.fork_server import ForkServer, Setup

READ_ON_IMPORT = (
    "CUDA", "HF_", "KMP_", "LD_", "MKL_", "NO_", "OMP_", "PYTHONHASHSEED", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON",
)  # fmt: skip
"""Beginnings of the names of variables that are read on import."""


class Parent:
    """A handle on the process that forks servers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._asking = Lock()
        own = {**environment, "PYTHONPATH": imported_from(), ATTEMPT_MARKER: "-" * fork_server._MARKER_CHARS}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        self._process = subprocess.Popen([sys.executable, "-P", __file__], env=own, text=True, **pipes)

    def asked(self, **wanted: Any) -> Any:
        with self._asking:
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())  # type: ignore[union-attr]  # it is a pipe


class ForkedServer:
    """A fork server's process, used like a `subprocess.Popen` with pipes."""

    def __init__(self, parent: Parent, server: ForkServer) -> None:
        orders, given = os.pipe()
        answered, answers = os.pipe()
        self.returncode: int | None = None
        self._parent = parent
        self.pid = parent.asked(
            setup=asdict(server.setup),
            environment={**server.environment, "PYTHONPATH": imported_from()},
            folder=os.getcwd(),
            files=[f"/proc/{os.getpid()}/fd/{number}" for number in (orders, answers, server._output.fileno())],
        )
        os.close(orders)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(answered, "rb", buffering=0)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.asked(ended=self.pid)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def imported_from() -> str:
    return os.pathsep.join(import_path(with_current_folder=False))


def read_on_import(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((name, value) for name, value in environment.items() if name.startswith(READ_ON_IMPORT))


_PARENTS: dict[frozenset[tuple[str, str]], Parent] = {}


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Forks the fork servers that a file's tests start in their own process."""

    def launch(server: ForkServer) -> Any:
        key = read_on_import(server.environment)
        if key not in _PARENTS:
            _PARENTS[key] = Parent(server.environment)
        return ForkedServer(_PARENTS[key], server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "_launch", launch)
        yield


def serve() -> None:
    """Forks a server for each order, and tells how it ended, until there are no more orders."""
    from compile_sweep.child_process import freeze_imports
    from orchestrator.run import worker

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as in a server, which asks no CUDA before it forks
    gc.disable()
    worker.import_harness()
    import compile_sweep.script.run_one
    import compile_sweep.script.trial  # noqa: F401

    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    freeze_imports()
    own_path = [folder for folder in sys.path if folder not in os.environ["PYTHONPATH"].split(os.pathsep)]
    for order in orders():
        if "ended" in order:
            pid, status = os.waitpid(order["ended"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        opened, go_on = os.pipe()
        parent = os.getpid()
        if (child := fork_server._fork()) == 0:
            os.setsid()
            for descriptor, (file, mode) in enumerate(zip(order["files"], (os.O_RDONLY, os.O_WRONLY, os.O_RDWR), strict=True)):
                os.dup2(os.open(file, mode | (os.O_APPEND if descriptor == 2 else 0)), descriptor)
            os.close(opened)
            os.close(go_on)  # the test process may close the files now
            become(order, parent, own_path)
        os.close(go_on)
        os.read(opened, 1)
        os.close(opened)
        print(child, flush=True)


def orders() -> Iterator[dict[str, Any]]:
    while line := sys.stdin.readline():
        yield json.loads(line)


def become(order: Mapping[str, Any], parent: int, own_path: list[str]) -> None:
    """Turns this forked process into a server."""
    environment = {name: value for name, value in order["environment"].items() if name != ATTEMPT_MARKER}
    for name in os.environ.keys() - environment.keys() - {ATTEMPT_MARKER}:  # whose place in memory the server overwrites
        del os.environ[name]
    os.environ.update(environment)
    sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *own_path]
    os.chdir(order["folder"])
    setup, status = order["setup"], 1
    try:
        fork_server.main(parent, Setup(**{**setup, **{name: tuple(setup[name]) for name in ("core_shares", "imports")}}))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
