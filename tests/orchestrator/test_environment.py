"""The fingerprint: which facts about a host decide whether figures are comparable."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pynvml
import pytest
from samples import H200

from orchestrator import environment
from orchestrator.artifacts import manifest
from orchestrator.environment import fingerprint, git_commit


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cores", 128),
        ("driver", "580.95.05"),
        ("num_gpus", 8),
        ("memory_bytes", 560 * 2**30),
        ("ray", "2.61.0"),
        ("platform", "Linux-6.12"),
        ("cpu", "AMD EPYC 9654"),  # the processor beside a GPU
    ],
)
def test_what_does_not_decide_a_figure_leaves_the_key(name: str, value: object) -> None:
    assert dataclasses.replace(H200, **{name: value}).key == H200.key


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch", "2.12.0"),
        ("triton", None),
        ("transformers", "5.18.0"),
        ("cuda", "12.9"),
        ("gpu", "NVIDIA A100-SXM4-40GB"),
        ("gpu", None),
        ("python", "3.12.3"),
    ],
)
def test_what_decides_a_figure_changes_the_key(name: str, value: object) -> None:
    assert dataclasses.replace(H200, **{name: value}).key != H200.key


def test_without_a_gpu_the_processor_decides() -> None:
    laptop = dataclasses.replace(H200, gpu=None, num_gpus=0, gpu_memory_bytes=None, cuda=None, driver=None)
    assert dataclasses.replace(laptop, cpu="AMD EPYC 9654").key != laptop.key
    assert dataclasses.replace(laptop, cores=2).key == laptop.key


def test_a_key_is_the_same_in_every_process(repository: Path) -> None:
    code = f"from orchestrator.environment import Environment; print(Environment(**{H200.to_dict()!r}).key)"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == H200.key


def test_this_hosts_fingerprint_is_what_python_and_the_packages_say() -> None:
    here = fingerprint()
    assert here.python == platform.python_version()
    assert here.torch == metadata.version("torch")
    assert here.transformers == metadata.version("transformers")
    assert here.cores == len(os.sched_getaffinity(0)) >= 1
    assert here.memory_bytes > 2**28
    assert here.cpu
    assert fingerprint() == here
    assert json.loads(json.dumps(here.to_dict())) == dataclasses.asdict(here)


def test_gpu_facts_are_all_there_or_none_is() -> None:
    here = fingerprint()
    if here.gpu is None:
        assert (here.num_gpus, here.gpu_memory_bytes, here.driver, here.cuda) == (0, None, None, None)
    else:
        assert here.num_gpus >= 1
        assert here.gpu_memory_bytes is not None
        assert here.gpu_memory_bytes > 2**30
        assert re.fullmatch(r"\d+\.\d+", here.cuda or "")


class ThreeGpus:
    """Simulates NVML on a host with three GPUs, the last of another model."""

    names: ClassVar = {"GPU-a": "NVIDIA H200", "GPU-b": "NVIDIA H200", "GPU-c": "NVIDIA L4"}
    NVMLError = pynvml.NVMLError

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= len(self.names):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return list(self.names)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.names:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=2**34)

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (8, 9) if handle == "GPU-c" else (9, 0)

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"


@pytest.mark.parametrize(
    ("visible", "num_gpus", "first", "capability"),
    [
        (None, 3, "NVIDIA H200", "9.0"),
        ("1,2", 2, "NVIDIA H200", "9.0"),
        ("2", 1, "NVIDIA L4", "8.9"),
        ("GPU-c, 0", 2, "NVIDIA L4", "8.9"),
        ("0,7,1", 1, "NVIDIA H200", "9.0"),  # CUDA ends at the first missing one
        ("", 0, None, ""),
        ("-1", 0, None, ""),
    ],
)
def test_gpus_count_that_cuda_shows_to_this_process(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, num_gpus: int, first: str | None, capability: str
) -> None:
    for module in (environment, manifest):
        monkeypatch.setattr(module, "pynvml", ThreeGpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = fingerprint.__wrapped__()
    assert (here.num_gpus, here.gpu) == (num_gpus, first)
    assert (here.driver is None) == (num_gpus == 0)
    assert manifest._capability.__wrapped__() == capability
    assert environment.num_host_gpus() == 3


def test_asking_for_the_fingerprint_imports_no_torch(repository: Path) -> None:
    code = "import sys; from orchestrator.environment import fingerprint; fingerprint(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a committed package of the user's."""
    package = tmp_path / "their_workloads"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "recommender.py").write_text("class Recommender: ...\n")
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def test_a_workloads_commit_is_its_checkouts(checkout: Path) -> None:
    commit = git_commit(checkout / "their_workloads")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, timeout=30, check=True)
    assert commit == head.stdout.strip()
    assert re.fullmatch("[0-9a-f]{40}", commit or "")


def test_a_commit_says_where_files_differ_from_it(checkout: Path) -> None:
    clean = git_commit(checkout / "their_workloads")
    (checkout / "notes.txt").write_text("new, and no part of it\n")
    assert git_commit(checkout / "their_workloads") == clean
    (checkout / "their_workloads" / "recommender.py").write_text("class Recommender: changed = True\n")
    assert git_commit(checkout / "their_workloads") == f"{clean}+changes"


def test_a_workload_outside_git_has_no_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    assert git_commit(tmp_path / "nowhere") is None


def test_the_built_in_workload_has_the_projects_commit(repository: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("no git checkout")
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", git_commit(repository / "workloads" / "captioning") or "")
