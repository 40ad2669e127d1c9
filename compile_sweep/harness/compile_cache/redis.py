"""Inductor's remote caches, sealed: torch unpickles what they hold, so nothing of it may reach torch before a signature holds.

torch's own format knows no signatures, and whoever can write to the server could else run code in every trial. A seal goes
before each value and covers its key, too, so that one value cannot stand in for another. What has none, or another's, is to
torch as if it were not there. So is a server that hangs, is full or loads: torch does without one that refuses connections, and
of whatever else one answers the compile would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch._inductor.remote_cache import RedisRemoteCacheBackend, RemoteCacheBackend

_VERSION = b"compile-sweep remote cache 1"
_END = b"\n"


class Signer(Protocol):
    """What signs: a secret that the server does not have."""

    def sign(self, message: bytes) -> str:
        """A signature of the message, on one line."""
        ...

    def problem(self, message: bytes, signature: str) -> str | None:
        """Why a signature of a message cannot be trusted; None if it can."""
        ...


@contextmanager
def sealed_redis(seal: Signer, address: str) -> Iterator[list[str]]:
    """Signs what this process gives to Redis and takes nothing else from there while the block lasts.

    Args:
        seal: signs and verifies.
        address: of the server, as `redis://:password@host:6379/0`. torch would take it from an environment variable, which it
            writes, with the password, into every graph that it keeps.

    Yields:
        Keys of values that were refused so far.
    """
    refused: list[str] = []
    patched: Any = RedisRemoteCacheBackend
    connect, get, put = patched.__init__, RedisRemoteCacheBackend._get, RedisRemoteCacheBackend._put

    def connected(backend: RedisRemoteCacheBackend, cache_id: str) -> None:
        import redis  # only where it is needed: the client is optional

        RemoteCacheBackend.__init__(backend)
        backend._redis = redis.Redis.from_url(address)

    def sealed_get(backend: RedisRemoteCacheBackend, key: str) -> bytes | None:
        found = _answer(backend, get, key)
        if found is None:
            return None
        signature, end, data = found.partition(_END)
        if end and seal.problem(_message(key, data), signature.decode("ascii", "replace")) is None:
            return data
        refused.append(key)
        return None

    def sealed_put(backend: RedisRemoteCacheBackend, key: str, data: bytes) -> None:
        _answer(backend, put, key, seal.sign(_message(key, data)).encode("ascii") + _END + data)

    patched.__init__, patched._get, patched._put = connected, sealed_get, sealed_put
    try:
        yield refused
    finally:
        patched.__init__, patched._get, patched._put = connect, get, put


def _answer(backend: RedisRemoteCacheBackend, call: Callable[..., bytes | None], *arguments: Any) -> bytes | None:
    """What the server answers; nothing, from now on, if that is an error."""
    import redis

    try:
        return call(backend, *arguments)
    except redis.RedisError as error:
        print(f"the Redis server is done without from here: {type(error).__name__}", flush=True)
        backend._redis = None
        return None


def _message(key: str, data: bytes) -> bytes:
    return b"%s\n%d\n%s%s" % (_VERSION, len(key.encode()), key.encode(), data)
