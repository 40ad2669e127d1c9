"""Actors on the host of the sweep's folder, the head of a cluster, by a name that every process of the cluster finds them by.

Addresses with credentials, in the cluster's memory alone: what Ray passes around, it also writes down.

Tune names folders after a trial's configuration and writes that to files that everybody may read, and Ray logs the environment
that a worker starts with. So a plan says an address without its credentials, and trials and workers ask for the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.experimental import internal_kv

from compile_sweep.schema.redact import REDACTED, redact_uri

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


_NAMESPACE = b"compile-sweep"


def deposit(address: str) -> str:
    """Keeps an address as long as the cluster lives; returns what may be written down. Ray must be initialised."""
    shown = redact_uri(address)
    if shown != address:
        internal_kv._internal_kv_put(shown, address, overwrite=True, namespace=_NAMESPACE)
    return shown


def withdrawn(shown: str) -> str:
    """The whole address of what `deposit` returned, from any process of the cluster.

    Raises:
        LookupError: nobody has deposited it there.
    """
    if REDACTED not in shown:
        return shown
    found = internal_kv._internal_kv_get(shown, namespace=_NAMESPACE)
    if found is None:
        raise LookupError(f"the credentials of {shown} are not in the cluster's memory")
    return bytes(found).decode()


@contextmanager
def nothing_propagated() -> Iterator[None]:
    """Keeps Tune from handing AWS's credentials on in an environment that Ray logs; trials have those of their host anyway."""
    from ray.tune.execution import class_cache  # only here: workers withdraw, and need no Tune

    before = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in before if not name.startswith("AWS_")}
    try:
        yield
    finally:
        class_cache.ENV_VARS_TO_PROPAGATE = before
