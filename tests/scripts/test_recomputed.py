"""Activations that a script recomputes in the backward pass: found, and kept where a setting says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script import session_results
from compile_sweep.script.apply.in_place import UNTIL_EXIT, process_wide
from tests.scripts.conftest import Run

pytestmark = pytest.mark.slow

AOT = "scope=full,dynamic=auto,backend=aot_eager"


def test_activations_that_a_script_recomputes_are_told_and_kept_where_settings_say_so(run: Run) -> None:
    losses, calls = [], []
    keeps = "activation_checkpointing=off"
    for settings in ("scope=eager,as_written=on", f"scope=eager,{keeps}", f"{AOT},{keeps}"):
        session, error = run("recomputed.py", settings)
        assert error is session.error is None
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
        net = session.found.targets[0].module
        calls.append((type(net).calls, type(net.get_submodule("layers.0")).calls))
        told = [line for line in session_results.findings(session) if line.startswith("activations are recomputed")]
        assert told == ["activations are recomputed in the backward pass, 3 calls of torch.utils.checkpoint a step"]
        assert session_results.model_facts(session)["recomputes"] is True
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)
    (models, twice), (others, once), _ = calls
    assert (twice, once) == (2 * 3 * models, 3 * others)


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_code_keeps_activations_too(reentrant: bool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.tanh(x).sin().sum(), x, use_reentrant=reentrant)

    def operators_of_the_backward_pass() -> list[str]:
        found: list[str] = []

        def compiled(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
            found[:] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=compiled)
        torch.compile(step, backend=backend)(torch.ones(4, requires_grad=True)).backward()
        return found

    assert "aten.tanh.default" in operators_of_the_backward_pass()
    process_wide(CompileSettings.parse("scope=full,activation_checkpointing=off"))
    try:
        assert "aten.tanh.default" not in operators_of_the_backward_pass()
    finally:
        UNTIL_EXIT.close()
    assert "aten.tanh.default" in operators_of_the_backward_pass()
