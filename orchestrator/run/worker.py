"""What a trial's worker does: in a fresh process, measures one setting or starts it warm, and returns plain values.

On one host, a fork server (`fork_server.py`) forks the process, which writes its progress and outcome to files. On the hosts of a
cluster, Ray Train starts it (`worker_group.py`).

A person's script runs in further processes, which the worker starts, watches and ends. If several workers train together, each
starts one; these connect as under torchrun, at an address that worker 0 chooses for every run.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from compile_sweep.child_process import freeze_imports, only_in_this_process
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema import redact
from compile_sweep.schema.journal import written_whole
from compile_sweep.schema.outcome import Phase, is_let_down
from compile_sweep.script.job import SEE_OUTPUT, FellBackError, ScriptError, ScriptJob
from compile_sweep.script.trial import FreshProcess, RunFailed, ScriptTrial, StartRun
from orchestrator import environment
from orchestrator.artifacts.sharing import Sharing
from orchestrator.guard import cores, scratch_folders, watchdog
from orchestrator.guard.cpu_pressure import PressureGauge
from orchestrator.guard.gpu_neighbors import GpuNeighborMonitor
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run.fork_server import Order, forks_of_scripts
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial_spec import Assignment, TrialPlan

if TYPE_CHECKING:
    from compile_sweep.contract.base import Workload
    from compile_sweep.harness.prepare import Prepared

PROGRESS, OUTCOME = "progress.jsonl", "outcome.json"
"""Files in a local worker's folder: its progress (one JSON array per line), and its result or error."""

_PORT = "port"  # file in an attempt's folder: the port at which its workers meet

_PORT_POLL_S = 0.02
_LOOPBACK = "127.0.0.1"
_GROUP_TIMEOUT_S = 1800.0  # timeout in seconds of each operation of the workers' process group
_LEAVING_S = 10.0  # seconds that a worker waits for other processes, such as those of a killed trial, to leave its GPU

EAGER_RUNS = ".eager-runs"
"""Folder in the sweep's folder with the eager runs of its workload, hidden because it is not one of the sweep's results."""

REFERENCES = "script"  # folder of a sweep with the results of its script's eager runs

LET_DOWN_PATIENCE_S = 8.0
"""Seconds that a worker delays the error when its peer is gone. Ray ends the group at the first failure it learns of, within a
second, and that should be the peer's.
"""


class MeasurementFailed(Exception):
    """An exception of a worker in a form that can be pickled anywhere, unlike many foreign exceptions."""

    def __init__(self, error_type: str, text: str, from_compiler: bool, log: str) -> None:
        super().__init__(error_type, text, from_compiler, log)
        self.error_type, self.text, self.from_compiler, self.log = error_type, text, from_compiler, log

    def __str__(self) -> str:
        return f"{self.error_type}: {self.text} (see {self.log})"


class Parent(Protocol):
    """The worker's connection to the process that started it."""

    rank: int
    runs_of_scripts: StartRun | None
    """Starts a run of a script, as `compile_sweep.script.trial.StartRun` says; None for a fresh process."""

    def log_file(self) -> AbstractContextManager[Path]:
        """Provides the file that the worker logs to while the block lasts."""
        ...

    def cores(self, plan: TrialPlan) -> AbstractContextManager[tuple[int, ...]]:
        """Binds this process to its share of the host's cores, and holds the share while the block lasts."""
        ...

    def connect(self, plan: TrialPlan) -> None:
        """Chooses this process's GPU, and connects it to the other workers of its trial unless that has been done."""
        ...

    def worker_started(self) -> None:
        """Reports that the worker runs, and where."""
        ...

    def enter_phase(self, phase: str) -> None:
        """Reports that the worker enters a phase."""
        ...

    def report_early_figures(self, early: dict[str, float]) -> None:
        """Reports the figures of the first timed pass."""
        ...

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Starts ending this process on request, unless the parent kills it on its own."""
        ...


def work(assignment: Assignment, parent: Parent, said: str = "") -> dict[str, Any]:
    """Measures one assignment, or starts it warm; returns figures of a record. Every failure becomes a `MeasurementFailed`."""
    own = scratch_folders.attempt_folder(os.environ[ATTEMPT_MARKER])
    # This host's caches; Dynamo reads these variables when it is loaded.
    os.environ.update(scratch_folders.compile_cache_env(own))
    with parent.log_file() as path, _own_log(path) as log:
        watchdog.log_crashes(log)
        watchdog.start_reaper(own)
        deadline = time.monotonic() + assignment.plan.trial_deadline_s
        watchdog.set_deadline(assignment.plan.trial_deadline_s, log)
        try:
            log.write(said)
            scratch_folders.check_temp_folder()
            with parent.cores(assignment.plan) as cpus:  # uses lock files that all trials on the host see
                return _measure(assignment, parent, cpus, deadline, log, own)
        except BaseException as error:  # a workload may raise anything, which ends only this attempt
            error_type, text = f"{type(error).__module__}.{type(error).__qualname__}", _with_last_words(_text_of(error), path)
            with suppress(OSError):  # the disk with the log is full, which may be the error
                traceback.print_exc(file=log)
            if assignment.plan.num_workers > 1 and is_let_down(error_type, text):
                time.sleep(LET_DOWN_PATIENCE_S)
            told = redact.redact_text(text)  # Ray writes the text to its own logs, too
            from_compiler = is_compiler_error(error) or bool(getattr(error, "from_compiler", False))
            raise MeasurementFailed(error_type, told, from_compiler, str(assignment.log_file(parent.rank))) from None
        finally:
            watchdog.clear_deadline()


@contextmanager
def own_cores(num_shares: int, preferred: int | None) -> Iterator[tuple[int, ...]]:
    """Binds this process to a share of the host's cores, and holds the share while the block lasts."""
    with cores.hold_slot(num_shares, preferred) as slot:
        cpus = cores.cpu_share(slot, num_shares)
        cores.bind_process(cpus)
        yield cpus


