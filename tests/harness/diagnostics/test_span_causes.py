"""Numbers that say how much runs: how many modules, how many rounds, and from where to where."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.schema.causes import guards
from compile_sweep.schema.causes.errors import advice_on_exception
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.causes.remedies import remedy_of

pytestmark = pytest.mark.slow  # for `make quick`


class Growing(nn.Module):
    """Layers of which the first `active` run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))
        self.stack = nn.Sequential(*self.blocks)
        self.active = 1
        self.token = nn.Parameter(torch.zeros(4))


Forward = Callable[..., Tensor]


def run(forward: Forward, *further: list[Any], **config: Any) -> Diagnostics:
    """Trains a compiled model whose `active` grows by one a step, and whose forward is given one of `further` in each."""
    torch._dynamo.reset()
    net: Any = type("Grown", (Growing,), {"forward": forward})()
    compiled = torch.compile(net, backend="aot_eager")
    steps = len(further[0]) if further else 12
    with torch._dynamo.config.patch(**config), capture_diagnostics() as found:
        for number in range(steps):
            net.active = number % 12 + 1
            compiled(torch.randn(2, 24, 4), *(one[number] for one in further)).square().sum().backward()
    return found


def record(found: Diagnostics) -> dict[str, Any]:
    return {
        "label": "recompile-limit",
        "recompile_limit_hits": found.recompile_limit_hits,
        "recompile_reasons": found.recompile_reasons,
    }


def sliced(net: Growing, x: Tensor) -> Tensor:
    for block in net.blocks[: net.active]:
        x = block(x)
    return x


def sliced_in_sequence(net: Growing, x: Tensor) -> Tensor:
    return net.stack[: net.active](x)


def in_rounds(net: Growing, x: Tensor) -> Tensor:
    for number in range(net.active):
        x = net.blocks[number](x)
    return x


def picked(net: Growing, x: Tensor) -> Tensor:
    return net.blocks[net.active - 1](x)


OTHERWISE = pytest.mark.nightly("compiles 28 graphs once more; `make test` slices a list of modules")


@pytest.mark.parametrize("forward", [sliced, *(pytest.param(one, marks=OTHERWISE) for one in (sliced_in_sequence, in_rounds))])
def test_a_number_of_modules_that_run_takes_a_higher_limit(forward: Forward) -> None:
    found = run(forward)
    assert remedy_of(record(found)) == guards.HIGHER_LIMIT
    advice = guards.advice_on_limit(found.recompile_limit_hits[0], found.recompile_reasons)
    assert "neither a tensor nor allow_unspec_int_on_nn_module changes that: set recompile_limit" in advice
    assert run(forward, allow_unspec_int_on_nn_module=True).recompile_limit_hits
    mended = run(forward, recompile_limit=64)
    assert (mended.recompile_limit_hits, mended.graphs) == ([], 12)


def test_a_module_that_a_number_picks_takes_a_higher_limit_where_the_number_may_vary() -> None:
    found = run(picked, allow_unspec_int_on_nn_module=True)
    assert remedy_of(record(found)) == guards.HIGHER_LIMIT
    assert run(picked, allow_unspec_int_on_nn_module=True, recompile_limit=64).recompile_limit_hits == []


def hidden(net: Growing, x: Tensor, start: int, size: int) -> Tensor:
    x = torch.cat([x[:, :start], net.token.expand(len(x), size, -1), x[:, start + size :]], 1)
    return (net.blocks[0](x) + x.mean(1, keepdim=True))[:, start : start + size]


