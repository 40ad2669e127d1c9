"""What a CUDA graph returns is overwritten when the graph runs again; gradients and momentum that are kept longer must not be.

A graph's memory is imitated on the CPU by a function whose backward returns the same memory each time.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from toy_workloads import Toy

from compile_sweep.harness.apply import applied
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.harness.measure import Protocol, measure
from compile_sweep.harness.prepare import prepare
from compile_sweep.harness.source_runtime import graphed_step
from compile_sweep.schema.causes.errors import GRAPHS_POOL, advice_on_error
from compile_sweep.schema.outcome import Status, judge_measurement
from compile_sweep.schema.settings import CompileSettings
from compile_sweep.script.apply import in_place
from compile_sweep.script.apply.graph_memory import before_graphs, copied_out
from compile_sweep.script.apply.in_place import apply_to_optimizers
from compile_sweep.script.discover import Target

GRAPHS = CompileSettings.parse("scope=full,mode=reduce-overhead")
OVERWRITTEN = "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. Stack trace: …"


class InGraphsMemory(torch.autograd.Function):
    """x · w, whose gradient of w is in memory that the next forward overwrites."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, memory: Tensor) -> Tensor:
        memory.fill_(float("nan"))
        ctx.save_for_backward(x)
        ctx.memory = memory
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.memory.copy_(x.mT @ gradient)
        return None, ctx.memory.view_as(ctx.memory), None


class Graphed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.memory = torch.empty(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return InGraphsMemory.apply(x, self.weight, self.memory)  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_script_that_accumulates_gradients_keeps_them_when_graphs_run_again(set_to_none: bool) -> None:
    model, parts = Graphed(), [torch.rand(4, 3) for _ in range(3)]
    before_graphs(GRAPHS, [Target(called=model, module=model, name="Graphed")], [])
    for _ in range(2):
        for part in parts:
            model(part).sum().backward()
        expected = sum(part.sum(0) for part in parts)
        assert isinstance(expected, Tensor)
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, expected[:, None].expand(3, 2))
        model.zero_grad(set_to_none=set_to_none)


def test_gradients_that_a_script_still_holds_outlast_the_call_of_its_teacher() -> None:
    memory = torch.empty(3, 2)
    student, teacher = Graphed(), Graphed()
    student.memory = teacher.memory = memory  # graphs of a new step may use what those of the last one did
    before_graphs(GRAPHS, [Target(called=student, module=student, name="student")], [], [teacher])
    parts = [torch.rand(4, 3) for _ in range(3)]
    for part in parts:
        with torch.no_grad():
            expected = teacher(part).clone()
        (student(part) - expected).sum().backward()
    assert student.weight.grad is not None
    torch.testing.assert_close(student.weight.grad, torch.stack([part.sum(0) for part in parts]).sum(0)[:, None].expand(3, 2))


@pytest.mark.parametrize("zeroed_late", [True, False])
def test_gradients_that_outlast_a_step_are_copied_while_the_gpu_is_busy_with_it(zeroed_late: bool) -> None:
    model = Graphed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before_graphs(GRAPHS, [Target(called=model, module=model, name="Graphed")], [optimizer])
    after_steps: list[bool] = []
    for _ in range(3):
        outputs = model(torch.rand(4, 3))
        if zeroed_late:
            optimizer.zero_grad()
        outputs.sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        after_steps.append(model.weight.grad.data_ptr() != model.memory.data_ptr())
        if not zeroed_late:
            optimizer.zero_grad()
    assert after_steps == ([False, True, True] if zeroed_late else [False] * 3)