def import_harness() -> None:
    """Imports the measuring code, and with it torch."""
    import scipy.special  # noqa: F401  # for the check of numbers, in all forked trials at once
    import torch  # noqa: F401  # not at the head of the module: the trial and Train's controller import it too, and need no torch

    import compile_sweep.contract.base
    import compile_sweep.harness.measure
    import compile_sweep.harness.prepare
    import compile_sweep.harness.protocol
    import compile_sweep.harness.toolchain
    import compile_sweep.harness.warm_start  # noqa: F401


def import_workload(name: str, python_path: str) -> type[Workload]:
    """Imports a workload's module, from these folders first, so that the user's own imports win; raises WorkloadError."""
    folders = [folder for folder in python_path.split(os.pathsep) if os.path.isdir(folder)]
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]
    from compile_sweep.contract.base import load_workload

    return load_workload(name)


def compute_something(*, use_gpu: bool) -> None:
    """Runs a torch operation on all cores of this process, and one on the GPU."""
    import torch

    torch.ones(1 << 20).add_(1).sum().item()
    if use_gpu:
        torch.ones(1, device="cuda").add_(1).item()


def _measure(
    assignment: Assignment, parent: Parent, cpus: Sequence[int], deadline: float, log: IO[str], scratch: Path
) -> dict[str, Any]:
    plan = assignment.plan
    place = f"{platform.node()}, on cores {', '.join(map(str, cpus))}, as process {os.getpid()}"
    log.write(f"{now()} worker {parent.rank} of {plan.num_workers}{_IS_UP}{place}\n")
    gc.disable()  # imported objects stay; scanning them again and again takes a second or more
    import_harness()
    import torch

    torch.set_num_threads(len(cpus))  # Ray Train has loaded torch already, with Ray's choice for the number of threads

    from compile_sweep.harness.diagnostics.repeated_graphs import RepeatedGraphs
    from compile_sweep.harness.measure import measure
    from compile_sweep.harness.numerics.reference_store import ReferenceStore
    from compile_sweep.harness.prepare import prepare
    from compile_sweep.harness.protocol import Protocol, told_by_all
    from compile_sweep.harness.toolchain import (
        check_vector_instructions,
        compile_whole_files,
        cpp_header_folder,
        link_cpp_headers,
        start_compile_workers,
        warm_cpp_headers,
    )
    from compile_sweep.harness.warm_start import Start, restart
    from compile_sweep.schema.record import Measurement

    compile_whole_files()
    if not plan.use_gpu:
        warm_cpp_headers()
        if plan.explains:
            check_vector_instructions()
    elif assignment.settings.mode is not None and plan.script is None:  # a script's process starts its own
        start_compile_workers()
    headers = cpp_header_folder()  # the host's folder, which all trials share
    scratch_folders.use_own_temp_folder(scratch)
    link_cpp_headers(headers)
    parent.connect(plan)
    parent.worker_started()
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if plan.use_gpu else None
    residents = GpuNeighborMonitor(f"GPU-{str(gpu.uuid).removeprefix('GPU-')}" if gpu else "")
    residents.wait_until_alone(_LEAVING_S)
    gauge = PressureGauge(cores=len(cpus))
    cpu_pressure: float | None = None
    gpu_neighbours: list[str] = []

    def on_phase(phase: Phase) -> None:
        nonlocal cpu_pressure, gpu_neighbours
        if phase is Phase.BUILDING:
            residents.start()
        elif phase is (Phase.DONE if plan.warm_start else Phase.CHECKING):
            gpu_neighbours = residents.stop()
        if phase is (Phase.DONE if plan.warm_start else Phase.STEADY):
            cpu_pressure = gauge.stop()
        log.write(f"{now()} {phase}\n")
        parent.enter_phase(phase)
        seconds_left = deadline - time.monotonic()
        watchdog.set_deadline(min(plan.compile_deadline_s, seconds_left) if phase is Phase.WARMING_UP else seconds_left, log)
        if phase is Phase.WARMING_UP:
            gauge.start()

    def of_host() -> dict[str, Any]:
        return {
            "environment_key": environment.fingerprint().key,
            "cores": len(cpus),
            "cpu_pressure": cpu_pressure,
            "gpu_neighbours": told_by_all(gpu_neighbours),  # a process on any worker's GPU slows all workers
        }

    if plan.prunes:
        parent.watch_stop_requests(log)
    device = torch.device("cuda", torch.cuda.current_device()) if plan.use_gpu else torch.device("cpu")
    if plan.script is not None:
        gc.enable()
        os.environ.update(plan.threads)
        sharing = Sharing(assignment, None, parent.rank)
        sharing.restore(deadline - time.monotonic())
        found = _measure_script(assignment, parent, sharing, scratch, cpus, device, on_phase)
        return {**found, **sharing.figures(found), **sharing.publish(deadline - time.monotonic()), **of_host()}
    workload = import_workload(plan.workload, plan.python_path)(plan.size, plan.seed)
    gc.enable()
    freeze_imports()  # the one collection also lets a compile find the heap in the same state as long after the imports
    sharing = Sharing(assignment, workload, parent.rank)
    sharing.restore(deadline - time.monotonic())
    repeated = RepeatedGraphs() if plan.spares_repeats else None
    protocol = Protocol(**plan.protocol) if plan.protocol else None  # type: ignore[arg-type]  # its whole numbers, too
    with sharing.watching():
        prepared = prepare(workload, assignment.settings, device)
        if plan.bisects:
            return _bisected(prepared, parent)
        measured: Start | Measurement
        if plan.warm_start:
            measured = restart(prepared, rank=parent.rank, protocol=protocol, on_phase=on_phase)
        else:
            measured = measure(
                prepared,
                rank=parent.rank,
                protocol=protocol,
                pipeline=plan.pipeline,
                repeated=repeated,
                store=ReferenceStore(folder=folder / EAGER_RUNS) if (folder := Path(plan.folder)).is_dir() else None,
                on_phase=on_phase,
                on_early=parent.report_early_figures,
            )
    sys.stdout = sys.stderr = log  # the workload may have closed these streams or replaced them with None
    figures = {**of_host(), **measured.to_dict(), **sharing.figures(measured), **sharing.publish(deadline - time.monotonic())}
    if plan.largest_batch and not plan.warm_start:
        figures |= _largest_batch(workload, prepared, figures["findings"], deadline - time.monotonic())
    if plan.explains:
        figures |= {"targets": prepared.targets, "graphs_without_code": repeated.without_code if repeated else 0}
    return figures