def hidden_by_a_mask(net: Growing, x: Tensor, start: Tensor, size: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    x = torch.where(((at >= start) & (at < start + size))[:, None], net.token, x)
    return net.blocks[0](x) + x.mean(1, keepdim=True)


def spans(steps: int = 150) -> tuple[list[int], list[int]]:
    draw = random.Random(0)
    sizes = [draw.randint(0, 6) for _ in range(steps)]
    return [draw.randint(0, 24 - size) for size in sizes], sizes


def test_a_random_span_that_is_sliced_takes_some_graphs_and_one_by_a_mask() -> None:
    starts, sizes = spans()
    found = run(hidden, starts, sizes)
    assert remedy_of(record(found)) == guards.HIGHER_LIMIT
    advice = guards.advice_on_limit(found.recompile_limit_hits[0], found.recompile_reasons)
    assert "or mark the span by a mask, with start and end as tensors" in advice
    higher = run(hidden, starts, sizes, recompile_limit=64)
    assert higher.recompile_limit_hits == []
    assert 8 < higher.graphs <= 24
    mended = run(hidden_by_a_mask, [torch.tensor(one) for one in starts], [torch.tensor(one) for one in sizes])
    assert (mended.graphs, mended.recompile_reasons) == (1, [])
    x, net = torch.randn(2, 24, 4), Growing()
    assert torch.allclose(hidden(net, x, 3, 5), hidden_by_a_mask(net, x, torch.tensor(3), torch.tensor(5))[:, 3:8])


class Slowing(nn.Module):
    """Reads its optimizer's learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.optimizer = [torch.optim.SGD(self.parameters(), 0.5, foreach=True)]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.optimizer[0].param_groups[0]["lr"]


def test_a_learning_rate_that_the_forward_reads_is_no_matter_of_the_optimizer() -> None:
    torch._dynamo.reset()
    net = Slowing()
    compiled = torch.compile(net, backend="aot_eager")
    with capture_diagnostics() as found:
        for _ in range(6):
            compiled(torch.randn(2, 4)).sum().backward()
            net.optimizer[0].param_groups[0]["lr"] *= 0.9
    (series,) = fold_recompiles(found.recompile_reasons)
    assert found.graphs == 2
    cause = guards.cause_of_series(series)
    assert cause is not None
    assert cause.name == "first value of a number"


def whitened(x: Tensor) -> Tensor:
    try:
        return torch.linalg.cholesky(x.mT @ x)
    except torch.linalg.LinAlgError:
        return torch.linalg.cholesky(x.mT @ x + torch.eye(x.shape[-1]))


def whitened_by_asking(x: Tensor) -> Tensor:
    square = x.mT @ x
    failed = torch.linalg.cholesky_ex(square.detach())[1] > 0
    return torch.linalg.cholesky(square + failed[..., None, None] * torch.eye(x.shape[-1]))


def test_a_factorization_whose_exception_is_caught_is_asked_of_first() -> None:
    torch._dynamo.reset()
    x = torch.zeros(4, 3)
    with pytest.raises(RuntimeError) as raised:
        torch.compile(whitened, backend="aot_eager")(x)
    assert "failed = torch.linalg.cholesky_ex(a.detach())[1] > 0" in str(advice_on_exception(str(raised.value)))
    mended = torch.compile(whitened_by_asking, backend="aot_eager", fullgraph=True)
    for matrix in (x, torch.randn(4, 3)):
        expected, found = matrix.clone().requires_grad_(), matrix.clone().requires_grad_()
        torch.testing.assert_close(mended(found), whitened(expected))
        mended(found).sum().backward()
        whitened(expected).sum().backward()
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("function", [torch.linalg.inv, lambda a: torch.linalg.solve(a, a), lambda a: torch.linalg.svd(a / 0)])
def test_a_matrix_that_torch_refuses_is_told_with_what_raises_none(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError) as raised:
        function(torch.zeros(3, 3))
    assert "torch.linalg.cholesky_ex" in str(advice_on_exception(str(raised.value)))


def few(net: Growing, x: Tensor, limit: int) -> Tensor:
    return net.blocks[0](x) if limit > 4 else net.blocks[1](x)


def test_a_number_that_only_code_compares_is_no_end_of_a_slice() -> None:
    found = run(few, list(range(2, 14)))
    named = {cause.name for one in fold_recompiles(found.recompile_reasons) if (cause := guards.cause_of_series(one))}
    assert "number that crosses a limit" in named
    assert "end of a slice" not in named
