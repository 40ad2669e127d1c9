"""Compiled optimizer steps under a schedule of the learning rate."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from compile_sweep.script.apply.in_place import with_tensor_rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the step below torch's wrapper does not count
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_schedule_does_not_have_the_optimizer_compiled_again(kind: Any) -> None:
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(4)]
    compiled, plain = kind(weights[:2], lr=0.05, **options), kind(weights[2:], lr=0.05, **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: step / 8) for one in (compiled, plain)]
    with torch.no_grad():
        weights[2].copy_(weights[0])
        weights[3].copy_(weights[1])
    graphs = CompileCounter()
    plain_step = getattr(kind.step, "__wrapped__", kind.step)
    step = with_tensor_rates(compiled, torch.compile(MethodType(plain_step, compiled), backend=graphs))
    for number in range(6):
        for ours, theirs in zip(weights[:2], weights[2:], strict=True):
            ours.grad = torch.randn(4, 4)
            theirs.grad = ours.grad.clone()
        step()
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert compiled.param_groups[0]["lr"] == 0.05 * (number + 1) / 8, "a script reads the number that it expects"
    torch.testing.assert_close(weights[:2], weights[2:])
    assert graphs.frame_count == (2 if kind is torch.optim.SGD else 1), "SGD's first step creates momentum"


class Own(torch.optim.SGD):
    """Not torch's."""


@pytest.mark.parametrize(
    ("optimizer", "options"), [(Own, {}), (torch.optim.Adam, {"foreach": True})], ids=["not torch's", "refuses tensors"]
)
def test_optimizers_that_may_refuse_tensors_get_numbers(optimizer: Any, options: dict[str, bool]) -> None:
    step = optimizer([nn.Parameter(torch.ones(1))], **options).step
    assert with_tensor_rates(step.__self__, step) is step
