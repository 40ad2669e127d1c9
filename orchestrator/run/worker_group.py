"""A trial on Ray: one Ray Train worker group for each attempt, watched from the trial's own process.

Background: Tune reuses the trial's process from trial to trial, which saves seconds and is safe because nothing compiles in it;
what is measured runs in Train workers, which are new processes every time.

The workers of a trial meet at a store that listens on one address alone: the cluster's, in a session of this host 127.0.0.1.
Ray's configuration for torch is no base of this one: a trainer's controller, a new process for each trial, would import torch to
read it, and the workers are started after that.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import ray
import ray.train
from ray._common.utils import env_integer
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.constants import DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer's base: its module loads torch
from ray.util.placement_group import get_current_placement_group, placement_group_table

from compile_sweep.schema.phases import Phase
from orchestrator import environment
from orchestrator.cluster import placement, remote_logs
from orchestrator.config import Placement
from orchestrator.guard import scratch_folders, watchdog
from orchestrator.guard.progress import Progress, StopRequest, find_progress_actor
from orchestrator.guard.watchdog import kill_marked
from orchestrator.run import sweep_folder, trial
from orchestrator.run.death import cause_of, death_of, waited_s
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial import GRACE_S, Attempt
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import own_cores, work

UNWRITTEN = "unwritten"
"""Key of what Tune is told of a trial whose record could not be written: why."""

STOP_POLL_S = 1.0
"""How often a worker asks whether its trial is to stop."""

_ARRIVAL_POLL_S = 2.0
"""How often the guard asks, in a cluster, whether a trial's workers are up."""

_PROGRESS_TIMEOUT_S = 60.0
"""Timeout in seconds of the trial's calls; Ray restarts a progress actor that died within seconds."""

_TELL_TIMEOUT_S = 20.0
"""The same for a worker's calls, which delay the measurement."""

_STOPPED_EXIT = 75
"""Exit code of a worker that was told to stop; only for people who look."""


def run_trial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tries one setting, appends its record, and returns what Tune needs to know of it. The Tune trainable.

    Args:
        config: `Assignment.to_dict()`.
    """
    status, unwritten = trial.run_trial(Assignment.from_dict(config), _attempt, _ask)
    return {"status": status, "done": True, **({UNWRITTEN: unwritten} if unwritten else {})}


def _ask(method: str, *arguments: Any) -> Any:
    """Calls a method of the progress actor; returns None if it does not answer, which is no reason to give a trial up."""
    try:
        return ray.get(getattr(find_progress_actor(), method).remote(*arguments), timeout=_PROGRESS_TIMEOUT_S)
    except (ray.exceptions.RayError, ValueError):  # ValueError: there is no actor of that name
        return None


def _attempt(assignment: Assignment) -> Attempt:
    plan = assignment.plan
    marker = trial.new_marker(assignment)
    figures: dict[str, Any] | None = None
    error: Exception | None = None
    began, logged = time.monotonic(), watchdog.log_sizes(assignment.log_folder)
    try:
        with (
            tempfile.TemporaryDirectory(prefix=sweep_folder.TRAIN_STATE, dir=plan.folder) as storage,
            _deadline(assignment, marker),
        ):
            figures = _trainer(assignment, marker, storage).fit().return_value
    except Exception as raised:  # whatever ends a worker group: a result of this attempt, not of the sweep
        error = raised
    finally:
        kill_marked(marker)
        remote_logs.collect_logs(assignment)
        if plan.head is not None:
            placement.release_host(assignment.trial_id)
        shutil.rmtree(scratch_folders.attempt_folder(marker), ignore_errors=True)
    progress = _progress(assignment)
    if figures is not None:
        return Attempt(figures=figures, progress=progress)
    found = watchdog.read_crash_report(assignment.log_folder, logged)
    worked_s = time.monotonic() - began - waited_s(plan, progress)
    was_raised = cause_of(error) is not None
    return Attempt(death=death_of(plan, error, progress, worked_s, found), was_raised=was_raised, progress=progress)


def _progress(assignment: Assignment) -> Progress | None:
    """Returns what the progress actor knows of the trial."""
    return next((one for one in _ask("running") or [] if one.trial_id == assignment.trial_id), None)


def _trainer(assignment: Assignment, marker: str, storage: str) -> Any:
    """A worker group's trainer. Untyped, because `ray.train` is typed as V1 and is V2 when it runs."""
    plan = assignment.plan
    run_config: Any = RunConfig
    failure_config: Any = FailureConfig
    trainer: Any = DataParallelTrainer
    scaling_config: Any = ScalingConfig
    placing = Placement(plan.placement)
    claimed = placement.worker_resources(placing, plan.num_workers, use_gpu=plan.use_gpu, cpus=plan.claimed_cpus)
    packs = plan.head is not None and placing is Placement.PACK
    environment_of_worker = {
        **trial.environment_at_import(assignment),
        **trial.environment_of_attempt(marker),
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # output belongs to the trial's log, see worker.py
    }
    return trainer(
        train_loop,
        train_loop_config={"assignment": assignment.to_dict()},
        backend_config=GroupConfig(backend="nccl" if plan.use_gpu else "gloo"),
        scaling_config=scaling_config(
            num_workers=plan.num_workers,
            use_gpu=plan.use_gpu,
            resources_per_worker=claimed,
            placement_strategy=placement.placement_strategy(placing),
            label_selector=placement.host_label(assignment.trial_id, claimed, plan.num_workers) if packs else None,
        ),
        run_config=run_config(
            name=assignment.trial_id,
            storage_path=storage,
            failure_config=failure_config(max_failures=0, max_preemption_failures=0),  # `trial.py` decides what is repeated
            worker_runtime_env={"env_vars": environment_of_worker},
        ),
    )


