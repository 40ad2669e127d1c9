"""What modular settings should compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.harness.diagnostics.coverage import Expectation, forward_names
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from workloads.captioning import Captioning


def test_a_part_switched_off_by_its_short_name_is_not_expected() -> None:
    workload = Captioning("tiny", 0)
    model = workload.build_model()
    settings = CompileSettings.parse("scope=modular,parts.encoder.compile=off")
    expected = Expectation.of(prepare(workload, settings, "cpu"), model, workload.optimizer(model, settings.optimizer))
    assert list(expected.targets) == ["model.decoder", "loss"]


class Cooling(nn.Module):
    """Changes a number by which it multiplies, before a graph break and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        torch._dynamo.graph_break()
        return x * self.steps


@pytest.mark.parametrize(("count", "owner"), [(1, "Cooling.forward"), (2, "forward of Cooling")])
def test_what_follows_a_break_is_named_by_whether_several_modules_share_it(count: int, owner: str) -> None:
    code = Cooling.forward.__code__
    forward = type(Cooling.forward)(code.replace(co_name="forward@Cooling"), Cooling.forward.__globals__)
    compiled, modules = torch.compile(forward, backend="eager"), [Cooling() for _ in range(count)]
    expected = Expectation(what="", targets={}, cudagraphs=False, names=forward_names(modules))
    with capture_diagnostics(expected) as found:
        for _ in range(3):
            compiled(modules[0], torch.ones(2))
    behind = [text for text in found.recompile_reasons if " from line " in text]
    assert behind
    assert {text.partition(" from line ")[0] for text in behind} == {owner}
