"""What a trial's worker does: in a fresh process, measures one setting or starts it warm, and returns plain values.

Ray Train starts workers in a cluster or on this host (`worker_group.py`). The local runner (`local_runner.py`) starts
`python -m orchestrator.run.worker FOLDER`; it reads the assignment from its standard input, and writes its progress and the
outcome to files in that folder.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema import redact
from compile_sweep.schema.outcome import is_let_down
from compile_sweep.schema.phases import Phase
from orchestrator import environment
from orchestrator.artifacts.sharing import Sharing
from orchestrator.guard import cores, scratch_folders, watchdog
from orchestrator.guard.cpu_pressure import PressureGauge
from orchestrator.guard.gpu_neighbors import GpuNeighborMonitor
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run.script_worker import measure_script
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial_spec import Assignment, TrialPlan

PROGRESS, OUTCOME = "progress.jsonl", "outcome.json"
"""Files in a local worker's folder: its progress (one JSON array a line), and its result or error."""

_LEAVING_S = 10.0
"""How long a worker waits for processes of others, a killed trial's say, to leave its GPU, which may take seconds."""

LET_DOWN_PATIENCE_S = 8.0
"""How long a worker whose peer is gone holds its tongue. Ray ends the group at the first failure it hears of, within a second of
it, and that one should be the peer's."""

_DIE_WITH_PARENT = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class MeasurementFailed(Exception):
    """A worker's exception in a form that pickles anywhere: foreign exceptions often do not."""

    def __init__(self, error_type: str, text: str, from_compiler: bool, log: str) -> None:
        super().__init__(error_type, text, from_compiler, log)
        self.error_type, self.text, self.from_compiler, self.log = error_type, text, from_compiler, log

    def __str__(self) -> str:
        return f"{self.error_type}: {self.text} (see {self.log})"


class Parent(Protocol):
    """The worker's connection to the process that started it."""

    rank: int
    """The worker's rank in its trial."""

    def log_file(self) -> AbstractContextManager[Path]:
        """Provides the file that the worker logs to while the block lasts."""
        ...

    def core_shares(self, plan: TrialPlan) -> tuple[int, int | None]:
        """Returns into how many shares the host's cores are divided, and the share the worker prefers, if any."""
        ...

    def worker_started(self) -> None:
        """Reports that the worker runs, and where."""
        ...

    def enter_phase(self, phase: Phase) -> None:
        """Reports that the worker enters a phase."""
        ...

    def report_early_figures(self, early: dict[str, float]) -> None:
        """Reports the figures of the first timed pass."""
        ...

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Starts ending this process on request, unless the parent kills it on its own."""
        ...


def work(assignment: Assignment, parent: Parent) -> dict[str, Any]:
    """Measures one assignment, or starts it warm.

    Args:
        assignment: what to do.
        parent: the process that started this one; the environment contains the attempt's marker.

    Returns:
        Figures of a `TrialRecord` or, for a warm start, of a `WarmStart`; the trial uses worker 0's.

    Raises:
        MeasurementFailed: whatever went wrong, with the traceback in the trial's log.
    """
    own = scratch_folders.attempt_folder(os.environ[ATTEMPT_MARKER])
    os.environ.update(scratch_folders.compile_cache_env(own))  # of this host, before Dynamo is loaded and reads them
    with parent.log_file() as path, _own_log(path) as log:
        watchdog.log_crashes(log)
        watchdog.start_reaper(own)
        deadline = time.monotonic() + assignment.plan.trial_deadline_s
        watchdog.set_deadline(assignment.plan.trial_deadline_s, log)
        try:
            scratch_folders.check_temp_folder()
            with _own_cores(*parent.core_shares(assignment.plan)) as cpus:
                return _measure(assignment, parent, cpus, deadline, log)
        except BaseException as error:  # a workload may raise anything; whatever it is ends this attempt and no more
            traceback.print_exc(file=log)
            error_type, text = f"{type(error).__module__}.{type(error).__qualname__}", _text_of(error)
            if assignment.plan.num_workers > 1 and is_let_down(error_type, text):
                time.sleep(LET_DOWN_PATIENCE_S)
            told = redact.redact_text(text)  # Ray writes it into its own logs, too
            raise MeasurementFailed(error_type, told, _from_compiler(error), str(assignment.log_file(parent.rank))) from None
        finally:
            watchdog.clear_deadline()


@contextmanager
def _own_cores(num_shares: int, preferred: int | None) -> Iterator[tuple[int, ...]]:
    """Binds this process to its share of the host's cores, which is its own while the block lasts."""
    with cores.hold_slot(num_shares, preferred) as slot:
        cpus = cores.cpu_share(slot, num_shares)
        cores.bind_process(cpus)
        yield cpus


def _import_from(python_path: str) -> None:
    """Puts these folders first, so that the user's own imports win; `own_packages` finds ours all the same."""
    folders = [folder for folder in python_path.split(os.pathsep) if os.path.isdir(folder)]
    sys.path[:] = [*folders, *(folder for folder in sys.path if folder not in folders)]


