"""Forks a trial's process from one that has imported torch and the workload, so that a trial starts at once.

Trials of a person's script, and `check`, fork from one that has imported torch and the packages that the script begins with.

Background: importing torch and a workload's packages takes most of the time that a trial needs to start. A fork server
imports them once, for all trials that run one after the other in its place, and forks a process for each. It compiles
nothing, runs no Python threads and never starts CUDA, so a forked process equals a fresh one that has just finished its
imports: "cold" keeps its meaning. If a trial crashes, a child exits with a status; the server keeps running.

Importing a user's module may do anything. If the import fails, leaves threads, processes or open files behind, or makes a forked
child unable to compute, each trial imports the module anew.

This process imports torch only through `orchestrator.run.worker`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from compile_sweep.child_process import die_with, empty_stdin, freeze_imports, kill_session
from compile_sweep.own_packages import import_path
from compile_sweep.schema.outcome import exit_text
from compile_sweep.schema.redact import last_line
from orchestrator.guard.watchdog import ATTEMPT_MARKER

if TYPE_CHECKING:
    from compile_sweep.script.trial import StartRun

_MARKER_CHARS = 120
"""Room for an attempt's marker in the environment that the kernel shows of a forked process, in characters."""

_PROBE_S = 60  # seconds after which a forked child with a tiny computation counts as hanging

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes `torch.cuda.is_available` use NVML: once a process has called CUDA, its children cannot use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a server prepares. Trials that need another setup need another server."""

    workload: str | None
    """The workload whose module to import; None if each trial imports its own."""
    python_path: str
    """Folders to import the workload from, as in `TrialPlan.python_path`."""
    use_gpu: bool
    core_shares: tuple[int, int | None] = (1, None)
    """Number of shares that the host's cores are divided into, and the share to prefer, if any."""
    runs_scripts: bool = False
    """Whether it also imports what measures a script."""
    imports: tuple[str, ...] = ()
    """Import statements to execute; one that fails is left to the forked process."""

    @property
    def imports_users_code(self) -> bool:
        """Whether anything is imported that is not ours."""
        return self.workload is not None or bool(self.imports)

    def without_users_code(self) -> Setup:
        """Returns the setup that imports only what is ours."""
        return replace(self, workload=None, imports=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt at a trial, for the server to run in a process of its own."""

    assignment: Mapping[str, Any]
    """`Assignment.to_dict()`; empty for a run of a script."""
    marker: str
    environment: Mapping[str, str]
    """Variables of this attempt alone; of a script's run, all. Those that torch reads on import belong in the server's
    environment.
    """
    folder: str
    """Where the process writes its progress and its outcome."""
    work_folder: str | None = None
    """The process's current folder; None for the server's."""
    rank: int = 0
    gpu: int | None = None
    """Index of the process's GPU among those that it sees; None for the first, or for none."""
    script_run: str | None = None
    """The assignment's file of a single run of a script, as `compile_sweep.script.run_one` reads it; None for a trial."""
    log: str | None = None
    """File that a script's run prints to; None for the server's log."""


class ForkServer:
    """A handle on a fork server, which ends together with the process that started it; torch reads its environment on import."""

    def __init__(self, setup: Setup, environment: Mapping[str, str]) -> None:
        self.setup, self.environment = setup, dict(environment)
        self._order: Order | None = None
        self._pid: int | None = None
        self._num_bytes_before = 0  # of the server's log when it was given the order
        self._start()

    def _start(self) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._unread, self._is_ready = b"", False
        self._has_closed = False
        self._process: Any = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # With -P, Python imports from exactly these folders until the user's code changes them.
            [sys.executable, "-P", "-m", "orchestrator.run.fork_server", str(os.getpid()), json.dumps(asdict(self.setup))],
            env={
                **self.environment,
                "PYTHONPATH": os.pathsep.join(import_path(with_current_folder=False)),
                ATTEMPT_MARKER: "-" * _MARKER_CHARS,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            start_new_session=True,  # so that Ctrl-C reaches this process only
        )

    @property
    def is_alive(self) -> bool:
        """Tells whether the server can take another order."""
        return self._process.poll() is None and self._order is None

    def start(self, order: Order) -> None:
        """Makes the server fork a process for an attempt; the previous attempt must have ended."""
        self._order, self._pid = order, None
        self._num_bytes_before = os.fstat(self._output.fileno()).st_size
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the server has died, which `wait` reports
            # Through a pipe, not a file, because the plan may contain the cache's password.
            self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit code of the attempt's process, or of the server if that died; None after `timeout_s`."""
        ends_at = time.monotonic() + timeout_s
        while (answer := self._answer(ends_at)) is not None:
            if "returncode" in answer:
                self._order = None
                return int(answer["returncode"])
            self._is_ready = self._is_ready or "ready" in answer
            self._pid = answer.get("pid", self._pid)
        if not self._has_closed:
            return None
        code: int = self._process.wait()
        order = self._order
        if not self._is_ready and self.setup.imports_users_code and order is not None and code != -signal.SIGKILL:
            self.close()  # the user's module may have killed the server; the trial then imports it in its own process
            self.setup = self.setup.without_users_code()
            self._start()
            self.start(order)
            return self.wait(max(0.0, ends_at - time.monotonic()))
        return code

    @property
    def pid(self) -> int | None:
        """Process ID of the latest attempt, which leads a session of its own; None if it was not forked yet."""
        return self._pid

    def kill(self) -> None:
        """Kills the attempt's process, or the server if there is none yet, and waits for its end."""
        if self._order is None:
            return
        if self._pid is None:
            self.wait(0.0)
        if self._pid is None:
            self._process.kill()
            self._process.wait()
            self._order = None
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        while self.wait(1.0) is None:
            pass

    def last_line(self) -> str:
        """Returns the last line that the server wrote, with a colon before it; nothing if there is none.

        Once a process was forked, only what was written since counts: it writes here until it has a log.
        """
        is_unchanged = os.fstat(self._output.fileno()).st_size == self._num_bytes_before
        return "" if self._pid is not None and is_unchanged else last_line(self._output)

    def close(self) -> None:
        """Ends the server and everything it forked."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._output):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._order = None

    def _answer(self, ends_at: float) -> dict[str, Any] | None:
        """Returns the server's next answer; None if there is none by `ends_at`, or if the server has closed its output."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        self._has_closed = False
        while b"\n" not in self._unread:
            if not select.select([descriptor], [], [], max(0.0, ends_at - time.monotonic()))[0]:
                return None
            if not (read := os.read(descriptor, 1 << 16)):
                self._has_closed = True
                return None
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class ServerInside(ForkServer):
    """A fork server that is forked from this process, whose imports it has, before this process starts threads or CUDA."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        self._cpus = cpus
        super().__init__(Setup(workload=None, python_path="", use_gpu=False), {})

    def _launch(self) -> Any:
        return _Forked(self._cpus)


class _Forked:
    """A process that serves orders, forked from this one; used like a `subprocess.Popen` with pipes."""

    def __init__(self, cpus: tuple[int, ...]) -> None:
        orders, given = os.pipe()
        answered, answers = os.pipe()
        parent = os.getpid()
        self.pid = _fork()
        if self.pid == 0:
            try:
                os.close(given)
                os.close(answered)
                die_with(parent)
                _serve(orders, answers, cpus)
            finally:
                os._exit(0)
        os.close(orders)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(given, "wb"), os.fdopen(answered, "rb", buffering=0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int:
        """Waits for its end; returns its exit code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedScriptRun:
    """A run of a script that a fork server starts."""

    def __init__(self, server: ForkServer, order: Order) -> None:
        self._server = server
        self._returncode: int | None = None
        server.start(order)

    def poll(self) -> int | None:
        if self._returncode is None:
            self._returncode = self._server.wait(0.0)
        return self._returncode

    def end(self) -> None:
        """Ends the run and everything in its session."""
        self._server.kill()
        if self._server.pid is not None:
            kill_session(self._server.pid)


def script_order(assignment: Path, folder: str, environment: Mapping[str, str], log: Path | None, *, marker: str) -> Order:
    """Returns the order for a run of a script."""
    return Order(
        assignment={},
        marker=marker,
        environment=environment,
        folder=str(assignment.parent),
        work_folder=folder,
        script_run=str(assignment),
        log=None if log is None else str(log),
    )


def forks_of_scripts(log: Path, marker: str, cpus: tuple[int, ...]) -> StartRun:
    """Returns a `compile_sweep.script.trial.StartRun` that forks runs from this process as it is now.

    Args:
        log: What runs print to unless they have files of their own.
        marker: Identifies the attempt's processes.
        cpus: The logical CPUs that this process is bound to.
    """
    from compile_sweep.script.trial import MOST_RUNS_AT_ONCE

    servers = [ServerInside(cpus) for _ in range(MOST_RUNS_AT_ONCE)]
    choosing = threading.Lock()

    def start(run: Path, folder: str, environment: Mapping[str, str], own_log: Path | None) -> ForkedScriptRun:
        with choosing:
            server = next((server for server in servers if server.is_alive), servers[0])
            return ForkedScriptRun(server, script_order(run, folder, environment, own_log or log, marker=marker))

    return start


def how_it_ended(server: ForkServer, returncode: int) -> str:
    """Describes, in a sentence, how an attempt's process that left no outcome ended."""
    return f"it ended with {exit_text(returncode)}{server.last_line()}"


def main(parent: int, setup: Setup) -> None:
    """Runs a server: reads an order from each line of standard input, and answers on standard output."""
    die_with(parent)
    answers = os.dup(1)
    os.dup2(2, 1)  # what modules print on import goes to the server's log
    from orchestrator.run import worker

    with worker.own_cores(*setup.core_shares) as cpus:
        _preload(setup, parent, answers)
        _serve(0, answers, cpus)


def _serve(orders: int, answers: int, cpus: tuple[int, ...]) -> None:
    """Forks a process for each order that it reads, until there are no more."""
    _write(answers, {"ready": True})
    lines = os.fdopen(orders, "rb", buffering=0, closefd=False)
    while line := lines.readline():
        child = _fork()
        if child == 0:
            _become_trial(Order(**json.loads(line)), cpus, answers)
        _write(answers, {"pid": child})
        _, status = os.waitpid(child, 0)
        _write(answers, {"returncode": os.waitstatus_to_exitcode(status)})


def _write(descriptor: int, answer: Mapping[str, Any]) -> None:
    os.write(descriptor, json.dumps(answer).encode() + b"\n")


def _preload(setup: Setup, parent: int, answers: int) -> None:
    """Imports what trials need; restarts this process without the user's code if importing that is not safe."""
    from orchestrator.run import worker

    asks_cuda = _NVML_CHECK not in os.environ
    os.environ.setdefault(_NVML_CHECK, "1")
    gc.disable()  # imported objects stay; scanning them again and again takes a second or more
    worker.import_harness()
    if setup.runs_scripts:
        import compile_sweep.script.run_one  # noqa: F401
    why = _why_not_imported(setup) if setup.imports_users_code else None
    freeze_imports()
    if asks_cuda:
        del os.environ[_NVML_CHECK]
    if why is not None:
        print(f"each trial imports the user's modules anew, because {why}", file=sys.__stderr__, flush=True)
        os.dup2(answers, 1)
        alone = json.dumps(asdict(setup.without_users_code()))
        os.execv(sys.executable, [sys.executable, "-P", "-m", "orchestrator.run.fork_server", str(parent), alone])


def _why_not_imported(setup: Setup) -> str | None:
    """Imports the user's modules; returns why forked children cannot use them, or None if they can."""
    from orchestrator.run import worker

    files = _open_files()
    try:
        if setup.workload is not None:
            worker.import_workload(setup.workload, setup.python_path)
    except BaseException as error:  # it may raise anything; the trial will meet the same error and record it
        return f"it fails with {type(error).__name__}"
    for statement in setup.imports:
        with suppress(Exception, SystemExit):  # the script may expect the error
            exec(statement, {})
    if threading.active_count() > 1:
        return "it starts threads"
    if _children():
        return "it starts processes"
    # Devices do not count: whether CUDA's still work is tried in a child.
    if opened := {one for one in _open_files() - files if not one.partition(" ")[2].startswith("/dev/")}:
        return f"it leaves files open, such as {min(opened).partition(' ')[2]}"
    if not _a_child_can_compute(use_gpu=setup.use_gpu):
        return "a forked process could not compute after it"
    return None


def _open_files() -> set[str]:
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor that lists this folder
            descriptors.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {described for described in descriptors if not described.endswith(f"/proc/{os.getpid()}/fd")}


def _children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _a_child_can_compute(*, use_gpu: bool) -> bool:
    """Tells whether a forked child can run torch on all cores and the GPU, that is, whether OpenMP and CUDA are unused here."""
    from orchestrator.run import worker

    child = _fork()
    if child == 0:
        try:
            signal.alarm(_PROBE_S)
            worker.compute_something(use_gpu=use_gpu)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _fork() -> int:
    """Calls `os.fork` without Python's warning about threads: the remaining ones are OpenBLAS's, which expect a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _show_marker(marker: str) -> None:
    """Writes the marker into the environment that the kernel shows of this process, which is the one the server started with."""
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    place = find(ATTEMPT_MARKER.encode())
    value = marker.encode() + b"\0"
    if place and len(value) <= _MARKER_CHARS:
        ctypes.memmove(place, value, len(value))


def _become_trial(order: Order, cpus: tuple[int, ...], answers: int) -> NoReturn:
    """Turns this forked process into a trial's and runs it to its end."""
    from orchestrator.run import worker

    try:
        server = os.getppid()
        os.setsid()
        die_with(server)
        os.close(answers)
        empty_stdin()
        _show_marker(order.marker)
        if order.script_run is not None:  # what it is given is all that it sees, like a fresh process
            for name in os.environ.keys() - order.environment.keys():
                del os.environ[name]
        os.environ.update({**order.environment, ATTEMPT_MARKER: order.marker})
        if order.work_folder is not None:
            os.makedirs(order.work_folder, exist_ok=True)
            os.chdir(order.work_folder)
        if order.script_run is not None:
            worker.run_script_forked(order, order.script_run)
        said = os.pread(2, 1 << 20, 0).decode("utf-8", "replace")
        worker.run_forked(order, cpus, said)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    values = json.loads(sys.argv[2])
    main(int(sys.argv[1]), Setup(**{**values, **{name: tuple(values[name]) for name in ("core_shares", "imports")}}))
