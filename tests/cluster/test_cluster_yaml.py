"""Ray's launcher accepts cluster.yaml, which opens no more than it should. Nothing here contacts a cloud."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from orchestrator.cluster.placement import HOST_RESOURCE

jsonschema = pytest.importorskip("jsonschema")

COMMANDS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")


@pytest.fixture(scope="module")
def cluster(repository: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((repository / "cluster.yaml").read_text(encoding="utf-8"))
    return config


class _Template(yaml.SafeLoader):
    """CloudFormation's YAML, with its short functions as mappings."""


_Template.add_multi_constructor("!", lambda loader, name, node: {name: loader.construct_scalar(node)})  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def stack(repository: Path) -> dict[str, Any]:
    """Returns deploy/aws.yaml, which creates what cluster.yaml requires."""
    text = (repository / "deploy" / "aws.yaml").read_text(encoding="utf-8")
    template: dict[str, Any] = yaml.load(text, Loader=_Template)  # a safe loader
    return template


def statements(stack: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what the stack allows the head and the person who launches it."""
    made = {name: resource["Properties"] for name, resource in stack["Resources"].items()}
    documents = [policy["PolicyDocument"] for policy in made["HeadRole"]["Policies"]] + [made["LauncherPolicy"]["PolicyDocument"]]
    return [statement for document in documents for statement in document["Statement"]]


@pytest.fixture(scope="module")
def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    """Returns the file as `ray up` sees it, with Ray's defaults filled in."""
    return prepare_config(json.loads(json.dumps(cluster)))


def test_it_meets_rays_schema(cluster: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)


def test_the_schema_does_refuse_something(cluster: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="max_wrokers"):
        validate_config({**cluster, "max_wrokers": 3})


def test_ray_accepts_it_with_its_defaults(prepared: dict[str, Any]) -> None:
    validate_config(prepared)


def test_no_command_of_rays_defaults_is_left(prepared: dict[str, Any], cluster: dict[str, Any]) -> None:
    """Ray's defaults install a nightly Ray."""
    mine = [command for kind in COMMANDS for command in cluster[kind]]
    kept = [command for kind in COMMANDS for command in prepared[kind]]
    assert set(kept) == set(mine)
    assert not [command for command in kept if "ray-wheels" in command or "-U" in command.split()]


def test_the_dashboard_is_not_public(prepared: dict[str, Any]) -> None:
    starts = [command for command in prepared["head_start_ray_commands"] if "ray start" in command]
    assert len(starts) == 1
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_every_node_asks_for_the_token(prepared: dict[str, Any]) -> None:
    for kind in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in prepared[kind] if "ray start" in command]
        assert starts
        assert all("RAY_AUTH_MODE=token ray start" in command for command in starts)
    assert "/home/ubuntu/.ray/auth_token" in prepared["file_mounts"]


def test_what_is_mounted_is_what_the_installation_needs(cluster: dict[str, Any], repository: Path) -> None:
    mounted = {local for local in cluster["file_mounts"].values() if not local.startswith("~")}
    assert {"Makefile", "LICENSE", "README.md", "pyproject.toml", "constraints.txt"} <= mounted
    assert {"analysis", "compile_sweep", "orchestrator", "workloads"} <= mounted
    assert [local for local in mounted if not (repository / local).exists()] == []


def test_the_head_is_on_demand_and_the_workers_are_spot(prepared: dict[str, Any]) -> None:
    types = prepared["available_node_types"]
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert types["gpu"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert types["gpu"]["min_workers"] == 0


def test_the_head_alone_has_a_role_and_both_have_the_group_of_the_stack(cluster: dict[str, Any], stack: dict[str, Any]) -> None:
    made = {name: resource["Properties"] for name, resource in stack["Resources"].items()}
    types = cluster["available_node_types"]
    assert types["head"]["node_config"]["IamInstanceProfile"]["Name"] == made["HeadProfile"]["InstanceProfileName"]
    assert "IamInstanceProfile" not in types["gpu"]["node_config"]
    assert cluster["provider"]["security_group"]["GroupName"] == made["SecurityGroup"]["GroupName"]
    assert types["gpu"]["resources"] == {HOST_RESOURCE: 1}


def test_nothing_in_the_stack_is_open_to_everybody(stack: dict[str, Any]) -> None:
    ingress = stack["Resources"]["SecurityGroup"]["Properties"]["SecurityGroupIngress"]
    assert [(rule["FromPort"], rule["ToPort"], rule["CidrIp"]) for rule in ingress] == [(22, 22, {"Ref": "SshFrom"})]
    assert "Default" not in stack["Parameters"]["SshFrom"]
    public = stack["Resources"]["Bucket"]["Properties"]["PublicAccessBlockConfiguration"]
    assert set(public.values()) == {True}


def test_every_right_names_its_actions_and_whatever_changes_something_its_resources(stack: dict[str, Any]) -> None:
    for statement in statements(stack):
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not [action for action in actions if "*" in action]
        if statement["Resource"] == "*":
            assert all(action.startswith("ec2:Describe") for action in actions), statement
    for action in ("ec2:RunInstances", "ec2:TerminateInstances"):
        of_instances = [s for s in statements(stack) if action in s["Action"] and "instance/*" in str(s["Resource"])]
        tagged = ("aws:RequestTag/ray-cluster-name", "aws:ResourceTag/ray-cluster-name")
        assert [s for s in of_instances if not any(tag in str(s.get("Condition")) for tag in tagged)] == []


def test_every_login_shell_knows_where_results_go(cluster: dict[str, Any], tmp_path: Path) -> None:
    """The machine's metadata and files that only an administrator may write are simulated."""
    document = '{"accountId": "123456789012", "region": "eu-west-1"}'
    command = next(c for c in cluster["setup_commands"] if "COMPILE_SWEEP_STORAGE" in c)
    script = f"curl() {{ echo '{document}'; }}; sudo() {{ cat > {tmp_path}/profile.sh; }}; {command}"
    subprocess.run(["bash", "-c", script], check=True, timeout=60, stdout=subprocess.DEVNULL)
    shown = subprocess.run(
        ["bash", "-c", f". {tmp_path}/profile.sh; echo $COMPILE_SWEEP_STORAGE $RAY_AUTH_MODE; echo $PATH"],
        env={"HOME": "/home/ubuntu", "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert shown == [
        "s3://compile-sweep-123456789012-eu-west-1?region=eu-west-1",
        "token",
        "/home/ubuntu/compile-sweep/.venv/bin:/usr/bin:/bin",
    ]


def test_workers_get_the_image_of_the_head(cluster: dict[str, Any], tmp_path: Path) -> None:
    """The head writes its image into the configuration that it launches workers with, which Ray stores as JSON."""
    substitution = next(c for c in cluster["head_start_ray_commands"] if "sed -i" in c).split("&&")[-1]
    bootstrap = tmp_path / "ray_bootstrap_config.yaml"
    bootstrap.write_text(json.dumps(cluster), encoding="utf-8")
    command = f"image=ami-0123; {substitution}".replace("~/", f"{tmp_path}/")
    subprocess.run(["bash", "-c", command], check=True, timeout=60)
    written = json.loads(bootstrap.read_text(encoding="utf-8"))
    assert {kind["node_config"]["ImageId"] for kind in written["available_node_types"].values()} == {"ami-0123"}
    for kind in written["available_node_types"].values():
        kind["node_config"]["ImageId"] = cluster["available_node_types"]["head"]["node_config"]["ImageId"]
    assert written == cluster, "it changed more than the image"
