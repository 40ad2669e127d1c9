"""How a worker of Ray Train finds out its host, cores and GPU, and how it reports to the progress actor on the head."""

import os
import platform
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group_table

from compile_sweep.script.trial import StartRun
from orchestrator import environment
from orchestrator.cluster import remote_logs
from orchestrator.guard.progress import StopRequest, ask_progress_actor
from orchestrator.run.sweep_folder import now
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import own_cores

STOP_POLL_S = 1.0  # seconds between a worker's queries whether its trial should stop
_TELL_TIMEOUT_S = 20.0  # timeout in seconds of a worker's calls, which delay the measurement
_STOPPED_EXIT = 75  # exit code of a worker that stopped on request; informational only


class RayParent:
    """The trial on Ray: the worker reports to the progress actor on the head."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self.rank = rank
        self.runs_of_scripts: StartRun | None = None
        self._assignment = assignment

    def log_file(self) -> AbstractContextManager[Path]:
        """Provides the trial's log file in the sweep's folder or, on another host, a local one that is sent there."""
        return remote_logs.log_file(self._assignment, self.rank)

    def cores(self, plan: TrialPlan) -> AbstractContextManager[tuple[int, ...]]:
        """Binds this process to its share of the host's cores."""
        return own_cores(*self.core_shares(plan))

    def core_shares(self, plan: TrialPlan) -> tuple[int, int | None]:
        """Returns the number of shares that this host's cores are divided into, and the share to prefer, if any.

        There are as many shares as workers that may run here at once; with GPUs, no more than the host has GPUs.
        """
        if not plan.use_gpu:
            return plan.workers_at_once, None
        at_once = max(1, min(plan.workers_at_once, max(environment.num_host_gpus(), _gpus_of_ray())))
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return at_once, int(gpu) if gpu.isdigit() else None

    def gpu_index(self) -> int:
        """Returns the index of this worker's GPU among those that this process sees, namely those of all workers on the host."""
        (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", gpu).split(",")
        return visible.index(gpu) if gpu in visible else 0

    def connect(self, plan: TrialPlan) -> None:
        """Does nothing: Ray Train chose the GPU and connected the workers before it called this process."""

    def worker_started(self) -> None:
        """Reports the host, the GPU, and how long the trial waited for them."""
        here = ray.get_runtime_context().get_node_id()
        waited = _waited_s() if self._assignment.plan.head else 0.0
        self._tell("worker_started", here, _gpu_place(), waited)

    def enter_phase(self, phase: str) -> None:
        """Reports the phase if this is worker 0."""
        if self.rank == 0:
            self._tell("enter_phase", phase, self._assignment.settings.key)

    def report_early_figures(self, early: dict[str, float]) -> None:
        """Reports the figures if this is worker 0."""
        if self.rank == 0:
            self._tell("report_early_figures", early)

    def pass_on(self, method: str, *arguments: Any) -> None:
        """Forwards a report of this worker's child, replacing its location with this worker's."""
        if method == "worker_started":
            self.worker_started()
        else:
            getattr(self, method)(*arguments)

    def stop_request(self) -> StopRequest | None:
        """Asks whether the trial should stop; returns None if there is no progress actor."""
        ending: StopRequest | None = ask_progress_actor("stop_request", self._assignment.trial_id, timeout_s=10 * STOP_POLL_S)
        return ending

    def watch_stop_requests(self, log: IO[str]) -> None:
        """Ends this process, and with it the trial, on request if it is worker 0; the reaper ends the compilers it started.

        This runs in a thread, so a compiler that holds the GIL delays it; the trial's deadlines, which need no GIL, still hold.
        """
        if self.rank != 0:
            return

        def watch() -> None:
            while (ending := self.stop_request()) is None:
                time.sleep(STOP_POLL_S)
            log.write(f"{now()} {ending.reason}\n")
            log.flush()
            os._exit(_STOPPED_EXIT)

        threading.Thread(target=watch, name="stop-requests", daemon=True).start()

    def _tell(self, method: str, *arguments: Any) -> None:
        """Calls the progress actor and waits for its answer. A trial is measured even if that actor is gone."""
        ask_progress_actor(method, self._assignment.trial_id, *arguments, timeout_s=_TELL_TIMEOUT_S)


def _gpus_of_ray() -> int:
    """Returns the number of GPUs that Ray has on this host: more than NVML counts under MIG or without NVML."""
    here = ray.get_runtime_context().get_node_id()
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here), default=0)


def _waited_s() -> float:
    """Returns how long Ray had no hosts for the trial's workers, which it places together, in seconds."""
    group = get_current_placement_group()
    return float(placement_group_table(group)["stats"]["end_to_end_creation_latency_ms"]) / 1e3 if group else 0.0


def _gpu_place() -> str | None:
    """Returns this worker's GPU as host:index; None if it has none."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return f"{platform.node()}:{ids[0]}" if ids else None
