"""What runs in each Ray Train worker: a fresh process that measures or starts one setting and returns plain values.

How Ray Train makes a process group of a trial's workers: as for torch by default, but listening on one address alone.

It is the cluster's, in a session of this host alone 127.0.0.1. Ray's configuration for torch is no base of this one: a trainer's
controller, a new process for each trial, would import torch to read it, and the workers are started after that.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import ray
import ray.train
from ray._common.utils import env_integer
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig
from ray.train.constants import DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.util import TrainingFramework
from ray.util.placement_group import get_current_placement_group, placement_group_table

from compile_sweep.schema import redact
from compile_sweep.schema.outcome import is_let_down
from compile_sweep.schema.phases import Phase
from orchestrator import environment
from orchestrator.artifacts.sharing import Sharing
from orchestrator.cluster import remote_logs
from orchestrator.guard import cores, scratch_folders, watchdog
from orchestrator.guard.cpu_pressure import PressureGauge
from orchestrator.guard.gpu_neighbors import GpuNeighborMonitor
from orchestrator.guard.progress import StopRequest, find_progress_actor
from orchestrator.guard.watchdog import ATTEMPT_MARKER
from orchestrator.run.script_worker import measure_script
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial_spec import Assignment, TrialPlan

STOP_POLL_S = 1.0
"""How often a worker asks whether its trial is to stop."""

_LEAVING_S = 10.0
"""How long a worker waits for processes of others, a killed trial's say, to leave its GPU, which may take seconds."""

_TELL_TIMEOUT_S = 20.0
"""How long a worker waits for the progress actor; one that died is there again within seconds."""

LET_DOWN_PATIENCE_S = 8.0
"""How long a worker whose peer is gone holds its tongue. Ray ends the group at the first failure it hears of, within a second of
it, and that one should be the peer's."""

_STOPPED_EXIT = 75
"""Exit code of a worker that was told to stop; only for people who look."""


class MeasurementFailed(Exception):
    """A worker's exception in a form that pickles anywhere: foreign exceptions often do not."""

    def __init__(self, error_type: str, text: str, from_compiler: bool, log: str) -> None:
        super().__init__(error_type, text, from_compiler, log)
        self.error_type, self.text, self.from_compiler, self.log = error_type, text, from_compiler, log

    def __str__(self) -> str:
        return f"{self.error_type}: {self.text} (see {self.log})"


def train_loop(values: dict[str, Any]) -> dict[str, Any]:
    """Measures one assignment. Ray Train's `train_loop_per_worker`.

    Args:
        values: `assignment`, as `Assignment.to_dict` makes it.

    Returns:
        Figures of a `TrialRecord` or, for a warm start, of a `WarmStart`; the trial uses worker 0's.

    Raises:
        MeasurementFailed: whatever went wrong, with the traceback in the trial's log.
    """
    assignment, own = Assignment.from_dict(values["assignment"]), scratch_folders.attempt_folder(os.environ[ATTEMPT_MARKER])
    os.environ.update(scratch_folders.compile_cache_env(own))  # of this host, before Dynamo is loaded and reads them
    rank = ray.train.get_context().get_world_rank()
    with remote_logs.log_file(assignment, rank) as path, _own_log(path) as log:
        watchdog.log_crashes(log)
        watchdog.start_reaper(own)
        deadline = time.monotonic() + assignment.plan.trial_deadline_s
        watchdog.set_deadline(assignment.plan.trial_deadline_s, log)
        try:
            scratch_folders.check_temp_folder()
            with _own_cores(assignment.plan) as cpus:
                return _measure(assignment, rank, cpus, deadline, log)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            if assignment.plan.num_workers > 1 and is_let_down(_type_name(error), str(error)):
                time.sleep(LET_DOWN_PATIENCE_S)
            told = redact.redact_text(str(error))  # Ray writes it into its own logs, too
            raise MeasurementFailed(_type_name(error), told, _from_compiler(error), _log_name(assignment, rank)) from None
        finally:
            watchdog.clear_deadline()


