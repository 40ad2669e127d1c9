"""A trial on Ray: attempts in the worker group that persists on one host or, in a cluster, in a new Ray Train worker group each.

Background: Tune reuses the trial's process from trial to trial, which saves seconds and is safe because nothing compiles in it;
measurements run in processes that are new every time.

A trial's workers meet at a store that listens on one address only: the host's address in the cluster, or 127.0.0.1 in a session
of this host. `GroupConfig` does not inherit from Ray's `TorchConfig`, because a trainer's controller would import torch to read
it.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ray
import ray.train
from ray import tune
from ray._common.utils import env_integer
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.constants import DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # base of TorchTrainer, whose module loads torch

from orchestrator.cluster import placement, remote_logs
from orchestrator.config import Placement
from orchestrator.guard import scratch_folders, watchdog
from orchestrator.guard.progress import Progress, ask_progress_actor
from orchestrator.guard.watchdog import kill_marked
from orchestrator.run import sweep_folder, trial
from orchestrator.run.ray_worker_context import RayParent
from orchestrator.run.standing_group import StandingGroup
from orchestrator.run.train_errors import cause_of, death_of, waited_s
from orchestrator.run.trial import GRACE_S, Attempt
from orchestrator.run.trial_spec import Assignment, TrialPlan
from orchestrator.run.worker import work

UNWRITTEN = "unwritten"  # key under which Tune gets the reason why a trial's record could not be written
_ARRIVAL_POLL_S = 2.0  # seconds between checks, in a cluster, whether a trial's workers have started
_PROGRESS_TIMEOUT_S = 60.0  # timeout in seconds of the trial's calls; Ray restarts a dead progress actor within seconds


_ask = partial(ask_progress_actor, timeout_s=_PROGRESS_TIMEOUT_S)


def run_trial(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tries one setting, appends its record, and returns what Tune needs to know of it. The Tune trainable."""
    status, unwritten = trial.run_trial(Assignment.from_dict(config), _attempt, _ask)
    return {"status": status, "done": True, **({UNWRITTEN: unwritten} if unwritten else {})}


def _attempt(assignment: Assignment) -> Attempt:
    plan = assignment.plan
    marker = trial.new_marker(assignment)
    figures: Mapping[str, Any] | None = None
    error: Exception | None = None
    began, logged = time.monotonic(), watchdog.log_sizes(assignment.log_folder)
    try:
        with _deadline(assignment, marker):
            figures = _run_alone(assignment, marker) if plan.head is not None else _group_for(plan).run(assignment, marker)
    except Exception as raised:  # whatever ends a worker group is a result of this attempt, not of the sweep
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


_standing: list[StandingGroup] = []  # the group that this process keeps from trial to trial, at most one


def _group_for(plan: TrialPlan) -> StandingGroup:
    """Returns the standing group; starts a new one if none is alive. Trials of one process share what a group is made from."""
    if _standing and not _standing[0].is_alive:
        _standing.pop().close()
    if not _standing:
        _standing.append(StandingGroup(plan, make_trainer, storage=tune.get_context().get_trial_dir()))
    return _standing[0]


def _run_alone(assignment: Assignment, marker: str) -> dict[str, Any]:
    """Makes an attempt in a worker group of its own; returns the figures of worker 0."""
    plan = assignment.plan
    packs = Placement(plan.placement) is Placement.PACK
    with tempfile.TemporaryDirectory(prefix=sweep_folder.TRAIN_STATE, dir=plan.folder) as storage:
        trainer = make_trainer(
            plan,
            train_loop,
            {"assignment": assignment.to_dict()},
            GroupConfig(backend="nccl" if plan.use_gpu else "gloo"),
            name=assignment.trial_id,
            storage=storage,
            variables={**trial.environment_at_import(assignment), **trial.environment_of_attempt(marker)},
            label_selector=placement.host_label(assignment.trial_id, _claimed(plan), plan.num_workers) if packs else None,
        )
        figures: dict[str, Any] = trainer.fit().return_value
    return figures


def _progress(assignment: Assignment) -> Progress | None:
    """Returns the trial's progress as the progress actor knows it."""
    return next((one for one in _ask("running") or [] if one.trial_id == assignment.trial_id), None)


