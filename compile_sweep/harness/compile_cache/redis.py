"""Seals Inductor's remote caches: torch unpickles their values, so none may reach torch before its signature is verified.

Torch's own format has no signatures, so anyone who can write to the server could run code in every trial. A seal is prepended to
each value and also covers its key, so that one value cannot replace another. A value without a valid seal counts as missing. So
does any error of a server that hangs, is full or is loading: torch tolerates a refused connection, but any other error would fail
the compile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch._inductor.remote_cache import RedisRemoteCacheBackend, RemoteCacheBackend

_VERSION = b"compile-sweep remote cache 1"
_END = b"\n"


class Signer(Protocol):
    """Signs and verifies messages with a secret that the server does not have."""

    def sign(self, message: bytes) -> str:
        """Returns a signature of the message, on one line."""
        ...

    def problem(self, message: bytes, signature: str) -> str | None:
        """Returns why a message's signature cannot be trusted; None if it is valid."""
        ...


@contextmanager
def sealed_redis(seal: Signer, address: str, say: Callable[[str], None] = print) -> Iterator[list[str]]:
    """Signs values that this process writes to Redis and accepts only signed ones while the block lasts.

    Args:
        address: Address of the server, such as `redis://:password@host:6379/0`. It is passed directly because torch would take it
            from an environment variable, which it writes, with the password, into every graph that it stores.
        say: Gets one sentence if the server is lost, which is then not asked again: each of torch's caches would wait for it.

    Yields:
        Keys of values that were refused so far.
    """
    refused: list[str] = []
    is_lost = False
    patched: Any = RedisRemoteCacheBackend
    connect, get, put = patched.__init__, RedisRemoteCacheBackend._get, RedisRemoteCacheBackend._put

    def connected(backend: RedisRemoteCacheBackend, cache_id: str) -> None:
        import redis  # the client is optional, so it is imported only here

        RemoteCacheBackend.__init__(backend)
        backend._redis = redis.Redis.from_url(address)

    def answer(backend: RedisRemoteCacheBackend, call: Callable[..., bytes | None], *arguments: Any) -> bytes | None:
        import redis

        nonlocal is_lost
        if is_lost:
            return None
        why = "no connection"
        try:
            found = call(backend, *arguments)
            if backend._redis is not None:  # torch gives up a server that refuses or closes the connection
                return found
        except redis.RedisError as error:
            why = type(error).__name__
        is_lost, backend._redis = True, None
        say(f"the Redis server was lost while compiling ({why}), and nothing more was shared through it")
        return None

    def sealed_get(backend: RedisRemoteCacheBackend, key: str) -> bytes | None:
        found = answer(backend, get, key)
        if found is None:
            return None
        signature, end, data = found.partition(_END)
        if end and seal.problem(_message(key, data), signature.decode("ascii", "replace")) is None:
            return data
        refused.append(key)
        return None

    def sealed_put(backend: RedisRemoteCacheBackend, key: str, data: bytes) -> None:
        answer(backend, put, key, seal.sign(_message(key, data)).encode("ascii") + _END + data)

    patched.__init__, patched._get, patched._put = connected, sealed_get, sealed_put
    try:
        yield refused
    finally:
        patched.__init__, patched._get, patched._put = connect, get, put


def _message(key: str, data: bytes) -> bytes:
    return b"%s\n%d\n%s%s" % (_VERSION, len(key.encode()), key.encode(), data)