class Centering(nn.Module):
    """A loss that keeps a moving average of what it is given, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.last: Tensor | None = None
        self.memory = torch.empty(2)  # of a graph, which overwrites it at each run

    def forward(self, x: Tensor) -> Tensor:
        center = self.center.clone()
        loss = ((x - center) ** 2).sum()
        self.center = self.memory.fill_(float("nan")).copy_(0.5 * center + 0.5 * x.detach().mean(0)).view(2)
        self.last = self.center
        return loss


def test_state_that_a_forward_assigns_outlasts_the_next_graph_and_stays_at_one_address() -> None:
    model, loss, plain = Graphed(), Centering(), Centering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before_graphs(GRAPHS, [Target(called=model, module=model, name="model")], [optimizer], losses=[loss])
    addresses = set()
    for _ in range(8):
        outputs = model(torch.rand(4, 3))
        loss.memory.fill_(float("nan"))  # another graph of the new step writes to the same memory
        plain.center = plain.center.clone()
        addresses.add(loss.center.data_ptr())
        total, expected = loss(outputs), plain(outputs.detach())
        torch.testing.assert_close(total.detach(), expected)
        total.backward()
        optimizer.step()
    assert len(addresses) == 2, "the buffer that it began with, then a place of its own"
    assert set(loss.state_dict()) == {"center"}


def test_several_calls_before_one_backward_leave_state_where_it_is() -> None:
    model = Centering()
    model.weight = nn.Parameter(torch.ones(2))
    before_graphs(GRAPHS, [Target(called=model, module=model, name="model")], [])
    losses = []
    for _ in range(3):
        losses.append(model(torch.rand(4, 2) * model.weight))
        assert model.center.data_ptr() == model.memory.data_ptr(), "the backward may need what was read"
    sum(losses).backward()


@pytest.mark.parametrize("trains", [False, True])
def test_results_without_gradients_are_copied_out_of_a_graphs_memory(*, trains: bool) -> None:
    memory = torch.zeros(2)
    forward = copied_out(lambda: {"outputs": [memory]}, applies=lambda: not torch.is_grad_enabled())
    with torch.set_grad_enabled(trains):
        (outputs,) = forward()["outputs"]
    assert (outputs.data_ptr() == memory.data_ptr()) is trains


@pytest.mark.parametrize("outlasts", [False, True])
def test_what_a_critic_reads_after_the_generators_step_is_copied_out_of_a_graphs_memory(*, outlasts: bool) -> None:
    memory = torch.zeros(2)
    model = nn.Linear(3, 2)
    target = Target(called=model, module=model, name="model", outlasts=outlasts)
    in_place.apply_to_modules(GRAPHS, [target], {}, compiled=lambda *_: lambda x: memory)
    assert (model(torch.zeros(3)).data_ptr() == memory.data_ptr()) is not outlasts


def test_gradients_of_a_script_without_graphs_are_left_where_they_are() -> None:
    model = nn.Linear(3, 2)
    before_graphs(CompileSettings.parse("scope=full"), [Target(called=model, module=model, name="Linear")], [])
    assert "_compiled_call_impl" not in vars(model)


class OwnSGD(torch.optim.SGD):
    """Not torch's."""


@pytest.mark.parametrize(
    ("kind", "momentum", "num_plain"), [(torch.optim.SGD, 0.9, 1), (torch.optim.SGD, 0.0, 0), (OwnSGD, 0.9, 2), (OwnSGD, 0.0, 2)]
)
def test_a_step_that_creates_momentum_runs_uncompiled(kind: type[torch.optim.SGD], momentum: float, num_plain: int) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, momentum=momentum)
    plain: list[None] = []
    compiled: list[None] = []

    def stepping(calls: list[None]) -> Any:
        def step() -> None:
            calls.append(None)
            optimizer.step()

        return step

    step = graphed_step(optimizer, stepping(plain), stepping(compiled))
    for _ in range(3):
        weight.grad = torch.ones(3)
        step()
    assert (len(plain), len(compiled)) == (num_plain, 3 - num_plain)


@pytest.mark.parametrize("number", [1, 2])
def test_a_scripts_compiled_step_finds_its_gradients_in_graphs_memory(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiled call outside of forward and backward begins a new round of graphs' memory, unless steps are marked.
    marks: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    monkeypatch.setattr(in_place, "_compile", lambda function, **arguments: function)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(number)]
    optimizers = [torch.optim.SGD([weight], lr=0.5) for weight in weights]
    apply_to_optimizers(CompileSettings.parse("scope=full,mode=reduce-overhead,optimizer=compiled"), optimizers)
    assert len(marks) == (1 if number == 1 else 0)
    in_graph = torch.ones(2)
    weights[0].grad = in_graph
    optimizers[0].step()
    assert weights[0].tolist() == [0.5, 0.5]
    assert len(marks) == (2 if number == 1 else 0)
    assert (weights[0].grad is in_graph) is (number == 1), "with several optimizers, gradients are copied"


