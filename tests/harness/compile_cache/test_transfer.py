"""Compile caches moved between processes: nothing is lost, everything is hit, and savings are reported correctly."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.transfer import ArtifactKind, make_bundle

PROCESS = Path(__file__).with_name("caching_process.py")
IMPORTS_ONLY_TORCH = """
import json, subprocess, sys, time
import torch
from torch._dynamo.utils import counters

torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
begun = time.perf_counter()
torch.compile(model)(torch.ones(16, 512)).square().sum().backward()
print(json.dumps({
    "compile_s": time.perf_counter() - begun,
    "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"],
    "hits_of_aot": counters["aot_autograd"]["autograd_cache_hit"],
    "ours": [name for name in sys.modules if name.startswith(("workloads", "compile_sweep"))],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A process that compiled and has ended."""

    compile_s: float
    hits: dict[str, int]
    misses: dict[str, int]
    hit_keys: list[list[str]]
    saved_s: float
    costs: list[tuple[str, str, float]]
    file: Path
    inductor: Path

    @property
    def artifacts(self) -> list[Artifact]:
        return list(pickle.loads(self.file.read_bytes()))

    @property
    def names(self) -> set[tuple[str, str]]:
        return {(str(artifact.kind), artifact.key) for artifact in self.artifacts}


Compiler = Callable[..., Ran]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Forks processes that have imported torch and compiled nothing."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(PROCESS)], **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Compiler:
    """Compiles in a process with folders of its own, in which nothing was compiled before.

    It is forked, unless it needs a GPU, which no forked process can use, or `hash_seed`, which Python reads when it starts.
    """

    def ran(
        *models: str, restored: tuple[Ran, ...] = (), mode: str | None = None, device: str = "cpu", hash_seed: int | None = None,
        **plan: Any,
    ) -> Ran:  # fmt: skip
        scratch = tmp_path_factory.mktemp("process")
        file, gathered = scratch / "plan.json", scratch / "gathered"
        whole = {"models": models, "restored": [str(run.file) for run in restored], "mode": mode, "device": device}
        usual = {"settings": None, "precompile": False, "autograd_cache": True}
        file.write_text(json.dumps({**whole, "gathered": str(gathered), **usual, **plan}))
        if device == "cpu" and hash_seed is None:
            assert server.stdin is not None
            assert server.stdout is not None
            print(json.dumps([str(file), folders(scratch)]), file=server.stdin, flush=True)
            assert server.stdout.readline() == "0\n"
        else:
            seed = {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
            command = [sys.executable, str(PROCESS), str(file)]
            subprocess.run(command, env=environment(scratch) | seed, check=True, timeout=300)
        return Ran(**json.loads(file.read_text()), file=gathered, inductor=scratch / "inductor")

    return ran


def folders(scratch: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "TRITON_CACHE_DIR": str(scratch / "triton")}


def environment(scratch: Path) -> dict[str, str]:
    return os.environ | folders(scratch)


@pytest.fixture(scope="module")
def cold(compiler: Compiler) -> Ran:
    return compiler("relu")


@pytest.fixture(scope="module")
def other(compiler: Compiler) -> Ran:
    """Compiles graphs that consist of matrix products only, which need no C++ compiler."""
    return compiler("plain")


@pytest.fixture(scope="module")
def warm(compiler: Compiler, cold: Ran, other: Ran) -> Ran:
    """Compiles both models of two trials, given their artifacts."""
    return compiler("relu", "plain", restored=(cold, other))


@pytest.mark.slow
def test_a_cold_process_hits_nothing_and_says_what_its_artifacts_cost(cold: Ran) -> None:
    assert cold.hits == {}
    assert cold.misses == {"aot_autograd": 1, "inductor": 2}
    assert cold.saved_s == 0
    costs = {kind: [artifact.cost_s for artifact in cold.artifacts if artifact.kind == kind] for kind in ArtifactKind}
    (whole,) = costs[ArtifactKind.AOT_AUTOGRAD]
    assert sum(costs[ArtifactKind.INDUCTOR]) < whole < cold.compile_s
    assert whole > 0.5 * cold.compile_s
    assert sum(costs[ArtifactKind.CODE]) == 0, "a graph's cost includes its libraries'"


@pytest.mark.slow
def test_artifacts_of_two_trials_restored_elsewhere_are_all_hit(cold: Ran, other: Ran, warm: Ran) -> None:
    assert warm.misses == {}
    assert warm.hits == {"aot_autograd": 2, "inductor": 4}
    assert {(kind, key) for kind, key in warm.hit_keys} <= cold.names | other.names
    assert warm.compile_s < (cold.compile_s + other.compile_s) / 2


@pytest.mark.slow
def test_warm_compile_time_and_what_was_saved_make_the_cold_one(cold: Ran, other: Ran, warm: Ran) -> None:
    ratio = (warm.compile_s + warm.saved_s) / (cold.compile_s + other.compile_s)
    assert (
        0.7 < ratio < 1.4
    )  # within a few percent on a quiet machine; costs that a trial has once, such as imports, occur twice here


@pytest.mark.slow
def test_what_was_restored_and_is_gathered_again_loses_nothing(cold: Ran, other: Ran, warm: Ran) -> None:
    assert warm.names == cold.names | other.names
    costs = {(artifact.kind, artifact.key): artifact.cost_s for artifact in (*cold.artifacts, *other.artifacts)}
    assert {(artifact.kind, artifact.key): artifact.cost_s for artifact in warm.artifacts} == costs


@pytest.mark.nightly("compiles in one more process; `make test` hits the graphs through AOTAutograd's cache")
@pytest.mark.slow
def test_without_autograds_cache_the_graphs_alone_are_hit_and_counted(compiler: Compiler, cold: Ran) -> None:
    graphs_only = compiler("relu", restored=(cold,), autograd_cache=False)
    assert graphs_only.hits == {"inductor": 2}
    assert graphs_only.misses == {}
    costs = {artifact.kind: artifact.cost_s for artifact in cold.artifacts if artifact.kind == ArtifactKind.AOT_AUTOGRAD}
    assert 0 < graphs_only.saved_s < costs[ArtifactKind.AOT_AUTOGRAD]


@pytest.mark.nightly("compiles in one more process; test_cache_command.py restores an export in a production job")
@pytest.mark.slow
def test_a_bundle_serves_a_process_that_imports_only_torch(cold: Ran, tmp_path: Path) -> None:
    file = tmp_path / "bundle"
    file.write_bytes(make_bundle(cold.artifacts))
    script = [sys.executable, "-c", IMPORTS_ONLY_TORCH, str(file)]
    done = subprocess.run(
        script, env=environment(tmp_path), cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["hits"], found["misses"], found["hits_of_aot"], found["ours"]) == (2, 0, 1, [])
    assert found["compile_s"] < 0.8 * cold.compile_s  # torch 2.11 asks a compiler about the CPU each time
    made = [path for path in (tmp_path / "inductor").rglob("*.main.cpp") if not path.with_suffix(".so").exists()]
    assert made == [], "the C++ compiler ran again"


@pytest.mark.slow
def test_a_traced_function_is_restored_where_torch_keeps_it(compiler: Compiler, cold: Ran) -> None:
    traced = compiler("relu", restored=(cold,), precompile=True)
    assert (traced.misses, traced.hits) == ({"precompile": 1, "aot_autograd": 1}, {"inductor": 2})
    started = compiler("relu", restored=(traced,), precompile=True)
    assert started.misses == {}
    assert started.hits == {"precompile": 1}
    assert started.saved_s > 0
    assert started.names == traced.names


@pytest.mark.nightly("traces in four processes; `make test` restores one traced function")
@pytest.mark.slow
@pytest.mark.parametrize(("workload", "settings"), [("layers", "scope=full,autocast=bf16"), ("layers-inference", "scope=full")])
def test_what_was_traced_under_autocast_or_inference_mode_is_used_under_it(
    compiler: Compiler, workload: str, settings: str
) -> None:
    traced = compiler(workload, settings=settings, precompile=True)
    assert traced.misses["precompile"] == 1
    started = compiler(workload, settings=settings, restored=(traced,), precompile=True)
    assert (started.hits, started.misses) == ({"precompile": 1}, {})


@pytest.mark.nightly("traces an optimizer in two processes; `make test` restores one traced function")
@pytest.mark.slow
def test_a_traced_update_of_the_executed_source_is_found_where_strings_hash_otherwise(compiler: Compiler) -> None:
    settings = "scope=eager,optimizer=foreach_map"
    traced = compiler("layers", settings=settings, precompile=True, hash_seed=1)
    assert traced.misses["precompile"] == 1
    started = compiler("layers", settings=settings, restored=(traced,), precompile=True, hash_seed=2)
    assert started.hits["precompile"] == 1
    assert "precompile" not in started.misses


@pytest.mark.gpu
@pytest.mark.slow
def test_a_graph_that_missed_saves_what_kernels_it_finds_ready_took(compiler: Compiler) -> None:
    """Another mode gives another graph with the same kernels."""
    cold, direct = compiler("norm", device="cuda"), compiler("norm", device="cuda", mode="reduce-overhead")
    waited_for = [artifact for artifact in cold.artifacts if artifact.kind == ArtifactKind.TRITON and artifact.cost_s > 0]
    assert waited_for
    other = compiler("norm", device="cuda", mode="reduce-overhead", restored=(cold,))
    assert other.misses.keys() == {"aot_autograd", "inductor"}
    assert other.saved_s > sum(artifact.cost_s for artifact in waited_for) / 2
    assert 0.7 < (other.compile_s + other.saved_s) / direct.compile_s < 1.4


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_restored_elsewhere_are_neither_compiled_nor_tuned_again(compiler: Compiler) -> None:
    cold = compiler("norm", device="cuda")
    assert {str(artifact.kind) for artifact in cold.artifacts} >= {"aot_autograd", "inductor", "autotune", "triton"}
    assert all(artifact.cost_s > 0 for artifact in cold.artifacts if artifact.kind == ArtifactKind.AUTOTUNE)
    warm = compiler("norm", device="cuda", restored=(cold,))
    assert warm.misses == {}
    assert warm.hits["autotune"] == cold.misses["autotune"]
    assert warm.names >= cold.names
    assert 0.7 < (warm.compile_s + warm.saved_s) / cold.compile_s < 1.4
