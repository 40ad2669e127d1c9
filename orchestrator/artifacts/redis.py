"""Inductor's own remote caches on Redis, in place of the store: every compile asks the server, and gives it what it made.

What torch reads there it unpickles, which runs code, and its format knows no signatures: the harness's
`compile_cache/redis.py` adds them, and sees to it that no compile fails of a server.
"""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from compile_sweep.schema.errors import CacheError
from orchestrator.storage.filesystem import brief, without_credentials

NOBODY = "redis://127.0.0.1:1"
"""Where no server is. Without any address torch would ask the one at localhost, whoever runs it."""

URL_VARIABLE = "TORCHINDUCTOR_REDIS_URL"
"""What torch takes the address from when it first compiles something."""

NO_SERVER = {
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "0",
}
"""Environment variables under which a process asks no server, whatever its user's other jobs ask."""

_ANSWER_S = 5.0
_LIMITS = {"socket_connect_timeout": "3", "socket_timeout": "10"}
"""Seconds. Without them a server that hangs would hang the compile."""


def environment_for(location: str, tag: str = "") -> dict[str, str]:
    """Environment variables under which a process's compiler uses the server; they must be set before torch is imported.

    Args:
        location: redis:// or rediss:// (TLS), as in `redis://:password@host:6379/0`.
        tag: goes into every key: what makes artifacts wrong elsewhere and torch's own keys lack.

    Raises:
        CacheError: it is no such URL, or Redis' client is not installed, without which torch would do without in silence.
    """
    try:
        parts = urlsplit(location)
        port = parts.port
    except ValueError:  # a port that is not a number
        parts, port = urlsplit(""), None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or port == 0:
        raise CacheError(f"{without_credentials(location)} is not a Redis server; write it like redis://host:6379")
    if find_spec("redis") is None:
        raise CacheError(
            "torch needs Redis' client for Python to use a Redis server: pip install redis, or make install EXTRAS=redis"
        )
    # Not TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE: without a GPU every compile then fails of an assertion (torch 2.13).
    query = urlencode({**_LIMITS, **dict(parse_qsl(parts.query))})
    return {
        URL_VARIABLE: urlunsplit((parts.scheme, parts.netloc, parts.path, query, "")),
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "1",
        **({"TORCH_COMPILE_CACHE_KEY_TAG": tag} if tag else {}),
    }


def check(location: str) -> None:
    """Asks the server whether it is there.

    Raises:
        CacheError: it is not, does not answer, or refuses the password; or as `environment_for`.
    """
    url = environment_for(location)[URL_VARIABLE]
    import redis  # only where it is needed: the client is optional
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    client = redis.Redis.from_url(url, socket_timeout=_ANSWER_S, retry=Retry(NoBackoff(), 0))
    try:
        client.ping()
    except (redis.RedisError, ValueError) as error:
        raise CacheError(f"the Redis server at {without_credentials(location)} cannot be used: {brief(error)}") from None
    finally:
        client.close()
