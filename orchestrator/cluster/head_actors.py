"""Named actors on the cluster's head, the host of the sweep's folder, and addresses with credentials that only it remembers.

Tune names folders after a trial's configuration and writes that to files that everybody may read, and Ray logs the environment in
which a worker starts. So a trial's plan holds an address without its credentials, and the trial and its workers look up the full
address in the cluster's memory.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.experimental import internal_kv

from compile_sweep.schema.redact import REDACTED, redact_uri

HEAD_RESOURCE = "node:__internal_head__"  # A resource that only the head has, under Ray's name for it

HEAD_CLAIM = {HEAD_RESOURCE: 0.001}
"""Resources that pin an actor to the head without claiming a core, because a head may have none."""

NAMESPACE = "compile-sweep"

ActorClass = TypeVar("ActorClass")


@contextmanager
def start_actor(kind: type[ActorClass], name: str, *arguments: object) -> Iterator[ActorHandle[ActorClass]]:
    """Runs an actor on the head while the block lasts. If it dies, Ray restarts it with empty state and repeats pending calls."""
    options: Any = ray.remote(num_cpus=0, resources=HEAD_CLAIM)(kind)
    options = options.options(name=name, namespace=NAMESPACE, max_restarts=-1, max_task_retries=-1)
    actor = cast("ActorHandle[ActorClass]", options.remote(*arguments))
    try:
        yield actor
    finally:
        ray.kill(actor)
        _wait_until_gone(name)


def _wait_until_gone(name: str, timeout_s: float = 30.0) -> None:
    """Waits until the name of a killed actor is free again: Ray gives it up some time after `ray.kill` returns."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)


def find_actor(kind: type[ActorClass], name: str) -> ActorHandle[ActorClass]:
    """Returns the actor of this name and class, from any process in the cluster; raises ValueError if there is none."""
    return cast("ActorHandle[ActorClass]", ray.get_actor(name, namespace=NAMESPACE))


def store_credentials(address: str) -> str:
    """Remembers an address for as long as the cluster lives; returns it without credentials. Needs an initialized Ray."""
    shown = redact_uri(address)
    if shown != address:
        internal_kv._internal_kv_put(shown, address, overwrite=True, namespace=NAMESPACE.encode())
    return shown


def with_credentials(shown: str) -> str:
    """Returns the full address for one that `store_credentials` returned; raises LookupError if the cluster does not know it."""
    if REDACTED not in shown:
        return shown
    found = internal_kv._internal_kv_get(shown, namespace=NAMESPACE.encode())
    if found is None:
        raise LookupError(f"the credentials of {shown} are not in the cluster's memory")
    return bytes(found).decode()


@contextmanager
def no_propagated_credentials() -> Iterator[None]:
    """Keeps Tune from passing on AWS credentials in an environment that Ray logs; trials use those of their own host."""
    from ray.tune.execution import class_cache  # imported here because workers, which use this module too, do not need Tune

    before = class_cache.ENV_VARS_TO_PROPAGATE
    class_cache.ENV_VARS_TO_PROPAGATE = {name for name in before if not name.startswith("AWS_")}
    try:
        yield
    finally:
        class_cache.ENV_VARS_TO_PROPAGATE = before
