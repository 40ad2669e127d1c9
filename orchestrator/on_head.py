"""Actors on the host of the sweep's folder, the head of a cluster, by a name that every process of the cluster finds them by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle

HEAD = "node:__internal_head__"
"""Ray's name of what the head alone has one of."""

CLAIM = {HEAD: 0.001}
"""Holds to the head what claims it, and no core, of which a head may have none."""

NAMESPACE = "compile-sweep"

Kept = TypeVar("Kept")


@contextmanager
def kept(kind: type[Kept], name: str, *arguments: object) -> Iterator[ActorHandle[Kept]]:
    """An actor while the block lasts. If it dies Ray starts it again, without what it held, and whoever asks is answered.

    Args:
        kind: its class.
        name: which `found` takes.
        arguments: for the class.

    Raises:
        ActorAlreadyExistsError: the cluster has one of this name.
    """
    options: Any = ray.remote(num_cpus=0, resources=CLAIM)(kind)
    options = options.options(name=name, namespace=NAMESPACE, max_restarts=-1, max_task_retries=-1)
    actor = cast("ActorHandle[Kept]", options.remote(*arguments))
    try:
        yield actor
    finally:
        ray.kill(actor)


def found(kind: type[Kept], name: str) -> ActorHandle[Kept]:
    """The actor of this name and class, from any process of the cluster.

    Raises:
        ValueError: there is none.
    """
    return cast("ActorHandle[Kept]", ray.get_actor(name, namespace=NAMESPACE))
