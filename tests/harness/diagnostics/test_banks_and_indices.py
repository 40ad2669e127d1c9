"""Queues, banks, tables and what indexes them: the cause is told, and the advice trains like eager in Inductor's code, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faulty_models import TORCH, Net
from torch import Tensor

from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes import breaks, errors, guards
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.outcome import judge_measurement

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def trained(forward: Any, backend: str | None, *further: Any, **config: Any) -> tuple[list[Tensor], Diagnostics]:
    """Trains for six steps; returns the gradients of each, and what the compiler did."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = type("Model", (Net,), {"forward": forward})()
    net.queue.normal_()
    net.steps = net.steps.long()
    model = torch.compile(net, backend=backend) if backend else net
    found = []
    with torch._dynamo.config.patch(**config), capture_diagnostics() as diagnostics:
        for number in range(6):
            net.zero_grad()
            model(torch.randn(4, 8), *(one[number] for one in further)).square().sum().backward()
            found.append(net.layer.weight.grad.clone())
    return found, diagnostics


def in_place_by_a_number(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    scores = (y @ net.queue.clone().detach().T).tanh()
    start = int(net.steps)
    net.queue[start : start + 4] = y.detach()
    net.steps.fill_((start + 4) % 16)
    return scores


def in_place(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    scores = (y @ net.queue.clone().detach().T).tanh()
    net.queue.index_copy_(0, (net.steps + torch.arange(4)) % len(net.queue), y.detach())
    net.steps.add_(4).remainder_(16)
    return scores


def by_a_new_tensor(net: Net, x: Tensor) -> Tensor:
    y: Tensor = net.layer(x)
    scores = (y @ net.queue.clone().detach().T).tanh()
    net.queue = net.queue.index_copy(0, (net.steps + torch.arange(4)) % len(net.queue), y.detach())
    net.steps = (net.steps + 4) % len(net.queue)
    return scores


def test_a_queue_that_is_written_by_a_new_tensor_has_eagers_gradients_and_one_graph() -> None:
    (told,) = trained(in_place_by_a_number, "aot_eager")[1].graph_break_reasons
    advice = breaks.advice_on_break(told) or ""
    assert "self.bank = self.bank.index_copy(0, (self.start + torch.arange(n)) % len(self.bank), rows)" in advice
    assert "index_copy_" not in advice
    expected, _ = trained(in_place_by_a_number, None)
    found, diagnostics = trained(by_a_new_tensor, "inductor")
    assert (diagnostics.graph_break_reasons, diagnostics.recompile_reasons, diagnostics.graphs) == ([], [], 1)
    torch.testing.assert_close(found, expected)


def test_a_queue_is_told_where_its_position_hits_the_recompile_limit_too() -> None:
    _, diagnostics = trained(in_place_by_a_number, "aot_eager", automatic_dynamic_shapes=False, recompile_limit=2)
    (hit,) = diagnostics.recompile_limit_hits
    told = guards.advice_on_limit(hit, diagnostics.recompile_reasons, diagnostics.graph_break_reasons) or ""
    assert "self.bank.index_copy(0, " in told


@pytest.mark.skipif(TORCH > (2, 13), reason="not known of newer versions of torch")
def test_a_queue_that_is_written_in_place_behind_a_break_is_an_error_that_has_the_advice() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        trained(in_place_by_a_number, "inductor")
    assert "x.index_copy(0, rows, y) in place of x[rows] = y" in (errors.advice_on_error(str(raised.value)) or "")


@pytest.mark.skipif(TORCH > (2, 13), reason="not known of newer versions of torch")
@pytest.mark.parametrize(("forward", "config"), [(in_place, {}), (in_place_by_a_number, {"capture_scalar_outputs": True})])
def test_a_queue_that_the_forward_reads_and_writes_in_place_has_wrong_gradients(forward: Any, config: dict[str, bool]) -> None:
    """Why no advice is to do so."""
    if config and TORCH < (2, 13):
        pytest.skip(f"torch {TORCH[0]}.{TORCH[1]} does not compile it")
    expected, _ = trained(forward, None)
    found, _ = trained(forward, "inductor", **config)
    assert any((one - right).norm() > 0.01 * right.norm() for one, right in zip(found, expected, strict=True))


LEVELS = [torch.tensor(number % 4) for number in range(6)]


def indexed(net: Net, x: Tensor, level: Tensor) -> Tensor:
    return net.layer(x) * (net.whole_table + 1)[level]


def set_at(net: Net, x: Tensor, level: Tensor) -> Tensor:
    y = net.layer(x).clone()
    y[level] = 0.0
    return y


def indexed_by_one_element(net: Net, x: Tensor, level: Tensor) -> Tensor:
    return net.layer(x) * (net.whole_table + 1)[level[None]][0]


def selected(net: Net, x: Tensor, level: Tensor) -> Tensor:
    return net.layer(x) * (net.whole_table + 1).index_select(0, level[None])[0]


@pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 indexes within the graph")
@pytest.mark.parametrize("forward", [indexed, set_at])
def test_a_tensor_without_dimensions_as_an_index_is_told_in_the_verdict_and_as_an_error(forward: Any) -> None:
    _, found = trained(forward, "aot_eager", LEVELS)
    causes = {cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))}
    assert causes == {"tensor without dimensions as an index"}, found.graph_break_reasons
    assert found.fallbacks
    measured = {"numerics": {"status": "ok"}, "recompile_limit_hits": [], "cudagraph_skips": 0, "cudagraph_skip_reasons": []}
    kept = {**measured, "fallbacks": found.fallbacks, "graph_break_reasons": found.graph_break_reasons, "data_wait_share": None}
    assert "table[level[None]][0]" in (judge_measurement(kept, claims_cudagraphs=False).reason or "")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="Could not extract specialized integer") as raised:
        trained(forward, "aot_eager", LEVELS, capture_scalar_outputs=True)
    assert is_compiler_error(raised.value)
    assert "table[level[None]] in place of table[level]" in (errors.advice_on_error(str(raised.value)) or "")