@contextmanager
def _own_cores(plan: TrialPlan) -> Iterator[tuple[int, ...]]:
    """Binds this process to its share of the host's cores, which is its own while the block lasts."""
    at_once, preferred = plan.workers_at_once, None
    if plan.use_gpu:  # a host takes no more workers than it has GPUs, and a GPU's neighbours keep their shares
        at_once = max(1, min(at_once, max(environment.num_host_gpus(), _gpus_of_ray())))
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        preferred = int(gpu) if gpu.isdigit() else None
    with cores.hold_slot(at_once, preferred) as slot:
        cpus = cores.cpu_share(slot, at_once)
        cores.bind_process(cpus)
        yield cpus


def _gpus_of_ray() -> int:
    """How many GPUs Ray has here: more than NVML counts where each is divided (MIG), or where NVML is not to be had."""
    here = ray.get_runtime_context().get_node_id()
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here), default=0)


def _waited_s() -> float:
    """For how long Ray had no hosts for the trial's workers, which it places together."""
    group = get_current_placement_group()
    return float(placement_group_table(group)["stats"]["end_to_end_creation_latency_ms"]) / 1e3 if group else 0.0


def _import_from(python_path: str) -> None:
    """Behind the first place, as Python does with PYTHONPATH. This host's Ray may have been started with it already."""
    sys.path[1:1] = [folder for folder in python_path.split(os.pathsep) if folder not in sys.path and os.path.isdir(folder)]


def _measure(assignment: Assignment, rank: int, cpus: Sequence[int], deadline: float, log: IO[str]) -> dict[str, Any]:
    plan = assignment.plan
    place = f"{platform.node()}, on cores {', '.join(map(str, cpus))}"
    print(f"{now()} worker {rank} of {plan.num_workers} is up on {place}", flush=True)
    gc.disable()  # what imports make stays; looking through it again and again takes a second and more
    import torch  # not at the head of the module: the trial and the controller import it too, and need no torch

    torch.set_num_threads(len(cpus))  # Ray Train has loaded it, with the number of threads that Ray thought right

    _import_from(plan.python_path)
    from compile_sweep.contract.base import load_workload
    from compile_sweep.harness.measure import Measurement, measure
    from compile_sweep.harness.measurement import told_by_all
    from compile_sweep.harness.prepare import prepare
    from compile_sweep.harness.toolchain import start_compile_workers, warm_cpp_headers
    from compile_sweep.harness.warm_start import Start, restart

    if not plan.use_gpu:
        warm_cpp_headers()
    elif assignment.settings.mode is not None:
        start_compile_workers()
    progress_actor = find_progress_actor()
    here = ray.get_runtime_context().get_node_id()
    _tell(progress_actor.worker_started.remote(assignment.trial_id, here, _gpu_place(), _waited_s() if plan.head else 0.0))
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
        print(f"{now()} {phase}", flush=True)
        if rank == 0:
            _tell(progress_actor.enter_phase.remote(assignment.trial_id, phase, assignment.settings_key))
        seconds_left = deadline - time.monotonic()
        watchdog.set_deadline(min(plan.compile_deadline_s, seconds_left) if phase is Phase.WARMING_UP else seconds_left, log)
        if phase is Phase.WARMING_UP:
            gauge.start()

    def on_early(early: dict[str, float]) -> None:
        if rank == 0:
            _tell(progress_actor.report_early_figures.remote(assignment.trial_id, early))

    if rank == 0 and plan.prunes:
        _watch_stop_requests(assignment.trial_id, log)
    if plan.script is not None:
        gc.enable()
        device = torch.device("cuda", torch.cuda.current_device()) if plan.use_gpu else torch.device("cpu")
        found = measure_script(assignment, rank=rank, cpus=cpus, device=device, on_phase=on_phase, on_early=on_early)
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
    device = torch.device("cuda", torch.cuda.current_device()) if plan.use_gpu else torch.device("cpu")
    sharing = Sharing(assignment, workload, rank)
    sharing.restore(deadline - time.monotonic())
    with sharing.watching():
        prepared = prepare(workload, assignment.settings, device)
        measured: Start | Measurement
        if plan.warm_start:
            measured = restart(prepared, rank=rank, on_phase=on_phase)
        else:
            measured = measure(prepared, rank=rank, pipeline=plan.pipeline, on_phase=on_phase, on_early=on_early)
    neighbours = told_by_all(gpu_neighbours)  # a stranger on any worker's GPU slows them all
    return {
        **measured.to_dict(),
        **sharing.figures(measured),
        **sharing.publish(deadline - time.monotonic()),
        "environment_key": environment.fingerprint().key,
        "cores": len(cpus),
        "cpu_pressure": cpu_pressure,
        "gpu_neighbours": neighbours,
    }


