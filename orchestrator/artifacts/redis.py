"""Inductor's own remote caches on Redis, instead of the store: every compile queries the server and uploads what it made.

Torch unpickles what it reads there, which runs code, and its format has no signatures. The harness's `compile_cache/redis.py`
adds them, and makes sure that no compile fails because of a server.
"""

from importlib.util import find_spec
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from compile_sweep.schema.errors import CacheError
from orchestrator.storage.filesystem import without_credentials

NOBODY = "redis://127.0.0.1:1"
"""An address without a server. Without any address, torch would use a server at localhost, whoever runs it."""

URL_VARIABLE = "TORCHINDUCTOR_REDIS_URL"
"""Environment variable that torch reads the address from when it first compiles something."""

NO_SERVER = {
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "0",
}
"""Environment variables that keep a process from using any server, whatever else the environment says."""

_LIMITS = {"socket_connect_timeout": "3", "socket_timeout": "10"}
"""Timeouts in seconds. Without them, a server that hangs would hang the compile."""


def environment_for(location: str, tag: str = "") -> dict[str, str]:
    """Returns the variables with which torch, not yet imported, uses a Redis server; CacheError for an invalid address."""
    try:
        parts = urlsplit(location)
        port = parts.port
    except ValueError:  # the port is not a number
        parts, port = urlsplit(""), None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or port == 0:
        raise CacheError(f"{without_credentials(location)} is not a Redis server; write it like redis://host:6379")
    if find_spec("redis") is None:
        raise CacheError(
            "torch needs Redis' client for Python to use a Redis server: pip install redis, or make install EXTRAS=redis"
        )
    # TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE is left out: without a GPU every compile then fails an assertion (torch 2.13).
    query = urlencode({**_LIMITS, **dict(parse_qsl(parts.query))})
    return {
        URL_VARIABLE: urlunsplit((parts.scheme, parts.netloc, parts.path, query, "")),
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "1",
        **({"TORCH_COMPILE_CACHE_KEY_TAG": tag} if tag else {}),
    }
