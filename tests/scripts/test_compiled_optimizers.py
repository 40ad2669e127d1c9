"""Compiled optimizer steps under a schedule of the learning rate."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.apply.in_place import apply_to_optimizers, has_fused, loops_over_weights, with_tensor_rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the step below torch's wrapper does not count
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Muon])
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
    rounding = {"rtol": 2**-9, "atol": 1e-4} if kind is torch.optim.Muon else {}  # its updates are bfloat16
    torch.testing.assert_close(weights[:2], weights[2:], **rounding)
    assert graphs.frame_count == (2 if kind is torch.optim.SGD else 1), "SGD's first step creates momentum"


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        (torch.optim.AdamW, torch.float32, True),
        (torch.optim.SGD, torch.bfloat16, True),
        (torch.optim.Adam, torch.complex64, False),
        (torch.optim.RMSprop, torch.float32, False),
    ],
)
def test_an_optimizer_has_a_fused_implementation_where_torch_has_a_kernel(kind: Any, dtype: torch.dtype, expected: bool) -> None:
    assert has_fused(kind([nn.Parameter(torch.ones(2, dtype=dtype))], lr=0.1)) is expected


def test_muon_updates_weight_after_weight_and_others_of_torch_do_not() -> None:
    class Own(torch.optim.Optimizer):
        pass

    weights = [nn.Parameter(torch.ones(2, 2))]
    optimizers = [torch.optim.Muon(weights), torch.optim.AdamW(weights), torch.optim.LBFGS(weights), Own(weights, {"lr": 0.1})]
    assert [loops_over_weights(one) for one in optimizers] == [True, False, False, False]


def test_a_fused_implementation_that_torch_refuses_at_the_first_step_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 has one of Adagrad on CPUs and none on CUDA, which only its step says: a recommender's trials failed."""

    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("`fused=True` requires all the params to be floating point Tensors of supported devices: ['cpu']")

    steps: list[Any] = []
    counting = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    monkeypatch.setattr(sys.modules[torch.optim.Adagrad.__module__], "_device_dtype_check_for_fused", refuses)
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    assert not has_fused(optimizer)
    assert apply_to_optimizers(CompileSettings.parse("scope=eager,optimizer=fused"), [optimizer]) == [
        "Adagrad has no fused implementation here and runs as the script has it"
    ]
    assert has_fused(torch.optim.Adam([nn.Parameter(torch.ones(2))]))
    counting.remove()
    assert not steps, "hooks that count a script's steps see none"


class Own(torch.optim.SGD):
    """Not torch's."""


@pytest.mark.parametrize(
    ("optimizer", "options"), [(Own, {}), (torch.optim.Adam, {"foreach": True})], ids=["not torch's", "refuses tensors"]
)
def test_optimizers_that_may_refuse_tensors_get_numbers(optimizer: Any, options: dict[str, bool]) -> None:
    step = optimizer([nn.Parameter(torch.ones(1))], **options).step
    assert with_tensor_rates(step.__self__, step) is step