def _measure_script(
    assignment: Assignment,
    parent: Parent,
    sharing: Sharing,
    scratch: Path,
    cpus: Sequence[int],
    device: Any,
    on_phase: Callable[[Phase], None],
) -> dict[str, Any]:
    """Measures the plan's script under the assignment's settings; returns figures of a record."""
    from compile_sweep.harness.distributed import agreed, by_rank

    plan, rank = assignment.plan, parent.rank
    assert plan.script is not None
    base = scratch / f"script-{rank}"
    base.mkdir(parents=True)
    folder = Path(plan.folder)
    several = plan.num_workers > 1

    def rendezvous() -> Mapping[str, str]:
        if not several:
            return {}
        address, port = by_rank(_free_port())[0]
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(plan.num_workers),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(rank)),
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(plan.num_workers)),
        }

    trial = ScriptTrial(
        job=ScriptJob.from_dict(plan.script),
        settings=assignment.settings,
        base=base,
        references=(folder if folder.is_dir() else base) / REFERENCES,
        environment={} if plan.use_gpu else {"CUDA_VISIBLE_DEVICES": ""},
        watches=sharing.watched,
        is_first=rank == 0,
        rendezvous=rendezvous,
        agree=lambda decision: agreed(decision, device),
        start=parent.runs_of_scripts or FreshProcess,
        # Several workers have to agree on the runs that they make.
        eager_runs_end_at=_at_monotonic(plan.budget_ends_at) if plan.num_workers == 1 else math.inf,
        on_phase=on_phase,
        on_early=parent.report_early_figures,
    )
    try:
        found = trial.run()
    except RunFailed as error:
        if error.fell_back:
            raise FellBackError(error.text) from None
        raise ScriptError(error.sentence, from_compiler=error.from_compiler) from None
    num_threads, variable = cores.threads_of(plan.threads, len(cpus))
    if variable and not variable.endswith(f"={len(cpus)}"):
        found["findings"].append(f"{num_threads} of {len(cpus)} CPUs compute: the sweep was started with {variable}")
    if "cache_use" in found:
        sharing.take(found.pop("cache_use"), found.pop("bundle"))
    return found