def _gpu_place() -> str | None:
    """This worker's GPU as host:index, None if it has none."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return f"{platform.node()}:{ids[0]}" if ids else None


def _tell(told: Any) -> None:
    """Waits until the progress actor has heard. One that is gone does not keep a trial from being measured."""
    with suppress(ray.exceptions.RayError):
        ray.get(told, timeout=_TELL_TIMEOUT_S)


def _watch_stop_requests(trial_id: str, log: IO[str]) -> None:
    """Ends this process, and by that the trial, once the progress actor says so; compilers it started are the reaper's to end.

    A thread, so a compiler that holds the GIL puts it off; the trial's deadlines, which need no GIL, still hold.
    """
    progress_actor = find_progress_actor()

    def watch() -> None:
        while True:
            time.sleep(STOP_POLL_S)
            try:
                asked: Any = progress_actor.stop_request.remote(trial_id)
                ending: StopRequest | None = ray.get(asked, timeout=10 * STOP_POLL_S)
            except Exception:  # without a progress actor nobody stops trials
                return
            if ending is not None:
                log.write(f"{now()} {ending.reason}\n")
                log.flush()
                os._exit(_STOPPED_EXIT)

    threading.Thread(target=watch, name="stop-requests", daemon=True).start()


@contextmanager
def _own_log(path: Path) -> Iterator[IO[str]]:
    """Sends this process's output, its compilers' included, to the trial's own file."""
    with path.open("a", buffering=1, encoding="utf-8") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            for saved, descriptor in zip(kept, (1, 2), strict=True):
                os.dup2(saved, descriptor)
                os.close(saved)


def _log_name(assignment: Assignment, rank: int) -> str:
    """As a person finds it, whichever host wrote it."""
    return str(assignment.log_folder / remote_logs.log_file_name(rank))


def _type_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def _from_compiler(error: BaseException) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return bool(getattr(error, "from_compiler", False)) or isinstance(error, TorchDynamoException)


_log = logging.getLogger("ray.train")


@dataclass(frozen=True)
class GroupConfig(BackendConfig):
    """What a trainer is given in the place of `TorchConfig`: by its back-end workers meet at a store on one address."""

    backend: str
    """Of torch.distributed: nccl or gloo."""
    timeout_s: float = 1800.0
    """For each operation of the group."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Group

    @property
    def train_func_context(self) -> Any:
        return _on_its_device

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Group(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        num_workers, timeout_s = len(worker_group), backend_config.timeout_s
        address, port = worker_group.execute_single(0, _serve, num_workers, timeout_s)
        worker_group.execute(_name_ranks)
        ray.get(
            [
                worker_group.execute_single_async(
                    number,
                    _join,
                    backend_config.backend,
                    member=number,  # `rank` is a name of Ray's method, too
                    num_workers=num_workers,
                    address=address,
                    port=port,
                    timeout_s=timeout_s,
                )
                for number in range(num_workers)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        timeout_s = env_integer(TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S)
        try:
            ray.get(worker_group.execute_async(_leave, several=len(worker_group) > 1), timeout=timeout_s)
        except GetTimeoutError:
            _log.warning("workers did not leave their process group within %s s and are ended", timeout_s)


# What follows runs in workers, and loads torch there.


def _serve(num_workers: int, timeout_s: float) -> tuple[str, int]:
    from compile_sweep.harness.distributed import serve

    address = ray.util.get_node_ip_address()
    return address, serve(address, num_workers, timeout_s)


def _name_ranks() -> None:
    from ray.train.torch.config import _set_torch_distributed_env_vars

    _set_torch_distributed_env_vars()


def _join(backend: str, *, member: int, **group: Any) -> None:
    from compile_sweep.harness.distributed import join

    join(backend, rank=member, **group)


def _leave(*, several: bool) -> None:
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group=several)


def _on_its_device() -> Any:
    from ray.train.torch.config import TorchConfigContextManager

    return TorchConfigContextManager()
