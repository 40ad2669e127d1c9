"""Compiled optimizer steps under a schedule of the learning rate."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook

from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.apply import in_place
from compile_sweep.script.apply.in_place import apply_to_optimizers, with_tensor_rates
from compile_sweep.script.apply.optimizer_support import has_fused, loops_over_weights
from compile_sweep.script.session_results import model_facts
from tests.scripts.conftest import Run


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the step below torch's wrapper does not count
@pytest.mark.parametrize(
    ("kind", "cycles"),
    [
        (torch.optim.SGD, False), (torch.optim.AdamW, False), (torch.optim.AdamW, True), (torch.optim.RMSprop, False),
        (torch.optim.Muon, False),
    ],
)  # fmt: skip
def test_a_schedule_does_not_have_the_optimizer_compiled_again(kind: Any, cycles: bool) -> None:
    """One-cycle schedules change Adam's betas, too."""
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
            if cycles:
                (group,) = schedule.optimizer.param_groups
                group["betas"] = (0.95 - 0.01 * number, 0.999)
        assert compiled.param_groups[0]["lr"] == 0.05 * (number + 1) / 8, "a script reads the number that it expects"
    rounding = {"rtol": 2**-9, "atol": 1e-4} if kind is torch.optim.Muon else {}  # its updates are bfloat16
    torch.testing.assert_close(weights[:2], weights[2:], **rounding)
    expected = 2 if cycles or kind is torch.optim.SGD else 1
    assert graphs.frame_count == expected, "SGD's first step creates momentum, and betas are numbers until they change"


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


def test_muon_and_own_optimizers_update_weight_after_weight_and_others_of_torch_do_not() -> None:
    class Own(torch.optim.Optimizer):
        pass

    weights = [nn.Parameter(torch.ones(2, 2))]
    optimizers = [torch.optim.Muon(weights), torch.optim.AdamW(weights), torch.optim.LBFGS(weights), Own(weights, {"lr": 0.1})]
    assert [loops_over_weights(one) for one in optimizers] == [True, False, False, True]


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients_have_no_fused_implementation(sparse: bool) -> None:
    """Of SGD with the tables of a recommender, each fused trial failed in its first step."""
    table = nn.EmbeddingBag(5, 2, sparse=sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([[1, 2]])).sum().backward()
    assert has_fused(optimizer) is not sparse
    missed = apply_to_optimizers(CompileSettings.parse("scope=eager,optimizer=fused"), [optimizer])
    assert missed == (["SGD has no fused implementation here and runs as the script has it"] if sparse else [])
    optimizer.step()
    assert table.weight.isfinite().all()


@pytest.mark.parametrize("sparse", [True, False])
def test_neither_a_fused_nor_a_compiled_step_is_for_sparse_gradients_that_the_next_step_has_dropped(
    run: Run, folder: Path, sparse: bool
) -> None:
    (folder / "recommender.py").write_text(
        f"import torch\nfrom torch import nn\ntable = nn.EmbeddingBag(50, 4, mode='sum', sparse={sparse})\n"
        "optimizer = torch.optim.SGD(table.parameters(), lr=0.1)\n"
        "for _ in range(200):\n    optimizer.zero_grad()\n    table(torch.randint(50, (8, 3))).sum().backward()\n"
        "    optimizer.step()\n"
    )
    for kind, said in (("compiled", "sparse gradients"), ("fused", "no fused implementation")):
        session, error = run("recommender.py", f"scope=eager,optimizer={kind}")
        assert (error, session.error) == (None, None)
        assert [said in one for one in session.missed] == [True] * sparse
    as_it_is, _ = run("recommender.py", "scope=eager,as_written=on")
    facts = model_facts(as_it_is)
    assert (facts["has_fused"], facts["can_compile_optimizer"]) == (not sparse, not sparse)


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


def test_torch_optimizers_that_refuse_tensors_get_numbers() -> None:
    step = torch.optim.Adam([nn.Parameter(torch.ones(1))], foreach=True).step
    assert with_tensor_rates(step.__self__, step) is step