def _at_monotonic(seconds_since_1970: float | None) -> float:
    """Returns a time of the clock of `time.monotonic`; infinite for None."""
    return math.inf if seconds_since_1970 is None else time.monotonic() + seconds_since_1970 - time.time()


def _free_port() -> tuple[str, int]:
    """Returns this host's address as other workers see it, and a free port there."""
    import ray

    address = str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
    with socket.socket() as found:
        found.bind((address, 0))
        return address, int(found.getsockname()[1])


def _largest_batch(workload: Workload, prepared: Prepared, findings: Sequence[str], seconds_left: float) -> dict[str, Any]:
    """Looks for the largest batch; returns figures of a record. A search that fails costs the measurement nothing."""
    from compile_sweep.harness.diagnostics.largest_batch import largest_batch

    try:
        tried = largest_batch(workload, prepared.settings, prepared.device, budget_s=seconds_left)
    except Exception as error:
        traceback.print_exc()
        return {"findings": [*findings, f"the largest batch was not found: {type(error).__name__}: {_text_of(error)}"]}
    return {"batch_peak_bytes": {str(one.batch_size): one.peak_memory_bytes for one in tried}}


def _bisected(prepared: Prepared, parent: Parent) -> dict[str, Any]:
    from compile_sweep.harness.measure import first_steps
    from compile_sweep.harness.numerics.bisect import bisect
    from compile_sweep.harness.protocol import Protocol

    with prepared.workload.process_settings():
        pool = prepared.workload.pool(prepared.policy, rank=parent.rank, device=prepared.device)
        return bisect(prepared, first_steps(pool, Protocol()), parent.enter_phase).to_dict()


@contextmanager
def _own_log(path: Path) -> Iterator[IO[str]]:
    """Redirects this process's output, including its compilers', to the trial's log."""
    log = path.open("a", buffering=1, encoding="utf-8")
    streams = sys.stdout, sys.stderr
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = streams  # undoes whatever the workload put there
        for close in (*(stream.flush for stream in streams), log.close):
            with suppress(OSError, ValueError):  # the disk is full; ValueError: the workload closed the stream
                close()
        for saved, descriptor in zip(kept, (1, 2), strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)


_IS_UP = " is up on "
_PHASE_LINE = re.compile(rf"\S+ (?:{'|'.join(Phase)})")
_LAST_LINE_CHARACTERS = 300


def _with_last_words(text: str, log: Path) -> str:
    """Adds the last line that a script printed to an error that refers to the end of its output."""
    if SEE_OUTPUT not in text:
        return text
    lines = log.read_text(encoding="utf-8", errors="replace").rpartition(_IS_UP)[2].splitlines()[1:]
    printed = [line.strip() for line in lines if line.strip() and not _PHASE_LINE.fullmatch(line)]
    last = f": {printed[-1][:_LAST_LINE_CHARACTERS]!r}" if printed else " (it printed nothing)"
    return text.replace(SEE_OUTPUT, f"{SEE_OUTPUT}{last}")


def _text_of(error: BaseException) -> str:
    """Returns the exception's message; empty if even formatting it fails, as a user's exception may."""
    try:
        return str(error)
    except BaseException:
        return ""


