"""KubeRay accepts deploy/rayjob.yaml, and what it runs is a sweep. Nothing here contacts a Kubernetes cluster."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from rayjob_schema import pruned, spec_schema

from compile_sweep import command_line
from orchestrator.artifacts import KEY_VARIABLE
from orchestrator.cluster.placement import HOST_RESOURCE
from orchestrator.config import SweepCommand
from orchestrator.storage.mirror import VARIABLE

jsonschema = pytest.importorskip("jsonschema")

FULL_DEFINITION = "RAYJOB_CRD"
"""Environment variable with the path of the full definition, KubeRay's ray.io_rayjobs.yaml, if it is available."""


@pytest.fixture(scope="module")
def job(repository: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((repository / "deploy" / "rayjob.yaml").read_text(encoding="utf-8"))
    return manifest


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Fields of KubeRay 1.7 that concern the manifest, see rayjob_schema.py."""
    kept: dict[str, Any] = json.loads(Path(__file__).with_name("rayjob_fields.json").read_text(encoding="utf-8"))
    return kept


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [container for pod in (*pods, job["spec"]["submitterPodTemplate"]["spec"]) for container in pod["containers"]]


def test_kuberay_accepts_it(job: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(job["spec"], schema)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")


@pytest.mark.skipif(FULL_DEFINITION not in os.environ, reason=f"{FULL_DEFINITION} names no definition")
def test_the_whole_definition_accepts_it_and_is_what_the_fields_were_made_of(job: dict[str, Any], schema: dict[str, Any]) -> None:
    whole = spec_schema(yaml.safe_load(Path(os.environ[FULL_DEFINITION]).read_text(encoding="utf-8")), "v1")
    jsonschema.validate(job["spec"], whole)
    assert pruned(whole, job["spec"]) == schema


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ((), "entryPoint", "python"),
        (("rayClusterSpec",), "enableInTreeAutoscalling", True),
        (("rayClusterSpec", "authOptions"), "mode", "tokens"),
        (("rayClusterSpec", "workerGroupSpecs", 0), "maxReplicas", "four"),
        (("rayClusterSpec", "workerGroupSpecs", 0, "template", "spec"), "serviceAcountName", "x"),
        (("rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0), "enviroment", []),
    ],
)
def test_a_field_that_is_none_is_found(
    job: dict[str, Any], schema: dict[str, Any], path: tuple[str | int, ...], name: str, value: Any
) -> None:
    spoiled = copy.deepcopy(job["spec"])
    place: Any = spoiled
    for step in path:
        place = place[step]
    place[name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoiled, schema)


def test_its_job_is_a_sweep_that_goes_on_where_the_last_one_ended(job: dict[str, Any]) -> None:
    python, flag, module, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", "orchestrator.sweep")
    command = command_line.parse(SweepCommand, module, words)
    assert command.run.resume
    assert command.run.output is not None
    assert command.sweep.max_concurrent == job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]


def test_results_go_to_a_storage_and_every_node_has_the_key(job: dict[str, Any]) -> None:
    head, worker, submitter = ({entry["name"]: entry for entry in c.get("env", [])} for c in containers(job))
    assert head[VARIABLE]["value"].startswith("s3://")
    assert "valueFrom" in head[KEY_VARIABLE]
    assert head[KEY_VARIABLE] == worker[KEY_VARIABLE]
    assert submitter == {}


def test_no_secret_is_written_in_it_and_the_token_is_asked_for(job: dict[str, Any]) -> None:
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token", "secretName": "compile-sweep"}
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not re.search(r"\b[0-9a-f]{32,}\b|AKIA", json.dumps(job))


def test_a_gpu_pod_has_its_processors_to_itself_and_is_a_host(job: dict[str, Any]) -> None:
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert group["resources"] == {HOST_RESOURCE: "1"}


def test_it_names_the_ray_that_is_installed_and_one_image(job: dict[str, Any], repository: Path) -> None:
    pins = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in pins
    assert len({container["image"] for container in containers(job)}) == 1


def test_the_image_is_made_of_what_is_here(repository: Path) -> None:
    lines = (repository / "deploy" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    packages = {"analysis", "compile_sweep", "orchestrator", "workloads"}
    assert {"Makefile", "constraints.txt", "pyproject.toml", *packages} <= set(copied)
    assert [name for name in copied if not (repository / name).exists()] == []