@pytest.mark.parametrize("forward", [indexed_by_one_element, selected])
def test_an_index_of_one_element_has_eagers_gradients_and_one_graph(forward: Any) -> None:
    expected, _ = trained(indexed, None, LEVELS)
    found, diagnostics = trained(forward, "aot_eager", LEVELS)
    assert (diagnostics.graph_break_reasons, diagnostics.fallbacks, diagnostics.graphs) == ([], [], 1)
    torch.testing.assert_close(found, expected)


def with_table_for_each_length(net: Net, x: Tensor) -> Tensor:
    kept: dict[int, Tensor] = net.last
    if len(x) not in kept:
        kept[len(x)] = torch.full((len(x), len(x)), 1.0).tril()
    return kept[len(x)] @ net.layer(x)


def with_one_table(net: Net, x: Tensor) -> Tensor:
    return net.last[: len(x), : len(x)] @ net.layer(x)


def lengths_seen(forward: Any, kept: Any) -> Diagnostics:
    torch._dynamo.reset()
    net: Any = type("Model", (Net,), {"forward": forward})()
    net.last = kept
    compiled = torch.compile(net, backend="aot_eager")
    with capture_diagnostics() as found:
        for length in (12, 7, 9, 15, 10, 20, 17, 13, 22, 24):
            compiled(torch.randn(length, 8)).sum().backward()
    return found


def test_a_table_for_each_length_takes_a_graph_each_and_a_slice_of_one_table_takes_two() -> None:
    found = lengths_seen(with_table_for_each_length, {})
    hit = next(iter(found.recompile_limit_hits))
    assert "make one table in __init__" in guards.advice_on_limit(hit, found.recompile_reasons)
    mended = lengths_seen(with_one_table, torch.ones(32, 32).tril())
    assert (mended.graphs, mended.recompile_limit_hits) == (2, [])  # the first length, and all others


def with_recent_means_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.heat = torch.cat([net.heat[1:], y.detach().abs().mean()[None]])
    return y / net.heat.mean()


def with_means_started(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.history.append(y.detach().abs().mean())
    return y / torch.stack(net.history).mean()


def test_recent_values_that_the_forward_reads_take_one_graph_in_a_buffer_and_train_like_eager() -> None:
    _, found = trained(with_means_started, "aot_eager")
    (cause,) = {cause.name: cause for one in fold_recompiles(found.recompile_reasons) if (cause := guards.cause_of_series(one))}
    assert cause == "list or dictionary that grows"
    listed = next(one for one in guards.GUARDS if one.name == cause)
    assert "self.recent = torch.cat([self.recent[1:], mean[None]])" in listed.advice

    def filled(net: Net, x: Tensor) -> Tensor:
        if net.heat.dim() == 0:
            net.heat = torch.ones(5)
        return with_recent_means_in_a_buffer(net, x)

    expected, _ = trained(filled, None)
    mended, diagnostics = trained(filled, "inductor")
    assert diagnostics.graphs <= 2  # one of them makes the buffer
    torch.testing.assert_close(mended, expected)
