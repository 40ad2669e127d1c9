"""Values of Inductor's remote caches reach torch only if this project's key has signed them, for that very key."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from torch._inductor.remote_cache import RedisRemoteCacheBackend, RemoteFxGraphCache

from compile_sweep.harness.compile_cache.redis import sealed_redis
from orchestrator.artifacts import SigningKey

redis = pytest.importorskip("redis")

ADDRESS = "redis://127.0.0.1:1"
OURS, THEIRS = SigningKey(b"k" * 32), SigningKey(b"t" * 32)


class Server:
    """The part of Redis' client that torch uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    monkeypatch.setattr(redis.Redis, "from_url", lambda url: found)
    return found


def test_what_was_sealed_comes_back_as_it_was(server: Server) -> None:
    with sealed_redis(OURS, ADDRESS) as refused:
        cache = RemoteFxGraphCache("id")
        assert cache.get("key") is None
        cache.put("key", {"data": "graph\n"})
        assert cache.get("key") == {"data": "graph\n"}
    assert refused == []
    assert all(b"graph" in value and value.startswith(OURS.id.encode()) for value in server.values.values())


def test_another_process_with_the_key_reads_it_and_one_with_another_key_does_not(server: Server) -> None:
    with sealed_redis(OURS, ADDRESS):
        RemoteFxGraphCache("id").put("key", 1)
    with sealed_redis(OURS, ADDRESS) as refused:
        assert RemoteFxGraphCache("id").get("key") == 1
    with sealed_redis(THEIRS, ADDRESS) as refused:
        assert RemoteFxGraphCache("id").get("key") is None
    assert len(refused) == 1


@pytest.mark.parametrize(
    "error", [redis.TimeoutError("no answer"), redis.ConnectionError("refused"), redis.ResponseError("full")]
)
def test_a_lost_server_is_said_once_and_asked_by_no_cache_again(server: Server, error: Exception) -> None:
    asked: list[str] = []
    said: list[str] = []

    def fail(key: str) -> bytes | None:
        asked.append(key)
        raise error

    server.get = fail  # type: ignore[method-assign]
    with sealed_redis(OURS, ADDRESS, said.append):
        for _ in range(3):
            cache = RemoteFxGraphCache("id")
            assert cache.get("key") is None
            cache.put("key", 1)
    assert (len(asked), len(said), server.values) == (1, 1, {})
    assert said[0].startswith("the Redis server was lost while compiling (")


def test_what_somebody_else_wrote_is_not_there(server: Server) -> None:
    bomb = pickle.dumps(SigningKey.load)
    with sealed_redis(OURS, ADDRESS) as refused:
        cache = RemoteFxGraphCache("id")
        cache.put("key", "ours")
        (place,) = server.values
        signed = server.values[place]
        signature = signed.partition(b"\n")[0]
        forged = [b"", b"\n", b"no signature", bomb, b"\xff\n" + bomb, signature, signature + b"\n", signature + b"\n" + bomb,
                  signed + b" ", signed[1:], THEIRS.sign(bomb).encode() + b"\n" + bomb]  # fmt: skip
        for value in forged:
            server.values[place] = value
            assert cache.get("key") is None, value
    assert len(refused) == len(forged)


def test_one_value_does_not_stand_in_for_another(server: Server) -> None:
    with sealed_redis(OURS, ADDRESS):
        cache = RemoteFxGraphCache("id")
        for key in ("first", "second"):
            cache.put(key, key)
        first, second = sorted(server.values)
        server.values[first], server.values[second] = server.values[second], server.values[first]
        assert [cache.get(key) for key in ("first", "second")] == [None, None]


@pytest.mark.parametrize(
    "error", [redis.TimeoutError, redis.exceptions.OutOfMemoryError, redis.ReadOnlyError, redis.ConnectionError]
)
@pytest.mark.parametrize("method", ["get", "set"])
def test_of_a_server_that_answers_with_an_error_no_compile_fails(
    server: Server, error: type[Exception], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fails(key: str, *value: bytes) -> None:
        asked.append(key)
        raise error("no")

    monkeypatch.setattr(server, method, fails)
    with sealed_redis(OURS, ADDRESS) as refused:
        cache = RemoteFxGraphCache("id")
        for _ in range(2):
            cache.put("key", "graph")
            assert cache.get("key") is None or method == "set"
    assert (refused, len(asked)) == ([], 1)  # it is not asked again


def test_torchs_own_reading_is_put_back_whatever_happens(server: Server) -> None:
    before = RedisRemoteCacheBackend._get, RedisRemoteCacheBackend._put
    with pytest.raises(RuntimeError), sealed_redis(OURS, ADDRESS):
        raise RuntimeError
    assert (RedisRemoteCacheBackend._get, RedisRemoteCacheBackend._put) == before


def test_an_address_that_torch_is_not_told_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_REDIS_URL", ADDRESS)
    with sealed_redis(OURS, "redis://:secret@127.0.0.1:2/3"):
        asked = RedisRemoteCacheBackend("id")._redis.connection_pool.connection_kwargs
    assert (asked["port"], asked["db"], asked["password"]) == (2, 3, "secret")
    assert RedisRemoteCacheBackend("id")._redis.connection_pool.connection_kwargs["port"] == 1