def make_trainer(
    plan: TrialPlan,
    loop: Callable[[dict[str, Any]], Any],
    loop_config: dict[str, Any],
    backend: BackendConfig,
    *,
    name: str,
    storage: str,
    variables: Mapping[str, str] | None = None,
    label_selector: Mapping[str, str] | None = None,
) -> Any:
    """Makes a worker group's trainer. Untyped, because `ray.train` is typed as V1 and is V2 when it runs."""
    run_config: Any = RunConfig
    failure_config: Any = FailureConfig
    trainer: Any = _LocalTrainer if plan.head is None else DataParallelTrainer
    scaling_config: Any = ScalingConfig
    placing = Placement(plan.placement)
    return trainer(
        loop,
        train_loop_config=loop_config,
        backend_config=backend,
        scaling_config=scaling_config(
            num_workers=plan.num_workers,
            use_gpu=plan.use_gpu,
            resources_per_worker=_claimed(plan),
            placement_strategy=placement.placement_strategy(placing),
            label_selector=label_selector,
        ),
        run_config=run_config(
            name=name,
            storage_path=storage,
            failure_config=failure_config(max_failures=0, max_preemption_failures=0),  # `trial.py` decides about retries
            # Output belongs in the trial's log, see worker.py.
            worker_runtime_env={"env_vars": {**(variables or {}), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}},
        ),
    )


class _LocalTrainer(DataParallelTrainer):
    """A trainer in a session of this host, without actors of Ray Train that only data sets or a cluster need.

    Each is a process that takes over 2 s of CPU time to start, one after the other, before the first trial. They serve data sets,
    send requests to an autoscaler, and free a dead controller's resources, which `DeadTrials` does. A version of Ray with other
    names for them than 2.60 starts them anyway.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = ("DatasetsCallback", "PlacementGroupCleanerCallback")
        return [callback for callback in super()._create_default_callbacks() if type(callback).__name__ not in unneeded]

    def _initialize_and_run_controller(self, **parts: Any) -> Any:
        scaling_config: Any = self.scaling_config  # of V2 when it runs
        return super()._initialize_and_run_controller(**parts | {"scaling_policy": _Fixed(scaling_config)})


class _Fixed(FixedScalingPolicy):
    """A fixed number of workers, without requests to an autoscaler."""

    def _send_resource_request(self) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass

    def _cancel_resource_request(self) -> None:
        pass


def _claimed(plan: TrialPlan) -> dict[str, float]:
    return placement.worker_resources(Placement(plan.placement), plan.num_workers, use_gpu=plan.use_gpu, cpus=plan.claimed_cpus)


@contextmanager
def _deadline(assignment: Assignment, marker: str) -> Iterator[None]:
    """A second guard, for workers that outlive the trial's deadline: kills them and, if that does not help, this process.

    In a cluster the time starts when the workers have started, like their own deadline, because they may wait for a host.
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
    """Waits for one of the trial's workers to start, at most as long as a sweep waits for a host; returns whether it may have."""
    progress: Progress | None = None
    ends_at = time.monotonic() + placement.HOST_TIMEOUT_S
    while time.monotonic() < ends_at and not ended.wait(_ARRIVAL_POLL_S):
        progress = _progress(assignment)
        if progress is not None and progress.is_up:
            return True
    return progress is None  # without a progress actor, nobody knows


def train_loop(values: dict[str, Any]) -> dict[str, Any]:
    """Runs the trial in each worker. Ray Train's `train_loop_per_worker`."""
    assignment = Assignment.from_dict(values["assignment"])
    return work(assignment, RayParent(assignment, ray.train.get_context().get_world_rank()))


_log = logging.getLogger("ray.train")


@dataclass(frozen=True)
class GroupConfig(BackendConfig):
    """Configures a trainer in place of `TorchConfig`: its back-end lets workers meet at a store on one address."""

    backend: str  # back-end of torch.distributed: nccl or gloo
    timeout_s: float = 1800.0

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
                    member=number,  # Ray's method has an argument `rank` already
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


# Everything below runs in workers, and loads torch there.


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
