"""Inductor's remote caches, on a real redis-server that the tests start. `apt-get install redis-server` installs it."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from compile_sweep.schema.errors import CacheError
from orchestrator.artifacts import KEY_VARIABLE
from orchestrator.artifacts.redis import environment_for

redis = pytest.importorskip("redis")

COMPILES = """
import json, os, torch
from torch._dynamo.utils import counters
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
torch.manual_seed(0)
with torch.no_grad():
    torch.compile(model)(torch.randn(4, 8))
print(json.dumps({**counters["inductor"], **counters["aot_autograd"]}))
"""


SEALS = """
import os
from orchestrator.artifacts import SigningKey
from compile_sweep.harness.compile_cache.redis import sealed_redis
seal = sealed_redis(SigningKey.load(), os.environ.pop("TORCHINDUCTOR_REDIS_URL"))
seal.__enter__()
"""


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server installed (apt-get install redis-server)")
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "save": "", "dir": tmp_path, "requirepass": "a password"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"redis://:a%20password@127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(10)


def _wait_for(port: int) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


def compiled(folder: Path, url: str, program: str = COMPILES) -> dict[str, int]:
    """Returns the counts of a fresh process with empty caches."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment_for(url), **own},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    counts: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return counts


@pytest.mark.nightly("compiles in two processes; test_redis_sealed.py shows that signed values are found")
@pytest.mark.slow
def test_a_process_finds_in_redis_what_another_compiled(redis_url: str, tmp_path: Path) -> None:
    first = compiled(tmp_path / "1", redis_url)
    assert first["fxgraph_cache_miss"] >= 1
    assert first["autograd_cache_miss"] >= 1
    second = compiled(tmp_path / "2", redis_url)
    assert second["autograd_cache_hit"] >= 1
    assert "fxgraph_cache_miss" not in second


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes processes sign what they store, with keys of this test only."""
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "sealed")


def poison(redis_url: str, mark: Path) -> None:
    """Replaces every value by a bomb."""
    client = redis.Redis.from_url(redis_url)
    names = list(client.keys())
    assert names
    for name in names:
        client.set(name, json.dumps({"data": base64.b64encode(pickle.dumps(Bomb(mark))).decode()}).encode())


@pytest.mark.nightly("compiles in two processes; test_redis_sealed.py refuses unsigned values")
@pytest.mark.slow
@pytest.mark.usefixtures("sealed")
def test_what_somebody_puts_on_the_server_is_never_unpickled(redis_url: str, tmp_path: Path) -> None:
    compiled(tmp_path / "1", redis_url, SEALS + COMPILES)
    poison(redis_url, tmp_path / "mark")
    attacked = compiled(tmp_path / "2", redis_url, SEALS + COMPILES)
    assert attacked["fxgraph_cache_miss"] >= 1
    assert not (tmp_path / "mark").exists()


@pytest.mark.nightly("compiles in four processes; test_redis_sealed.py reads sealed values without compiling")
@pytest.mark.slow
@pytest.mark.usefixtures("sealed")
def test_what_was_sealed_is_found_and_torch_alone_would_unpickle_anything(redis_url: str, tmp_path: Path) -> None:
    compiled(tmp_path / "1", redis_url, SEALS + COMPILES)
    again = compiled(tmp_path / "2", redis_url, SEALS + COMPILES)
    assert again["autograd_cache_hit"] >= 1
    assert "fxgraph_cache_miss" not in again
    poison(redis_url, tmp_path / "mark")
    with suppress(subprocess.CalledProcessError):  # it may also fail because of what it got
        compiled(tmp_path / "3", redis_url)
    assert (tmp_path / "mark").exists(), "or the test of sealed values tests nothing"


@pytest.mark.nightly("compiles in a process; test_nothing_leaks.py sweeps with an unreachable server")
@pytest.mark.slow
def test_a_server_that_is_not_there_costs_no_compile(tmp_path: Path) -> None:
    counts = compiled(tmp_path, f"redis://127.0.0.1:{free_port()}")
    assert counts["fxgraph_cache_miss"] >= 1


@pytest.mark.parametrize(
    "location", ["redis://", "redis://host:port", "http://host:1", "redis://:secret@:1", "redis://h:0", "host:6379"]
)
def test_what_is_no_redis_server_is_one_sentence(location: str) -> None:
    with pytest.raises(CacheError, match="not a Redis server") as refusal:
        environment_for(location)
    assert "secret" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tag_becomes_part_of_torchs_keys() -> None:
    assert environment_for("redis://host:1", tag="math attention")["TORCH_COMPILE_CACHE_KEY_TAG"] == "math attention"
    assert "TORCH_COMPILE_CACHE_KEY_TAG" not in environment_for("redis://host:1")


def test_limits_that_the_user_gives_stay() -> None:
    url = environment_for("redis://host:1/2?socket_timeout=99")["TORCHINDUCTOR_REDIS_URL"]
    assert "socket_timeout=99" in url
    assert "socket_connect_timeout=3" in url
    assert url.startswith("redis://host:1/2?")
