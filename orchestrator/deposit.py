"""Addresses with credentials, in the cluster's memory alone: what Ray passes around, it also writes down.

Tune names folders after a trial's configuration and writes that to files that everybody may read, and Ray logs the environment
that a worker starts with. So a plan says an address without its credentials, and trials and workers ask for the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.experimental import internal_kv

from orchestrator.secrecy import HIDDEN, without_credentials

_NAMESPACE = b"compile-sweep"


def deposit(address: str) -> str:
    """Keeps an address as long as the cluster lives; returns what may be written down. Ray must be initialised."""
    shown = without_credentials(address)
    if shown != address:
        internal_kv._internal_kv_put(shown, address, overwrite=True, namespace=_NAMESPACE)
    return shown


def withdrawn(shown: str) -> str:
    """The whole address of what `deposit` returned, from any process of the cluster.

    Raises:
        LookupError: nobody has deposited it there.
    """
    if HIDDEN not in shown:
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
