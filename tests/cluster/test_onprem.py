"""cluster.onprem.yaml: a cluster is started over ssh, runs a sweep, and is stopped, on hosts without a common file system."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
import yaml
from hosts import HOME, Host, hosts, why_not
from ray.autoscaler._private.util import prepare_config, validate_config
from samples import wait_until

jsonschema = pytest.importorskip("jsonschema")

COMMANDS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
ENVIRON = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
SETTINGS = ("scope=eager,padding=max", "scope=eager,padding=longest,pad_multiple=8")


@pytest.fixture(scope="module")
def cluster(repository: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((repository / "cluster.onprem.yaml").read_text(encoding="utf-8"))
    return config


def test_it_meets_rays_schema_and_keeps_none_of_its_defaults(cluster: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)
    prepared = prepare_config(json.loads(json.dumps(cluster)))
    validate_config(prepared)
    assert {command for kind in COMMANDS for command in prepared[kind]} == {c for kind in COMMANDS for c in cluster[kind]}


def test_nothing_but_the_loopback_is_told_of_the_dashboard_and_every_node_asks_for_the_token(cluster: dict[str, Any]) -> None:
    (head,) = [command for command in cluster["head_start_ray_commands"] if "ray start" in command]
    (worker,) = [command for command in cluster["worker_start_ray_commands"] if "ray start" in command]
    assert "--dashboard-host=127.0.0.1" in head
    assert all("RAY_AUTH_MODE=token" in command.partition("ray start")[0] for command in (head, worker))
    assert '"host": 1' in worker


def test_what_is_mounted_is_what_the_installation_needs(cluster: dict[str, Any], repository: Path) -> None:
    aws = yaml.safe_load((repository / "cluster.yaml").read_text(encoding="utf-8"))
    assert sorted(cluster["file_mounts"].values()) == sorted(aws["file_mounts"].values())
    assert [
        local for local in cluster["file_mounts"].values() if not local.startswith("~") and not (repository / local).exists()
    ] == []


@pytest.mark.nightly("starts a cluster over ssh on hosts of its own; `make test` checks the files against Ray's schema")
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"needs hosts of its own: {why_not()}")
@pytest.mark.timeout(1800)
def test_a_sweep_runs_on_hosts_that_share_nothing(cluster: dict[str, Any], repository: Path, tmp_path: Path) -> None:
    with hosts(3, tmp_path) as (laptop, (head, *workers)):
        with brought_up(adapted(cluster, head, workers, repository), laptop):
            wait_until(lambda: all(any("raylet" in line for line in worker.processes()) for worker in workers), 300)
            refused = workers[0].run("python -m orchestrator.sweep --size tiny; echo exit code $?", RAY_ADDRESS="auto", **ENVIRON)
            assert f"has to run on the head of the cluster at auto, {head.address}, and this is another of its hosts" in refused
            assert "exit code 2" in refused
            assert "Traceback" not in refused
            printed = submitted(
                laptop, "--placement", "spread", "--max-concurrent", "2", "--no-confirm", "--storage", f"{HOME}/kept"
            )
            assert "succeeded" in printed
            assert "results: " in printed
            laptop.run(f"ray rsync-down cluster.yaml {HOME}/sweep/ {HOME}/fetched/", **ENVIRON)
            fetched = [path.removeprefix(f"{HOME}/fetched/") for path in laptop.files(f"{HOME}/fetched")]
            assert {"report.html", "sweep.json", "trials.jsonl"} <= set(fetched)
            assert head.files(f"{HOME}/kept") == [f"{HOME}/kept/{name}" for name in fetched]
            records = [json.loads(line) for line in laptop.run("cat fetched/trials.jsonl").splitlines()]
            assert len(records) == len(SETTINGS)
            assert all(record["status"] == "ok" for record in records), records
            logs = [laptop.run(f"cat fetched/logs/{record['trial_id']}/worker-0.log") for record in records]
            assert all("steady" in log for log in logs), logs
            assert {log.partition("is up on ")[2].partition(",")[0] for log in logs} == {"host3", "host4"}, logs
            assert not [path for worker in workers for path in worker.files(HOME) if "/logs/" in path]
        for host in (head, *workers):
            host.fall_silent(300)
            assert not host.files("/dev/shm")
            assert not [path for path in host.files("/tmp") if path.startswith("/tmp/compile-sweep")]


def adapted(cluster: dict[str, Any], head: Host, workers: list[Host], repository: Path) -> dict[str, Any]:
    """Returns the file as a person would adapt it for these hosts, except that nothing needs to be installed."""
    return {
        **cluster,
        "provider": {**cluster["provider"], "head_ip": head.address, "worker_ips": [worker.address for worker in workers]},
        "auth": {**cluster["auth"], "ssh_user": "root"},
        "setup_commands": [command for command in cluster["setup_commands"] if not command.startswith("make ")],
        "file_mounts": {
            there: here if here.startswith("~") else str(repository / here) for there, here in cluster["file_mounts"].items()
        },
    }


@contextmanager
def brought_up(config: dict[str, Any], laptop: Host) -> Iterator[None]:
    """Runs `ray up` and `ray down`, both on the laptop."""
    laptop.write(f"{HOME}/cluster.yaml", yaml.safe_dump(config))
    laptop.write(f"{HOME}/.ray/auth_token", "a1" * 32)
    laptop.write(f"{HOME}/.config/compile-sweep/cache.key", "b2" * 32)
    laptop.run("ray up --yes --disable-usage-stats cluster.yaml", timeout_s=600, **ENVIRON)
    try:
        yield
    finally:
        laptop.run("ray down --yes cluster.yaml", timeout_s=600, **ENVIRON)


def submitted(laptop: Host, *words: str) -> str:
    """Returns the output of a sweep submitted as a job through the tunnel to the dashboard."""
    options = ["--size", "tiny", "--settings", *SETTINGS, "--output", f"{HOME}/sweep", *words]
    sweep = ["python", "-m", "orchestrator.sweep", *options]
    with laptop.running("exec ray dashboard cluster.yaml", **ENVIRON):
        wait_until(lambda: laptop.reaches("127.0.0.1", 8265), 120)
        return laptop.run(f"ray job submit --address http://127.0.0.1:8265 -- {shlex.join(sweep)}", timeout_s=1200, **ENVIRON)
