"""A look at one setting generates no code for graphs that only another value of one Python number asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.harness.diagnostics.repeated_graphs import GRAPHS_WITH_CODE, RepeatedGraphs


def without_code(monkeypatch: pytest.MonkeyPatch, inputs: list[tuple[Any, ...]], function: Any) -> tuple[int, int]:
    """Runs a compiled function; returns the number of its graphs with code, and of those without."""
    compiled = []

    def compile_it(backend: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile_it)
    torch._dynamo.reset()
    repeated = RepeatedGraphs()
    step = torch.compile(function, dynamic=False)
    with capture_diagnostics() as diagnostics, repeated.spared(diagnostics.recompile_reasons):
        for one in inputs:
            assert torch.equal(step(*one), function(*one))
    assert torch._TorchCompileInductorWrapper.__call__ is compile_it  # put back
    return len(compiled), repeated.without_code


@pytest.mark.slow
def test_graphs_that_repeat_others_get_no_code_and_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    x = torch.ones(3)
    annealed = [(x, 1.0 - number / 10) for number in range(6)]
    assert without_code(monkeypatch, annealed, scaled) == (GRAPHS_WITH_CODE, 6 - GRAPHS_WITH_CODE)
    assert without_code(monkeypatch, [(torch.ones(length), 2.0) for length in range(2, 7)], scaled) == (5, 0)  # other shapes
    assert without_code(monkeypatch, [(x, True), (x, False), (x, True)], scaled) == (2, 0)
    mixed = [(x, 1.0), (torch.ones(4), 1.0), (x, 2.0), (torch.ones(5), 1.0)]
    assert without_code(monkeypatch, mixed, scaled) == (4, 0)  # not one cause
