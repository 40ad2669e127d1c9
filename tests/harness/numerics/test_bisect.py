"""`--bisect` names the module whose compiled code is wrong, and no other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from compile_sweep.harness.measure import Protocol, first_steps
from compile_sweep.harness.numerics.bisect import Bisection, bisect, children_of, first_wrong
from compile_sweep.harness.prepare import prepare
from compile_sweep.schema.settings import CompileSettings
from orchestrator.view.explain import bisect_lines
from workloads import WorkloadFromModel

CPU = torch.device("cpu")
FULL = "scope=full,dynamic=auto,backend=aot_eager"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class WrongInBackward(Layer):
    """When compiled, its value is right and its gradient is half of what it should be."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if torch.compiler.is_compiling():
            y = (y + y.detach()) / 2
        return y


def network(wrong: Sequence[int]) -> type[nn.Module]:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(WrongInBackward() if index in wrong else Layer() for index in range(5))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Network


def batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8)}


def bisected(
    model: Callable[[], nn.Module], settings: str = FULL, report: Callable[[str], None] = lambda what: None
) -> Bisection:
    workload = WorkloadFromModel(model, batch, lambda model, inputs: model(inputs["x"]).square().mean(), num_batches=4)()
    prepared = prepare(workload, CompileSettings.parse(settings), CPU)
    pool = workload.pool(prepared.policy, rank=0, device=CPU)
    return bisect(prepared, first_steps(pool, Protocol(compared_steps=3)), report)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_block_whose_compiled_gradient_is_wrong_is_named() -> None:
    found = bisected(network([3]))
    assert (found.module, found.class_name) == ("model.blocks.3", "WrongInBackward")
    assert found.is_wrong
    assert found.stage == "back-end aot_eager"
    assert found.tried[0].startswith("as the setting says: diverges")
    assert any(tried.startswith("only model.blocks.3: diverges") for tried in found.tried)


class BreaksApart(Layer):
    """It cannot be compiled by itself under fullgraph=on."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


class WrongInItsOwnForward(WrongInBackward):
    def __init__(self) -> None:
        super().__init__()
        self.apart = BreaksApart()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.0 if torch.compiler.is_compiling() else 0.0 * self.apart(x))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_what_dynamo_makes_wrong_is_found_without_compiling_with_inductor() -> None:
    reported: list[str] = []
    found = bisected(WrongInItsOwnForward, "scope=full,fullgraph=on", reported.append)
    assert (found.module, found.class_name, found.is_whole) == ("model", "WrongInItsOwnForward", True)
    assert found.stage.startswith("Dynamo")
    assert [tried.partition(": ")[0] for tried in found.tried] == [
        "with backend=eager", "only model", "only 2 modules, model.linear to model.apart",
    ]  # fmt: skip
    assert ": raises Call to `torch._dynamo.graph_break()`" in found.tried[-1]
    told = [*bisect_lines(found.to_dict())]
    assert told[-1].startswith("  → leave it eager: put @torch.compiler.disable(recursive=False) on the forward of WrongInItsOwn")
    assert reported == ["eager runs to compare with", *(tried.partition(": ")[0] for tried in found.tried)]


def test_a_forward_that_is_disabled_alone_leaves_own_modules_inside_compiled() -> None:
    class OfOwnCode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        @torch.compiler.disable(recursive=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if torch.compiler.is_compiling() else 1)

    torch._dynamo.reset()
    model, compiled = OfOwnCode(), CompileCounter()
    x = torch.randn(2, 8)
    torch.testing.assert_close(torch.compile(model, backend=compiled)(x), model.layer(x))
    assert compiled.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_setting_that_follows_eager_has_nothing_to_look_for() -> None:
    found = bisected(network([]))
    assert (found.is_wrong, found.module, len(found.tried)) == (False, "", 1)


@pytest.mark.parametrize("wrong", [[0], [4], [2, 3], [0, 4]])
def test_the_first_of_several_that_are_wrong_is_found_in_few_runs(wrong: list[int]) -> None:
    names = [f"block{index}" for index in range(5)]
    runs: list[Sequence[str]] = []

    def is_wrong(tried: Sequence[str]) -> bool:
        runs.append(tried)
        return any(names[index] in tried for index in wrong)

    assert first_wrong(names, is_wrong) == names[wrong[0]]
    assert len(runs) <= 4


def test_none_is_found_where_all_together_are_right() -> None:
    assert first_wrong(["a", "b"], lambda tried: False) == ""
    assert first_wrong([], lambda tried: True) == ""


def test_containers_without_a_forward_are_looked_through() -> None:
    assert children_of(network([])(), "") == [*(f"blocks.{index}" for index in range(5)), "head"]
