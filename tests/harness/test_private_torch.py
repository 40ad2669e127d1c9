"""What a torch without a private function that measuring replaces costs: something is not known, and nothing fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo

from compile_sweep.contract.installed_torch import private
from compile_sweep.harness import compile_phases, toolchain
from compile_sweep.harness.compile_cache import kernels, usage
from compile_sweep.harness.diagnostics import capture
from compile_sweep.harness.diagnostics.coverage import Expectation
from compile_sweep.harness.diagnostics.repeated_graphs import RepeatedGraphs

TALLY = usage.Tally(usage.CacheUsage())
WRAPPED = (*usage._Follower(TALLY).followed(), *kernels.functions_to_wrap(TALLY))
FOLLOWED = [(owner, name) for owner, name, _ in WRAPPED if owner is not None]


def test_every_function_that_is_replaced_is_in_the_table(repository: Path) -> None:
    text = (repository / "docs/install.md").read_text(encoding="utf-8").partition("## Private functions of torch")[2]
    listed = {
        f"torch.{owner}.{name}"
        for cell in re.findall(r"^\| (`_.*?) \|", text, flags=re.MULTILINE)
        for owner, names in re.findall(r"`([\w.]+)`: ((?:`\w+`(?:, )?)+)", cell)
        for name in re.findall(r"`(\w+)`", names)
    }
    followed = {f"{owner.__module__}.{owner.__qualname__}.{name}" for owner, name in FOLLOWED}
    assert followed
    assert followed <= listed
    steps = {f"torch._inductor.cudagraph_trees.CUDAGraphTreeManager.{name}" for name in compile_phases._GRAPH_MANAGER_STEPS}
    assert steps <= listed


@pytest.mark.parametrize(("owner", "name"), FOLLOWED, ids=lambda value: getattr(value, "__name__", value))
def test_a_cache_without_a_function_is_watched_without_it(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with usage.watch_caches() as found:
        assert not hasattr(owner, name)
    assert (found.hits, found.misses) == ({}, {})


def test_a_torch_without_a_class_or_module_has_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private("torch._inductor.codecache", "NoSuchCache") is None
    assert private("torch._no_such_module", "Anything") is None
    monkeypatch.setattr(usage, "FxGraphCache", None)
    with usage.watch_caches() as found:
        pass
    assert found.hits == {}


def test_graphs_that_repeat_are_compiled_without_the_wrapper_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    repeated = RepeatedGraphs()
    with repeated.spared([]):
        pass
    assert repeated.without_code == 0


def test_what_was_converted_is_not_known_without_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*missing: str) -> Any:
        return lambda module, name: None if name in missing else private(module, name)

    expected = Expectation(what="scope=full", targets={"layer": [nn.Linear(1, 1).forward]}, cudagraphs=False)
    with capture.capture_diagnostics(expected) as found:
        pass
    assert found.fallbacks
    monkeypatch.setattr(capture, "private", without("register_bytecode_hook", "log_state"))
    with capture.capture_diagnostics(expected) as found:
        pass
    assert found.fallbacks == []


def test_torch_checks_vector_instructions_itself_without_that_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpu_vec_isa import VecISA

    monkeypatch.setattr(toolchain, "cpp_header_folder", lambda: tmp_path)
    monkeypatch.delattr(VecISA, "check_build")
    toolchain.check_vector_instructions()
    assert not list(tmp_path.iterdir())


def test_phases_are_other_without_torchs_event_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "get_chromium_event_logger", lambda: object())
    with compile_phases.record_phases() as clock:
        pass
    assert clock.split(1.0)["other"] == 1.0