@contextmanager
def _deadline(assignment: Assignment, marker: str) -> Iterator[None]:
    """The second guard, for workers that outlive the trial's deadline: kills them, and if that does not help, this process.

    In a cluster it counts from when they are up, as their own does, for they may have to wait for a host.
    """
    plan, ended = assignment.plan, threading.Event()

    def guard() -> None:
        has_host = plan.head is None or _has_host(assignment, ended)
        if not ended.wait(plan.trial_deadline_s + GRACE_S if has_host else 0.0):
            kill_marked(marker)
            if not ended.wait(GRACE_S):
                os._exit(1)

    threading.Thread(target=guard, name="guards-the-deadline", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _has_host(assignment: Assignment, ended: threading.Event) -> bool:
    """Returns once one of the trial's workers is up, or none for as long as a sweep waits for a host, and whether one may be."""
    progress: Progress | None = None
    ends_at = time.monotonic() + placement.HOST_TIMEOUT_S
    while time.monotonic() < ends_at and not ended.wait(_ARRIVAL_POLL_S):
        progress = _progress(assignment)
        if progress is not None and progress.is_up:
            return True
    return progress is None  # without a progress actor nobody knows


def train_loop(values: dict[str, Any]) -> dict[str, Any]:
    """What each worker does. Ray Train's `train_loop_per_worker`.

    Args:
        values: `assignment`, as `Assignment.to_dict` makes it.

    Raises:
        MeasurementFailed: whatever went wrong, with the traceback in the trial's log.
    """
    assignment = Assignment.from_dict(values["assignment"])
    return work(assignment, RayParent(assignment, ray.train.get_context().get_world_rank()))


class RayParent:
    """The trial on Ray: the worker reports to the progress actor on the head."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self.rank = rank
        self._assignment = assignment

    def log_file(self) -> AbstractContextManager[Path]:
        """Provides the trial's log file in the sweep's folder or, on another host, a local one that is sent there."""
        return remote_logs.log_file(self._assignment, self.rank)

    def cores(self, plan: TrialPlan) -> AbstractContextManager[tuple[int, ...]]:
        """Divides by the workers that may run on this host at once; with GPUs, by no more than the host's number of GPUs."""
        if not plan.use_gpu:
            return own_cores(plan.workers_at_once, None)
        at_once = max(1, min(plan.workers_at_once, max(environment.num_host_gpus(), _gpus_of_ray())))
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return own_cores(at_once, int(gpu) if gpu.isdigit() else None)

    def connect(self, plan: TrialPlan) -> None:
        """Does nothing: Ray Train chose the GPU and connected the workers before it called this process."""

    def worker_started(self) -> None:
        """Reports the host, the GPU, and how long the trial waited for them."""
        here = ray.get_runtime_context().get_node_id()
        waited = _waited_s() if self._assignment.plan.head else 0.0
        self._tell("worker_started", here, _gpu_place(), waited)

    def enter_phase(self, phase: Phase) -> None:
        """Reports the phase if this is worker 0."""
        if self.rank == 0:
            self._tell("enter_phase", phase, self._assignment.settings.key)

    def report_early_figures(self, early: dict[str, float]) -> None:
        """Reports the figures if this is worker 0."""
        if self.rank == 0:
            self._tell("report_early_figures", early)

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Ends this process if it is worker 0, and with it the trial, on request; the reaper ends compilers it started.

        A thread, so a compiler that holds the GIL puts it off; the trial's deadlines, which need no GIL, still hold.
        """
        if self.rank != 0:
            return
        progress_actor = find_progress_actor()

        def watch() -> None:
            while True:
                time.sleep(STOP_POLL_S)
                try:
                    asked: Any = progress_actor.stop_request.remote(self._assignment.trial_id)
                    ending: StopRequest | None = ray.get(asked, timeout=10 * STOP_POLL_S)
                except Exception:  # without a progress actor nobody stops trials
                    return
                if ending is not None:
                    log.write(f"{now()} {ending.reason}\n")
                    log.flush()
                    os._exit(_STOPPED_EXIT)

        threading.Thread(target=watch, name="stop-requests", daemon=True).start()

    def _tell(self, method: str, *arguments: Any) -> None:
        """Waits until the progress actor has heard. A trial is measured even if that actor is gone."""
        with suppress(ray.exceptions.RayError, ValueError):
            ray.get(getattr(find_progress_actor(), method).remote(self._assignment.trial_id, *arguments), timeout=_TELL_TIMEOUT_S)


def _gpus_of_ray() -> int:
    """How many GPUs Ray has here: more than NVML counts where each is divided (MIG), or where NVML is not to be had."""
    here = ray.get_runtime_context().get_node_id()
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here), default=0)


def _waited_s() -> float:
    """For how long Ray had no hosts for the trial's workers, which it places together."""
    group = get_current_placement_group()
    return float(placement_group_table(group)["stats"]["end_to_end_creation_latency_ms"]) / 1e3 if group else 0.0


def _gpu_place() -> str | None:
    """This worker's GPU as host:index, None if it has none."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return f"{platform.node()}:{ids[0]}" if ids else None


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
