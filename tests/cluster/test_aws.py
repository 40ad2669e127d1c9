"""`ray up cluster.yaml` in a simulated AWS account that gives nobody more rights than deploy/aws.yaml does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aws_account import KEY
from hosts import HOME, LAPTOP, Host, hosts, why_not
from samples import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.nightly("starts a cluster over ssh on hosts of its own; `make test` checks the files against Ray's schema"),
    pytest.mark.skipif(why_not() is not None, reason=f"needs hosts of its own: {why_not()}"),
    pytest.mark.timeout(1500),
]

ENDPOINT = f"http://{LAPTOP}:5000"
METADATA = """
import http.server, json

class Metadata(http.server.BaseHTTPRequestHandler):
    def do_PUT(self):
        self.answer("token")

    def do_GET(self):
        document = json.dumps({"accountId": "123456789012", "region": "us-west-2"})
        self.answer(document if self.path.endswith("document") else "ami-0123")

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

http.server.HTTPServer(("169.254.169.254", 80), Metadata).serve_forever()
"""
TO_NODE = """#!/bin/bash
# Whatever address the cloud gave a node, it is this host.
exec 3<>/dev/tcp/{address}/22
cat <&3 & cat >&3
kill %1
"""
ASK = """
import json, sys, boto3
ec2 = boto3.Session("{key}", "{secret}", region_name="us-west-2").client("ec2", endpoint_url="{endpoint}")
print(json.dumps([i for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]], default=str))
"""


@contextmanager
def account(laptop: Host, repository: Path) -> Iterator[dict[str, Any]]:
    """A server on the laptop that answers like AWS, with an account that has the stack."""
    with laptop.running("exec python -m moto.server -H 0.0.0.0 -p 5000"):
        wait_until(lambda: laptop.reaches(LAPTOP, 5000), 120)
        script = Path(__file__).with_name("aws_account.py")
        yield json.loads(laptop.run(f"python -W ignore {script} {ENDPOINT} {repository}/deploy/aws.yaml 2>/dev/null"))


def test_a_cluster_comes_up_asks_for_a_spot_worker_and_goes(repository: Path, tmp_path: Path) -> None:
    with hosts(1, tmp_path) as (laptop, (head,)), account(laptop, repository) as made, machine(head, made):
        laptop.write(f"{HOME}/.ssh/{KEY}.pem", made["key"])
        laptop.write(f"{HOME}/.ray/auth_token", "a1" * 32)
        laptop.write(f"{HOME}/.config/compile-sweep/cache.key", "b2" * 32)
        laptop.write(f"{HOME}/to-node", TO_NODE.format(address=head.address))
        cluster = yaml.safe_load((repository / "cluster.yaml").read_text(encoding="utf-8"))
        laptop.write(f"{HOME}/cluster.yaml", yaml.safe_dump(adapted(cluster, made, repository)))
        key = laptop.run(f"chmod +x to-node && ssh-keygen -y -f .ssh/{KEY}.pem")
        head.run(f"echo '{key.strip()}' >> .ssh/authorized_keys")
        as_launcher = {**made["launcher"], "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}

        laptop.run("ray up --yes cluster.yaml", 600, **as_launcher)
        (node,) = instances(laptop, made)
        assert node["IamInstanceProfile"]["Arn"].endswith("instance-profile/compile-sweep-head")
        assert [group["GroupName"] for group in node["SecurityGroups"]] == ["compile-sweep"]
        assert "InstanceLifecycle" not in node
        assert any("raylet" in line for line in head.processes())
        assert head.run("echo $COMPILE_SWEEP_STORAGE").strip() == "s3://compile-sweep-123456789012-us-west-2?region=us-west-2"

        more = "from ray.autoscaler.sdk import request_resources; request_resources(bundles=[{'GPU': 1, 'host': 1}])"
        head.run(f"python -c \"import ray; ray.init(address='auto'); {more}\"")
        wait_until(lambda: len(instances(laptop, made)) == 2, 240)
        (worker,) = (one for one in instances(laptop, made) if one["InstanceId"] != node["InstanceId"])
        assert worker["InstanceType"] == cluster["available_node_types"]["gpu"]["node_config"]["InstanceType"]
        assert worker["InstanceLifecycle"] == "spot"
        assert "IamInstanceProfile" not in worker

        laptop.run("ray down --yes cluster.yaml", 600, **as_launcher)
        assert {one["State"]["Name"] for one in instances(laptop, made)} <= {"terminated", "shutting-down"}
        wait_until(lambda: not [line for line in head.processes() if "raylet" in line or "gcs_server" in line], 60)


def test_a_right_that_the_stack_does_not_give_is_refused(repository: Path, tmp_path: Path) -> None:
    """This shows that the test above depends on the rights of the stack."""
    with hosts(0, tmp_path) as (laptop, _), account(laptop, repository) as made:
        for who in ("head", "launcher"):
            remove = "import boto3; boto3.client('ec2').delete_security_group(GroupName='compile-sweep')"
            refused = laptop.run(f'python -c "{remove}" 2>&1 || true', **made[who])
            assert f"user/{who} is not authorized to perform: ec2:DeleteSecurityGroup" in refused, refused


@contextmanager
def machine(head: Host, made: dict[str, Any]) -> Iterator[None]:
    """What a cloud machine has: its role's credentials, its metadata, and sudo."""
    head.write(f"{HOME}/metadata.py", METADATA)
    head.write(f"{HOME}/bin/sudo", '#!/bin/sh\nexec "$@"\n')
    exports = "\n".join(f"export {name}={value}" for name, value in made["head"].items())
    head.write(
        f"{HOME}/role", f"{exports}\nexport PATH={HOME}/bin:$PATH\n. /etc/profile.d/compile-sweep.sh 2>/dev/null || true\n"
    )
    head.run("chmod +x bin/sudo && cat role >> .profile && ip addr add 169.254.169.254/32 dev lo")
    with head.running("exec python metadata.py"):
        wait_until(lambda: head.reaches("169.254.169.254", 80), 60)
        yield


def adapted(cluster: dict[str, Any], made: dict[str, Any], repository: Path) -> dict[str, Any]:
    """Returns the committed file adapted to hosts outside a cloud: their user, their image, and nothing to install."""
    types = {
        name: {**kind, "node_config": {**kind["node_config"], "ImageId": made["image"]}}
        for name, kind in cluster["available_node_types"].items()
    }
    installs = ("apt-get", "make -C")
    return {
        **cluster,
        "available_node_types": types,
        "auth": {"ssh_user": "root", "ssh_proxy_command": f"{HOME}/to-node"},
        "setup_commands": [command for command in cluster["setup_commands"] if not any(word in command for word in installs)],
        "file_mounts": {
            there.replace("/home/ubuntu", HOME): here if here.startswith("~") else str(repository / here)
            for there, here in cluster["file_mounts"].items()
        },
    }


def instances(laptop: Host, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists the account's instances, as its launcher sees them."""
    credentials = made["launcher"]
    asked = ASK.format(key=credentials["AWS_ACCESS_KEY_ID"], secret=credentials["AWS_SECRET_ACCESS_KEY"], endpoint=ENDPOINT)
    laptop.write(f"{HOME}/ask.py", asked)
    found: list[dict[str, Any]] = json.loads(laptop.run("python ask.py"))
    return found
