"""How Ray Train makes a process group of a trial's workers: as for torch by default, but listening on one address alone.

It is the cluster's, in a session of this host alone 127.0.0.1. Ray's configuration for torch is no base of this one: a trainer's
controller, a new process for each trial, would import torch to read it, and the workers are started after that.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray._common.utils import env_integer
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig
from ray.train.constants import DEFAULT_TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.util import TrainingFramework

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
    from workloads.rendezvous import serve

    address = ray.util.get_node_ip_address()
    return address, serve(address, num_workers, timeout_s)


def _name_ranks() -> None:
    from ray.train.torch.config import _set_torch_distributed_env_vars

    _set_torch_distributed_env_vars()


def _join(backend: str, *, member: int, **group: Any) -> None:
    from workloads.rendezvous import join

    join(backend, rank=member, **group)


def _leave(*, several: bool) -> None:
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group=several)


def _on_its_device() -> Any:
    from ray.train.torch.config import TorchConfigContextManager

    return TorchConfigContextManager()
