"""Cost of Triton kernels that a graph has to wait for, and savings of a graph that finds them ready."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from compile_sweep.harness.compile_cache.artifact import Artifact
from compile_sweep.harness.compile_cache.folders import ArtifactKind
from compile_sweep.harness.compile_cache.usage import CacheUsage, watch_caches

HASHES = ("aa" * 32, "bb" * 32, "cc" * 32)
WAITED_S = 0.06
AT_MOST_S = 1.0
"""Factor by which a busy machine may stretch that."""


def kernel(*hashes: str) -> Any:
    """Returns a kernel like torch's compilers do, with this many configurations."""
    results = [SimpleNamespace(kernel=SimpleNamespace(hash=each)) for each in hashes]
    return SimpleNamespace(compile_results=results, launchers=())


def name(hashed: str) -> tuple[str, str]:
    """Returns a kernel's folder name, its hash in base 32, as Triton names it."""
    return str(ArtifactKind.TRITON), base64.b32encode(bytes.fromhex(hashed)).decode().rstrip("=")


def restored(hashed: str, cost_s: float) -> Artifact:
    kind, key = name(hashed)
    return Artifact(kind=kind, key=key, content=b"kernel", cost_s=cost_s)


class Compilers:
    """Simulates torch's compilers for graphs that consist only of kernels."""

    def wait(self, kernels: Sequence[Any], waited_s: float = 0.0) -> None:
        """Compiles a graph, which waits for its kernels."""
        AsyncCompile.wait(AsyncCompile(), {"kernels": kernels, "waited_s": waited_s})

    def tune(self, kernel: Any, best: str) -> None:
        """Calls a kernel for the first time, choosing one of its configurations as best."""
        CachingAutotuner.autotune_to_one_config(kernel, best)

    def load(self, kernels: Sequence[Any]) -> None:
        """Loads a graph together with its kernels."""
        FxGraphCache.load_with_key("key", kernels)  # type: ignore[call-arg, arg-type]


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Compilers:
    def wait(self: Any, scope: dict[str, Any]) -> None:
        time.sleep(scope["waited_s"])
        for each in scope["kernels"]:
            CachingAutotuner.precompile(each)

    def load(key: str, kernels: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        Compilers().wait(kernels)
        return SimpleNamespace(_guards_expr=None, guards_expr=None, _time_taken_ns=0), {}

    def tune(kernel: Any, best: str) -> None:
        kernel.launchers = [SimpleNamespace(cache_hash=name(best)[1])]
        kernel.compile_results = [each for each in kernel.compile_results if each.kernel.hash == best]

    monkeypatch.setattr(CachingAutotuner, "autotune_to_one_config", tune)
    monkeypatch.setattr(CachingAutotuner, "precompile", lambda self: None)
    monkeypatch.setattr(AsyncCompile, "wait", wait)
    monkeypatch.setattr(FxGraphCache, "load_with_key", staticmethod(load))
    return Compilers()


def counts(use: CacheUsage) -> tuple[dict[str, int], dict[str, int]]:
    return use.hits, use.misses


def test_each_compiled_kernel_costs_its_part_of_the_wait(compilers: Compilers) -> None:
    with watch_caches() as use:
        compilers.wait([kernel(*HASHES[:2]), kernel(HASHES[2])], WAITED_S)
        compilers.wait([kernel(HASHES[0])], WAITED_S)  # again, in a second graph: nothing was compiled
    assert set(use.cost_s) == set(map(name, HASHES))
    assert WAITED_S <= sum(use.cost_s.values()) < WAITED_S + AT_MOST_S
    assert use.cost_s[name(HASHES[0])] == use.cost_s[name(HASHES[2])]
    assert use.saved_s == 0
    assert counts(use) == ({}, {})


def test_kernels_found_ready_save_what_they_cost_once(compilers: Compilers) -> None:
    given = [restored(hashed, 2.0) for hashed in HASHES[:2]]
    with watch_caches(given) as use:
        compilers.wait([kernel(*HASHES[:2])], WAITED_S)
        compilers.wait([kernel(*HASHES[:2])], WAITED_S)
    assert 4.0 - WAITED_S - AT_MOST_S < use.saved_s <= 4.0 - WAITED_S
    assert [use.cost_s[name(hashed)] for hashed in HASHES[:2]] == [2.0, 2.0]
    assert counts(use) == ({}, {}), "of kernels' folders nothing is counted"


def test_waiting_for_compiled_kernels_is_no_time_of_those_found_ready(compilers: Compilers) -> None:
    with watch_caches([restored(HASHES[0], 2.0)]) as use:
        compilers.wait([kernel(HASHES[0]), kernel(HASHES[1])], WAITED_S)
    assert use.saved_s == 2.0
    assert WAITED_S <= use.cost_s[name(HASHES[1])] < WAITED_S + AT_MOST_S


def test_kernels_that_come_with_a_restored_graph_save_nothing_of_their_own(compilers: Compilers) -> None:
    with watch_caches([restored(hashed, 2.0) for hashed in HASHES]) as use:
        compilers.load([kernel(*HASHES)])
    assert use.saved_s == 0, "the graph's cost includes them"


def test_the_best_configuration_saves_compiling_the_others(compilers: Compilers) -> None:
    tuned = kernel(*HASHES)
    with watch_caches() as use:
        compilers.wait([tuned], WAITED_S)
        waited_s = sum(use.cost_s.values())
        compilers.tune(tuned, HASHES[1])
    assert use.cost_s[name(HASHES[1])] == pytest.approx(waited_s)
    others = [name(HASHES[0]), name(HASHES[2])]
    assert [use.cost_s[other] for other in others] == [0, 0]

    with watch_caches([restored(HASHES[1], 2.0)]) as use:
        compilers.wait([kernel(HASHES[1])])
    assert 2.0 - AT_MOST_S < use.saved_s <= 2.0


def test_tuning_a_kernel_whose_compiling_nobody_saw_costs_nothing_more(compilers: Compilers) -> None:
    with watch_caches() as use:
        compilers.tune(kernel(*HASHES), HASHES[1])
    assert use.cost_s == {}


def test_kernels_of_torchs_that_name_no_hash_are_left_alone(compilers: Compilers) -> None:
    with watch_caches() as use:
        other = SimpleNamespace(launchers=(), compile_results=[SimpleNamespace(kernel=None)])
        compilers.wait([SimpleNamespace(launchers=()), other], WAITED_S)
    assert use.cost_s == {}
