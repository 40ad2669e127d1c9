"""Faults of a cluster: a host is lost, the cache's actor is killed, the object store behind it is down or slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from arena import HERE, PYTHON_PATH, RUN, Arena, Arenas, setting, when
from fault_table import FaultTable, Row, described

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("only_in_full")]

COMPILED = "scope=full,dynamic=auto"
"""Its artifacts are stored and requested; the second trial, which is interrupted, stores fewer."""


@contextmanager
def several_hosts(arena: Arena) -> Iterator[subprocess.Popen[str]]:
    """Runs a cluster of a head and two hosts; its environment becomes the arena's."""
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "TMPDIR": str(arena.temporary),
        "COMPILE_SWEEP_CACHE_KEY": "ab" * 32,
        "CHAOS_PLAN": str(arena.folder / "plan.json"),
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        RUN: arena.run_id,
    }
    cluster = subprocess.Popen(
        [sys.executable, str(HERE / "several_hosts.py")],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=HERE,
    )
    try:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        assert address, "the cluster did not start"
        arena.environment = {name: environment[name] for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")}
        arena.environment = {**arena.environment, "RAY_ADDRESS": address}
        yield cluster
    finally:
        cluster.communicate(timeout=120)


def tell(cluster: subprocess.Popen[str], word: str) -> str:
    """Returns the cluster's answer to a word."""
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    cluster.stdin.write(word + "\n")
    cluster.stdin.flush()
    return cluster.stdout.readline().strip()


def left_in(arena: Arena) -> list[str]:
    """Lists the cluster's placement groups that are not removed."""
    code = (
        "import json, ray; from ray.util import placement_group_table as table; ray.init(logging_level='ERROR', "
        "log_to_driver=False); print(json.dumps([name for name, one in table().items() if one['state'] != 'REMOVED']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **arena.environment}, capture_output=True, text=True, timeout=120
    )
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def test_a_lost_host_costs_a_try(arenas: Arenas, fault_table: FaultTable) -> None:
    arena = arenas({2: {"kind": "hang", "phase": "building", "times": 1}})
    with several_hosts(arena) as cluster:
        words = ("--cache-store", "none", "--placement", "spread", "--settings")
        running = arena.start(*words, *map(setting, (0, 2, 1)))
        when(lambda: arena.has_begun(2) or running.poll() is not None)
        arena.note_fault()
        assert tell(cluster, "lose") == "lost"
        done = arena.finish(running)
        assert done.returncode == 0, done.stdout + done.stderr
        assert left_in(arena) == []
    arena.check_nothing_is_left()
    arena.check_records(total=3, measured={0, 1, 2})
    record = arena.record(2)
    assert record["tries"] == 2, record
    assert "left the cluster" in record["retry_reasons"][0], record
    fault_table.tell(
        Row(
            name="lost host",
            how="every process of the host that a worker is on is killed",
            outcome=described(record),
            tries=2,
            recovery_s=arena.recovery_s(),
        )
    )


def test_a_killed_cache_actor_costs_nothing(arenas: Arenas, fault_table: FaultTable, tmp_path: Path) -> None:
    arena = arenas({2: {"kind": "pause", "phase": "building", "times": 1}})
    with several_hosts(arena):
        words = ("--cache-store", str(tmp_path / "cache"), "--starts", "shared", "--no-warm-start", "--settings")
        running = arena.start(*words, *(setting(multiple, COMPILED) for multiple in (3, 2, 1)))
        when(lambda: arena.has_begun(2) or running.poll() is not None)
        arena.note_fault()
        assert arena.kill("ray::CacheHolder") == 1
        done = arena.finish(running)
        assert done.returncode == 0, done.stdout + done.stderr
        assert left_in(arena) == []
    arena.check_nothing_is_left()
    arena.check_records(total=3, measured={1, 2, 3})
    assert [record["cache_faults"] for record in arena.records()] == [[], [], []]
    assert arena.record(1)["cache_restored"] >= arena.record(3)["cache_made"] > 0
    record = arena.record(2)
    fault_table.tell(
        Row(
            name="the cache's actor killed",
            how="SIGKILL during a trial that has restored artifacts and will publish some",
            outcome=described(record),
            tries=record["tries"],
            recovery_s=arena.recovery_s(),
        )
    )


@pytest.mark.parametrize(
    ("fault", "how", "shares"),
    [
        ("500", "answers every request with an error", False),
        ("slow", "answers half a second late", True),
        ("hanging", "never answers", False),
    ],
)
def test_a_store_that_is_away_or_slow_costs_no_trial(
    arenas: Arenas, fault_table: FaultTable, fault: str, how: str, shares: bool
) -> None:
    from faulty_proxy import Fault, faulty_proxy

    with s3() as port, faulty_proxy(port) as proxy:
        environment = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
        arena = arenas({2: {"kind": "pause", "phase": "building", "times": 1}}, environment=environment)
        uri = f"s3://artifacts/chaos?endpoint_override=127.0.0.1:{proxy.port}&scheme=http&region=us-east-1"
        words = ("--cache-store", uri, "--starts", "shared", "--no-warm-start", "--settings")
        running = arena.start(*words, *(setting(multiple, COMPILED) for multiple in (3, 2, 1)))
        when(lambda: arena.has_begun(2) or running.poll() is not None)
        arena.note_fault()
        proxy.fault = Fault(fault)
        done = arena.finish(running)
        assert done.returncode == 0, done.stdout + done.stderr
    arena.check_nothing_is_left()
    arena.check_records(total=3, measured={1, 2, 3})
    first, record, last = (arena.record(multiple) for multiple in (3, 2, 1))
    assert first["cache_made"] > 0
    assert not first["cache_faults"]
    assert bool(last["cache_restored"]) is shares
    assert ("could not use the store of compile artifacts" in done.stdout) is not shares
    fault_table.tell(
        Row(
            name=f"object store {'slow' if fault == 'slow' else 'away' if fault == '500' else 'hanging'}",
            how=f"from the second trial on it {how}",
            outcome=described(record),
            tries=record["tries"],
            recovery_s=arena.recovery_s(),
        )
    )


@contextmanager
def s3() -> Iterator[int]:
    """Yields the port of a moto server with a bucket."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    client: Any = S3FileSystem(
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
        access_key="test",
        secret_key="test",
    )
    client.create_dir("artifacts")
    try:
        yield int(port)
    finally:
        server.stop()