class ForkedParent:
    """The process that started the fork server; it reads what this process appends to a file."""

    def __init__(self, order: Order, assignment: Assignment, cpus: tuple[int, ...]) -> None:
        self.rank = order.rank
        self._order, self._assignment, self._cpus = order, assignment, cpus
        # Before the trial has its own folder for temporary files.
        self._port_file = scratch_folders.attempt_folder(order.marker) / _PORT
        is_of_script = assignment.plan.script is not None  # its runs are forked before this process starts threads or CUDA
        self.runs_of_scripts = forks_of_scripts(assignment.log_file(self.rank), order.marker, cpus) if is_of_script else None
        self._file = (Path(order.folder) / PROGRESS).open("a", buffering=1, encoding="utf-8")

    @contextmanager
    def log_file(self) -> Iterator[Path]:
        """Provides the trial's log file in the sweep's folder."""
        yield self._assignment.log_file(self.rank)

    @contextmanager
    def cores(self, plan: TrialPlan) -> Iterator[tuple[int, ...]]:
        """Leaves the process on the cores that the fork server holds."""
        yield self._cpus

    def connect(self, plan: TrialPlan) -> None:
        """Connects the workers of one trial on the loopback; rank 0 publishes the port in a file in the attempt's folder."""
        import torch

        from compile_sweep.harness.distributed import join, serve

        if self._order.gpu is not None:
            torch.cuda.set_device(self._order.gpu)
        if plan.num_workers == 1:
            return
        told = self._port_file
        if self.rank == 0:
            told.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(told) as unfinished:
                unfinished.write_text(str(serve(_LOOPBACK, plan.num_workers, _GROUP_TIMEOUT_S)), encoding="ascii")
        while not told.exists():
            time.sleep(_PORT_POLL_S)
        join(
            "nccl" if plan.use_gpu else "gloo",
            rank=self.rank,
            num_workers=plan.num_workers,
            address=_LOOPBACK,
            port=int(told.read_text(encoding="ascii")),
            timeout_s=_GROUP_TIMEOUT_S,
        )

    def worker_started(self) -> None:
        """Reports the host, and the GPU if there is one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[self._order.gpu or 0]
        self._report("worker_started", platform.node(), f"{platform.node()}:{visible}" if self._assignment.plan.use_gpu else None)

    def enter_phase(self, phase: str) -> None:
        self._report("enter_phase", str(phase))

    def report_early_figures(self, early: dict[str, float]) -> None:
        self._report("report_early_figures", early)

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Does nothing: the process that started the fork server kills this one on request."""

    def _report(self, method: str, *arguments: object) -> None:
        self._file.write(json.dumps([method, *arguments]) + "\n")


def run_forked(order: Order, cpus: tuple[int, ...], said: str) -> NoReturn:
    """Runs an order in the process that was forked for it, and writes the result or the error to the order's folder."""
    assignment = Assignment.from_dict(order.assignment)
    parent = ForkedParent(order, assignment, cpus)
    _renew_process_state()
    with only_in_this_process():
        try:
            outcome: dict[str, Any] = {"figures": work(assignment, parent, said)}
        except MeasurementFailed as error:
            outcome = {"error_type": error.error_type, "error_text": error.text, "error_is_compilers": error.from_compiler}
    with written_whole(Path(order.folder) / OUTCOME) as unfinished:
        unfinished.write_text(json.dumps(outcome), encoding="utf-8")
    while assignment.plan.num_workers > 1:
        signal.pause()  # until all workers have ended and are killed: leaving earlier could take data that others still need
    os._exit(0)  # a workload's threads and exit handlers must neither lose nor delay the result


def run_script_forked(order: Order, assignment: str) -> NoReturn:
    """Runs a person's script once in the process that was forked for it, like a fresh `compile_sweep.script.run_one`."""
    import torch

    from compile_sweep.script.run_one import main

    if order.log is not None:
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    _renew_process_state()
    tempfile.tempdir = None  # the server's
    gc.enable()
    torch.set_num_threads(cores.threads_of(order.environment, len(os.sched_getaffinity(0)))[0])  # it has read the server's
    for name in [name for name in sys.modules if name.partition(".")[0] == "orchestrator"]:
        del sys.modules[name]  # the script may import a package of its own that is called so
    main(Path(assignment))
    os._exit(1)  # not reached


def _renew_process_state() -> None:
    """Resets state that forked trials would share, unlike trials started as new processes."""
    import numpy as np
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    np.random.seed()  # Python's own generator reseeds itself
    package: Any = sys.modules.get("torch._dynamo.package")
    if package is not None:  # it sets the location of Dynamo's cache on import (torch 2.13)
        package.DynamoCache = package.DiskDynamoCache(os.path.join(cache_dir(), "dynamo"))