class OwnMuon(torch.optim.Optimizer):
    """Passes the rate on where torch wants a number, as the first Muon did."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.05, "momentum": 0.8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                buffer = self.state[weight].setdefault("buffer", torch.zeros_like(weight))
                buffer.lerp_(weight.grad, 1 - group["momentum"])
                weight.add_(buffer, alpha=-group["lr"] * max(1, weight.size(0) / weight.size(1)) ** 0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("scheduled", [(), ("lr",), ("lr", "momentum")])
def test_an_own_optimizer_is_not_compiled_again_for_what_a_schedule_changes(scheduled: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 3)) for _ in range(2)]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    compiled, plain = OwnMuon(weights[:1]), OwnMuon(weights[1:])
    counter = CompileCounter()
    step = with_tensor_rates(compiled, torch.compile(MethodType(OwnMuon.step.__wrapped__, compiled), backend=counter))
    for number in range(12):
        weights[0].grad = torch.randn(6, 3)
        weights[1].grad = weights[0].grad.clone()
        step()
        plain.step()
        for optimizer in (compiled, plain):
            (group,) = optimizer.param_groups
            for name in scheduled:
                group[name] = 0.9 - 0.05 * number
    torch.testing.assert_close(weights[0], weights[1])
    (ours,), (theirs,) = compiled.param_groups, plain.param_groups
    assert ours["lr"] == theirs["lr"]
    assert ours["momentum"] == theirs["momentum"]
    assert counter.frame_count == 2, "the first step creates the momentum"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_an_own_optimizer_in_cuda_graphs_is_compiled_once_and_its_state_has_fixed_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch skips CUDA graphs that change what has no fixed address, and 72 matrices of Muon took a minute a compile."""
    static: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        inputs = [node.meta.get("tensor_dict", {}) for node in graph.graph.nodes if node.op == "placeholder"]
        static.append(sum("_dynamo_static_input_type" in one for one in inputs))
        return graph.forward

    monkeypatch.setattr(in_place, "_compile", lambda function, **_: torch.compile(function, backend=backend, dynamic=False))
    weights = [nn.Parameter(torch.ones(6, 3)) for _ in range(6)]
    compiled, plain = OwnMuon(weights[:3]), OwnMuon(weights[3:])
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)) for one in (compiled, plain)]
    apply_to_optimizers(CompileSettings.parse("scope=full,mode=reduce-overhead,optimizer=compiled"), [compiled])
    for number in range(6):
        for weight in weights:
            weight.grad = torch.full((6, 3), 1.0 + number)
        for optimizer, schedule in zip((compiled, plain), schedules, strict=True):
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(weights[:3], weights[3:])
    assert static == [3], "one graph, with the momentum of each weight"


def test_numbers_that_the_step_itself_changes_stay_changed() -> None:
    optimizer = OwnMuon([nn.Parameter(torch.ones(1, 1))])
    (group,) = optimizer.param_groups
    seen: list[tuple[object, object]] = []

    def step() -> None:
        seen.append((type(group["lr"]), type(group["momentum"])))
        group["momentum"] += 1.0

    stepped = with_tensor_rates(optimizer, step)
    for rate in (0.5, 0.4, 0.3):
        group["lr"] = rate
        stepped()
    assert (group["lr"], group["momentum"]) == (0.3, 3.8)
    assert seen == [(float, float), (torch.Tensor, float), (torch.Tensor, float)]


class OwnAdam(torch.optim.Optimizer):
    """Counts its steps in Python, as Adam's first implementations did."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state.update(count=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
            state["count"] += 1
            state["mean"].lerp_(weight.grad, 0.1)
            state["square"].mul_(0.99).addcmul_(weight.grad, weight.grad, value=0.01)
            scale = math.sqrt(1 - 0.99 ** state["count"]) / (1 - 0.9 ** state["count"])
            weight.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-self.param_groups[0]["lr"] * scale)


@pytest.mark.slow
def test_an_own_optimizer_that_counts_its_steps_in_python_is_compiled_for_all_of_them() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    compiled, plain = OwnAdam(weights[:1]), OwnAdam(weights[1:])
    counters.clear()
    apply_to_optimizers(CompileSettings.parse("scope=full,backend=aot_eager,optimizer=compiled"), [compiled])
    for number in range(12):
        for weight, optimizer in zip(weights, (compiled, plain), strict=True):
            weight.grad = torch.full((3,), 1.0 + number)
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1])
    assert compiled.state[weights[0]]["count"] == 12
    assert counters["stats"]["unique_graphs"] == 3, "creating, counting from one, and from any number"
