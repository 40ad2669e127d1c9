"""`explain` names what was changed: changes are really injected into the process or the host's description."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from cache_samples import artifact, manifest
from samples import H200

from compile_sweep.harness.compile_cache.transfer import torch_configuration
from orchestrator.artifacts import SigningKey, environment_facts
from orchestrator.artifacts import manifest as keys_module
from orchestrator.artifacts.explain import Side, explain, nearest, sentences
from orchestrator.artifacts.manifest import Entry
from orchestrator.environment import Environment


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[Environment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield H200


@contextmanager
def matmul_precision(value: str) -> Iterator[Environment]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield H200
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def torch_config(area: str, **values: object) -> Iterator[Environment]:
    import torch._dynamo
    import torch._inductor

    config = torch._inductor.config if area == "inductor" else torch._dynamo.config
    with config.patch(**values):  # type: ignore[attr-defined]
        yield H200


@contextmanager
def host(**values: str) -> Iterator[Environment]:
    yield replace(H200, **values)


@contextmanager
def capability(value: str) -> Iterator[Environment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "_capability", lambda: value)
        yield H200


PERTURBATIONS: dict[str, Callable[[], AbstractContextManager[Environment]]] = {
    "torch": lambda: host(torch="2.11.0+cu130"),
    "triton": lambda: host(triton="3.6.0"),
    "cuda": lambda: host(cuda="12.8"),
    "driver": lambda: host(driver="570.86.15"),
    "gpu": lambda: host(gpu="NVIDIA B200"),
    "capability": lambda: capability("10.0"),
    "python": lambda: host(python="3.12.1"),
    "cpu": lambda: host(cpu="AMD EPYC 9999"),
    "inductor.max_autotune": lambda: torch_config("inductor", max_autotune=True),
    "inductor.epilogue_fusion": lambda: torch_config("inductor", epilogue_fusion=False),
    "dynamo.specialize_float": lambda: torch_config("dynamo", specialize_float=True),
    "environment.TRITON_PTXAS_OPTIONS": lambda: environment_variable("TRITON_PTXAS_OPTIONS", "-O1"),
    "float32_matmul_precision": lambda: matmul_precision("medium"),
}


@pytest.fixture(autouse=True)
def _no_gpu_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "_capability", lambda: "9.0")
    for name in os.environ:
        if name.startswith(("TRITON_", "TORCHINDUCTOR_")):
            monkeypatch.delenv(name)


def named(component: str) -> list[str]:
    before = Side(name="a", facts=environment_facts(torch_configuration(), H200))
    with PERTURBATIONS[component]() as environment:
        after = Side(name="b", facts=environment_facts(torch_configuration(), environment))
    found = explain(before, after)
    assert explain(before, Side(name="c", facts=environment_facts(torch_configuration(), H200))) == []  # nothing stays behind
    return [difference.component for difference in found]


@pytest.mark.parametrize("component", PERTURBATIONS)
def test_a_perturbation_of_an_environment_is_named_alone(component: str) -> None:
    assert named(component) == [component]


def test_of_several_components_the_decisive_one_comes_first() -> None:
    facts = manifest().facts
    other = {**facts, "gpu": "NVIDIA B200", "torch": "2.11.0", "inductor.cpp.threads": "4"}
    found = explain(Side(name="a", facts=facts), Side(name="b", facts=other))
    assert [one.component for one in found] == ["torch", "gpu", "inductor.cpp.threads"]
    text = sentences(Side(name="a", facts=facts), Side(name="b", facts=other), found)
    assert text[0] == "a and b share nothing, because torch differs (and 2 more)."
    assert text[1] == "  torch: 2.13.0 | 2.11.0"


@pytest.mark.parametrize(
    ("changes", "component", "words"),
    [
        ({"workload": "toys:Toy"}, "workload", "share nothing, because workload differs"),
        ({"size": "base"}, "size", "share nothing, because size differs"),
        ({"settings_key": "scope=full,mode=max-autotune"}, "settings.mode", "as far as mode"),
        ({"settings_key": "scope=full,dynamic=auto"}, "settings.dynamic", "leaves graphs alike"),
    ],
)
def test_what_differs_between_trials_is_named(changes: dict[str, str], component: str, words: str) -> None:
    a, b = Side.of(manifest(), "a"), Side.of(manifest(**changes), "b")
    found = explain(a, b)
    assert found[0].component == component
    assert words in sentences(a, b, found)[0]


def test_settings_that_keep_artifacts_apart_are_said_to_and_once() -> None:
    facts = manifest().facts
    a, b = (
        Side.of(manifest(facts={**facts, "settings.autocast": dtype}, settings_key=f"scope=full,autocast={dtype}{more}"), dtype)
        for dtype, more in (("bf16", ""), ("fp16", ",optimizer=fused"))
    )
    verdict, *lines = sentences(a, b, explain(a, b))
    assert verdict == "bf16 and fp16 share nothing, because autocast differs (and 1 more)."
    assert [line.split(":")[0] for line in lines] == ["  settings.autocast", "  settings.optimizer"]


def test_a_miss_between_like_trials_is_laid_to_the_graphs() -> None:
    key = SigningKey(b"k" * 32)
    ours, theirs = (
        manifest(entries=tuple(Entry.of(artifact(name), manifest().environment, key) for name in names))
        for names in (("same", "mine"), ("same", "theirs", "another"))
    )
    (difference,) = found = explain(Side.of(ours, "a"), Side.of(theirs, "b"))
    assert (difference.component, difference.a, difference.b) == ("entries.inductor", "1 of 2 only here", "2 of 3 only here")
    assert "different graphs" in sentences(Side.of(ours, "a"), Side.of(theirs, "b"), found)[0]


def test_equal_sides_serve_each_other() -> None:
    a, b = Side.of(manifest(), "a"), Side.of(manifest(maker="002"), "b")
    assert sentences(a, b, explain(a, b)) == ["a and b do not differ: what one compiles serves the other."]


def test_an_environment_by_itself_lacks_nothing_that_only_trials_have() -> None:
    facts = manifest().facts
    trial = Side.of(manifest(facts={**facts, "settings.attention": "math", "device": "cuda", "threads": "4"}), "trial")
    assert explain(trial, Side(name="here", facts=facts)) == []


def test_the_nearest_trial_is_the_one_that_differs_least() -> None:
    made = [
        manifest(created_at=f"2026-01-0{day}T00:00:00+00:00", **changes)
        for day, changes in enumerate(
            ({"settings_key": "scope=regional"}, {"size": "base", "workload": "other:One"}, {"maker": "me"}), start=1
        )
    ]
    assert nearest(made[2], made) == made[0]
    assert nearest(made[0], made[:1]) is None