def _measure(assignment: Assignment, parent: Parent, cpus: Sequence[int], deadline: float, log: IO[str]) -> dict[str, Any]:
    plan = assignment.plan
    place = f"{platform.node()}, on cores {', '.join(map(str, cpus))}"
    log.write(f"{now()} worker {parent.rank} of {plan.num_workers} is up on {place}\n")
    gc.disable()  # what imports make stays; looking through it again and again takes a second and more
    import torch  # not at the head of the module: the trial and Train's controller import it too, and need no torch

    torch.set_num_threads(len(cpus))  # Ray Train has loaded it, with the number of threads that Ray thought right

    _import_from(plan.python_path)
    from compile_sweep.contract.base import load_workload
    from compile_sweep.harness.measure import Measurement, measure
    from compile_sweep.harness.measurement import Protocol, told_by_all
    from compile_sweep.harness.prepare import prepare
    from compile_sweep.harness.toolchain import start_compile_workers, warm_cpp_headers
    from compile_sweep.harness.warm_start import Start, restart

    if not plan.use_gpu:
        warm_cpp_headers()
    elif assignment.settings.mode is not None:
        start_compile_workers()
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

    if plan.prunes:
        parent.watch_stop_requests(log)
    device = torch.device("cuda", torch.cuda.current_device()) if plan.use_gpu else torch.device("cpu")
    if plan.script is not None:
        gc.enable()
        found = measure_script(
            assignment,
            rank=parent.rank,
            cpus=cpus,
            device=device,
            on_phase=on_phase,
            on_early=parent.report_early_figures,
        )
        return {
            **found,
            "environment_key": environment.fingerprint().key,
            "cores": len(cpus),
            "cpu_pressure": cpu_pressure,
            "gpu_neighbours": told_by_all(gpu_neighbours),
        }
    workload = load_workload(plan.workload)(plan.size, plan.seed)
    gc.enable()
    gc.collect()  # once, so that a compile finds the heap as it is long after imports
    sharing = Sharing(assignment, workload, parent.rank)
    sharing.restore(deadline - time.monotonic())
    protocol = Protocol(**plan.protocol) if plan.protocol else None  # type: ignore[arg-type]  # its whole numbers, too
    with sharing.watching():
        prepared = prepare(workload, assignment.settings, device)
        measured: Start | Measurement
        if plan.warm_start:
            measured = restart(prepared, rank=parent.rank, protocol=protocol, on_phase=on_phase)
        else:
            measured = measure(
                prepared,
                rank=parent.rank,
                protocol=protocol,
                pipeline=plan.pipeline,
                on_phase=on_phase,
                on_early=parent.report_early_figures,
            )
    sys.stdout = sys.stderr = log  # the workload may have closed what was there, or put None in its place
    neighbors = told_by_all(gpu_neighbours)  # a stranger on any worker's GPU slows them all
    return {
        **measured.to_dict(),
        **sharing.figures(measured),
        **sharing.publish(deadline - time.monotonic()),
        "environment_key": environment.fingerprint().key,
        "cores": len(cpus),
        "cpu_pressure": cpu_pressure,
        "gpu_neighbours": neighbors,
        **({"targets": prepared.targets} if plan.names_targets else {}),
    }


@contextmanager
def _own_log(path: Path) -> Iterator[IO[str]]:
    """Sends this process's output, its compilers' included, to the trial's own file."""
    with path.open("a", buffering=1, encoding="utf-8") as log:
        streams = sys.stdout, sys.stderr
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            sys.stdout, sys.stderr = streams  # whatever the workload put there
            for stream in streams:
                with suppress(OSError, ValueError):  # ValueError: the workload closed it
                    stream.flush()
            for saved, descriptor in zip(kept, (1, 2), strict=True):
                os.dup2(saved, descriptor)
                os.close(saved)


def _text_of(error: BaseException) -> str:
    """The exception's message; empty if even asking for it fails, as an exception of a user's own may."""
    try:
        return str(error)
    except BaseException:
        return ""


def _from_compiler(error: BaseException) -> bool:
    return is_compiler_error(error) or bool(getattr(error, "from_compiler", False))


class LocalParent:
    """The local runner: it reads what this process appends to a file."""

    rank = 0

    def __init__(self, folder: Path, assignment: Assignment) -> None:
        self._assignment = assignment
        self._file = (folder / PROGRESS).open("a", buffering=1, encoding="utf-8")

    @contextmanager
    def log_file(self) -> Iterator[Path]:
        """Provides the trial's log file in the sweep's folder."""
        yield self._assignment.log_file(self.rank)

    def core_shares(self, plan: TrialPlan) -> tuple[int, int | None]:
        """Gives the worker all cores: local trials run one after the other."""
        return 1, None

    def worker_started(self) -> None:
        """Reports the host, and the GPU if there is one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        self._report("worker_started", platform.node(), f"{platform.node()}:{visible}" if self._assignment.plan.use_gpu else None)

    def enter_phase(self, phase: Phase) -> None:
        """Reports the phase."""
        self._report("enter_phase", str(phase))

    def report_early_figures(self, early: dict[str, float]) -> None:
        """Reports the figures."""
        self._report("report_early_figures", early)

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Does nothing: the local runner kills this process."""

    def _report(self, method: str, *arguments: object) -> None:
        self._file.write(json.dumps([method, *arguments]) + "\n")


def main(folder: Path) -> None:
    """Runs a local worker: reads the assignment from standard input and writes the result or the error to the folder."""
    values = json.load(sys.stdin)
    _die_with(int(values["parent"]))
    assignment = Assignment.from_dict(values)
    try:
        outcome: dict[str, Any] = {"figures": work(assignment, LocalParent(folder, assignment))}
    except MeasurementFailed as error:
        outcome = {"error_type": error.error_type, "error_text": error.text, "error_is_compilers": error.from_compiler}
    written = folder / f"{OUTCOME}.new"
    written.write_text(json.dumps(outcome), encoding="utf-8")
    os.replace(written, folder / OUTCOME)
    os._exit(0)  # threads and exit handlers of a workload must not lose, or keep waiting, what is measured


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, even if the parent is killed."""
    with suppress(OSError, AttributeError):  # no such call on this system
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
