"""A cluster of a head and two hosts, all on this machine, that can lose a host with a worker. Runs as a process of its own.

Prints its address, then obeys lines: `lose` kills every process of a host that has a Train worker, as in a power failure, and
answers `lost`; `add` adds a host and answers `added`. It ends with its input.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster

HOST = {"num_cpus": 2, "resources": {"host": 1}, "node_ip_address": "127.0.0.1"}


def raylet(node: Any) -> psutil.Process:
    """Returns the process that represents a host here, together with its children."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def lose(cluster: Any) -> None:
    """Kills a host that has a Train worker."""
    for node in list(cluster.worker_nodes):
        processes = [raylet(node), *raylet(node).children(recursive=True)]
        if any("RayTrainWorker" in " ".join(process.cmdline()) for process in processes):
            for process in processes:
                with suppress(psutil.Error):
                    process.kill()
            cluster.remove_node(node, allow_graceful=False)
            return
    raise SystemExit("no host has a worker")


def main() -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": "127.0.0.1"})
    for _ in range(2):
        cluster.add_node(**HOST)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "lose":
                lose(cluster)
                print("lost", flush=True)
            case "add":
                cluster.add_node(**HOST)
                print("added", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