def test_an_accumulating_workload_keeps_gradients_in_place_under_graphs() -> None:
    plain, accumulating = (CompileSettings.parse(f"scope=full,{more}") for more in ("mode=default,accumulate=2", "accumulate=2"))
    assert not plain.keeps_gradients
    assert not accumulating.keeps_gradients
    assert CompileSettings.parse("scope=full,mode=reduce-overhead,accumulate=2").keeps_gradients
    assert not GRAPHS.keeps_gradients


def test_memory_that_a_graph_overwrote_is_the_compilers_error_and_says_what_to_clone() -> None:
    assert is_compiler_error(RuntimeError(OVERWRITTEN))
    assert not is_compiler_error(RuntimeError("shapes do not match"))
    assert "clone what a later step reads" in (advice_on_error(OVERWRITTEN) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["foreach", "compiled"])
@pytest.mark.parametrize("scope", ["full", "regional"])
def test_accumulated_gradients_are_right_under_cuda_graphs(scope: str, optimizer: str) -> None:
    settings = CompileSettings.parse(f"scope={scope},mode=reduce-overhead,accumulate=3,optimizer={optimizer}")
    prepared = prepare(Toy("only", 0), settings, torch.device("cuda"))
    measurement = measure(prepared, protocol=Protocol(compared_steps=6, min_passes=2, max_passes=2))
    verdict = judge_measurement(measurement.to_dict(), claims_cudagraphs=True)
    assert verdict.status is Status.OK, (verdict.label, verdict.reason)


@pytest.mark.gpu
def test_momentum_is_right_under_cuda_graphs_with_a_compiled_optimizer() -> None:
    device = torch.device("cuda")
    weights: dict[str, list[Tensor]] = {}
    for spelled in ("scope=eager", "scope=full,mode=reduce-overhead,optimizer=compiled"):
        torch.manual_seed(0)
        workload = Toy("only", 0)
        prepared = prepare(workload, CompileSettings.parse(spelled), device)
        model = prepared.workload.build_model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        (batch, *_) = prepared.workload.pool(prepared.policy, rank=0, device=device)
        with applied(prepared, model, optimizer) as step:
            for _ in range(6):
                step(batch)
        weights[spelled] = [parameter.detach() for parameter in model.parameters()]
    for one, other in zip(*weights.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


class Follower(nn.Module):
    """Moves a copy of its weights after them, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.net, self.copy, self.in_place = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for weight, copy in zip(self.net.parameters(), self.copy.parameters(), strict=True):
                if self.in_place:
                    copy.mul_(0.9).add_(weight, alpha=1 - 0.9)
                else:
                    copy.data = 0.9 * copy.data + 0.1 * weight.data
            wanted = self.copy(x)
        return (self.net(x) - wanted).square().mean()


@pytest.mark.gpu
def test_weights_that_a_forward_replaces_fail_in_cuda_graphs_and_in_place_they_do_not() -> None:
    def train(net: Follower, call: Any) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for seed in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).cuda()
            call(x).backward()
            optimizer.step()
            optimizer.zero_grad()  # gradients in memory of CUDA graphs may not be kept

    nets = []
    for stays in (False, True):
        torch.manual_seed(0)
        nets.append(Follower(in_place=stays).cuda())
    expected, net = copy.deepcopy(nets[1]), nets[1]
    train(expected, expected)
    train(net, torch.compile(net, mode="reduce-overhead"))
    assert all(torch.allclose(one, other) for one, other in zip(net.parameters(), expected.parameters(), strict=True))
    torch._dynamo.reset()
    try:
        with pytest.raises(RuntimeError, match=GRAPHS_POOL) as raised:
            train(nets[0], torch.compile(nets[0], mode="reduce-overhead"))
    finally:
        reset_cudagraph_trees()  # what has failed would overwrite the next model's results
    assert "change them in place" in (advice_on_error(str(raised.value)) or "")
