"""How Ray Train makes a process group of a trial's workers: as by default, but nothing listens beyond the cluster's own address.

In a session of this host alone that address is 127.0.0.1.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend


class GroupConfig(TorchConfig):
    """`TorchConfig`, by whose back-end workers meet at a store that listens on one address."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Group


class _Group(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        num_workers, timeout_s = len(worker_group), float(backend_config.timeout_s)
        address, port = worker_group.execute_single(0, _serve, num_workers, timeout_s)
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(
                    number,
                    _join,
                    str(backend_config.backend),
                    member=number,  # `rank` is a name of Ray's method, too
                    num_workers=num_workers,
                    address=address,
                    port=port,
                    timeout_s=timeout_s,
                )
                for number in range(num_workers)
            ]
        )


def _serve(num_workers: int, timeout_s: float) -> tuple[str, int]:
    from workloads.rendezvous import serve  # in the worker: it loads torch

    address = ray.util.get_node_ip_address()
    return address, serve(address, num_workers, timeout_s)


def _join(backend: str, *, member: int, **group: Any) -> None:
    from workloads.rendezvous import join

    join(backend, rank=member, **group)
