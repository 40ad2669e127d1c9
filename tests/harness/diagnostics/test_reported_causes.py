"""Faults from public reports: each has its cause, and the advised change makes the model one graph with equal results."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from faulty_models import FEW, TORCH, Forward, Net, is_clean, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compile_sweep.harness.diagnostics.advice import short_findings
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.schema.causes import breaks, errors, guards
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.causes.remedies import remedy_of


def with_branch_on_numpy(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if np.any(y.detach().numpy() > 0):
        y = y / 2
    return y


def with_choice_by_torch(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.where((y > 0).any(), y / 2, y)


def with_check_by_numpy(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if bool(np.isnan(y.detach().numpy()).any()):
        raise ValueError("not finite")
    return y


def with_check_in_the_graph(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    torch._assert_async(torch.isfinite(y).all())
    return y


def with_text_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = "mean %.2f" % y.detach().mean()  # noqa: UP031
    return y


def with_text_of_a_count(net: Net, x: Tensor) -> Tensor:
    net.temperature += 0.5
    net.last = "heat %.2f" % net.temperature  # noqa: UP031
    return net.layer(x)


def with_text_unless_compiling(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if not torch.compiler.is_compiling():
        net.last = f"mean {y.detach().mean():.2f}"
    return y


def with_numbers_in_a_list(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    weights = torch.tensor([row.mean().item() for row in y])
    return y * weights[:, None]


def with_tensors_in_a_stack(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y * torch.stack([row.mean() for row in y]).detach()[:, None]


def with_changed_copy(net: Net, x: Tensor) -> Tensor:
    fast = copy.deepcopy(net.layer)
    with torch.no_grad():
        for weight in fast.parameters():
            weight.mul_(0.9)
    return net.layer(x) + fast(x).detach()


def with_changed_weights(net: Net, x: Tensor) -> Tensor:
    fast = {name: 0.9 * weight.detach() for name, weight in net.layer.named_parameters()}
    return net.layer(x) + torch.func.functional_call(net.layer, fast, (x,)).detach()


def _result(forward: Forward) -> Tensor:
    torch.manual_seed(0)
    return forward(Net(), torch.randn(4, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "words", "before", "after"),
    [
        ("data-dependent branch", "torch.where((x > 2).any(), a, b)", with_branch_on_numpy, with_choice_by_torch),
        ("numpy and scipy", "torch._assert_async(condition)", with_check_by_numpy, with_check_in_the_graph),
        ("text of a number", "torch.compiler.is_compiling()", with_text_of_a_tensor, with_text_unless_compiling),
        ("text of a number", "torch.compiler.is_compiling()", with_text_of_a_count, with_text_unless_compiling),
        ("value of a tensor", "torch.stack(values)", with_numbers_in_a_list, with_tensors_in_a_stack),
        ("copy of a tensor by Python", "torch.func.functional_call(net", with_changed_copy, with_changed_weights),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_reported_break_is_told_with_what_mends_it(cause: str, words: str, before: Forward, after: Forward) -> None:
    found = run(before, steps=FEW)
    if TORCH >= (2, 14) and is_clean(found):
        pytest.skip("this version of torch has no break here")
    told = {one.name: breaks.advice_on_break(text) for text in found.graph_break_reasons if (one := breaks.cause_of_break(text))}
    assert words in (told[cause] or ""), found.graph_break_reasons
    assert is_clean(run(after, steps=FEW))
    torch.testing.assert_close(_result(after), _result(before))


way = ""
"""How the backward takes its gradients."""


class Recomputed(torch.autograd.Function):
    """Computes a layer again in its backward, as reversible networks and older checkpoints do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.weights = layer, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x).tanh()
        if way == "torch.autograd.backward":
            torch.autograd.backward(y, gradient)
        elif way == "Tensor.backward":
            y.backward(gradient)
        else:
            return None, *torch.autograd.grad(y, [x, *ctx.weights], gradient)
        return None, x.grad, None, None


def recomputed(net: Net, x: Tensor) -> Tensor:
    return Recomputed.apply(net.layer, net.layers[0](x), *net.layer.parameters())  # type: ignore[no-any-return, no-untyped-call]


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda y: net.layer(y).tanh(), net.layers[0](x), use_reentrant=False)  # type: ignore[no-any-return]


def _gradients(forward: Forward, *, is_compiled: bool) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = type("Model", (Net,), {"forward": forward})()
    step = torch.compile(net, backend="aot_eager") if is_compiled else net
    step(torch.randn(4, 8)).square().sum().backward()
    return [weight.grad for weight in (net.layer.weight, net.layers[0].weight) if weight.grad is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("called", ["torch.autograd.backward", "Tensor.backward", "replaced by a sweep"])
def test_a_function_that_computes_its_forward_again_is_told_and_a_checkpoint_or_its_own_gradients_mend_it(
    called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "way", called if called == "Tensor.backward" else "torch.autograd.backward")
    if called.startswith("replaced"):
        from compile_sweep.script.session import Session

        replaced = Session._noting_losses(object.__new__(Session), torch.autograd.backward)
        monkeypatch.setattr(torch.autograd, "backward", replaced)
    found = run(recomputed, steps=FEW)
    (told,) = {breaks.cause_of_break(text) for text in found.graph_break_reasons}
    assert told is not None, found.graph_break_reasons
    assert (told.name, told.remedy) == ("backward in compiled code", "")
    assert not [text for text in found.graph_break_reasons if "compiler.disable" in text]
    assert "checkpoint(block, x, use_reentrant=False)" in told.advice
    monkeypatch.undo()
    assert is_clean(run(checkpointed, steps=FEW))
    expected = _gradients(recomputed, is_compiled=False)
    assert len(expected) == 2
    torch.testing.assert_close(_gradients(checkpointed, is_compiled=True), expected)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert is_clean(run(recomputed, steps=FEW))
        torch.testing.assert_close(_gradients(recomputed, is_compiled=True), expected)


class Heads(nn.Module):
    """One of several heads is picked by a tensor."""

    def __init__(self, *, stacks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
        self.stacks = stacks

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        if self.stacks:
            return torch.stack([head(x) for head in self.heads])[which[None]][0]
        return self.heads[which](x)  # type: ignore[index, no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_module_that_a_tensor_picks_is_told_whether_or_not_its_number_is_in_the_graph(in_graph: bool) -> None:
    def picked(model: Heads) -> tuple[Diagnostics, Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        with capture_diagnostics() as found, torch._dynamo.config.patch(capture_scalar_outputs=in_graph):
            results = [compiled(torch.ones(4, 8), torch.tensor(which)) for which in range(3)]
        return found, torch.stack(results)

    found, expected = picked(Heads(stacks=False))
    (told,) = {breaks.cause_of_break(text) for text in found.graph_break_reasons}
    assert told is not None
    assert (told.name, told.remedy) == ("number of numpy" if in_graph else "module picked by a tensor", "")
    assert "torch.stack([head(x) for head in self.heads])[which[None]][0]" in told.advice
    mended, results = picked(Heads(stacks=True))
    assert (is_clean(mended), mended.graphs) == (True, 1)
    torch.testing.assert_close(results, expected)


@pytest.mark.slow
def test_rows_that_torch_nn_picks_cannot_be_rewritten_and_a_module_that_computes_all_makes_one_graph() -> None:
    picking, head = nn.AdaptiveLogSoftmaxWithLoss(64, 100, cutoffs=[10, 50]), nn.Linear(64, 100)

    def picked(x: Tensor, labels: Tensor) -> Tensor:
        return picking(x, labels).loss  # type: ignore[no-any-return]

    def computed(x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(x), labels)

    def trained(loss: Callable[[Tensor, Tensor], Tensor], **options: bool) -> Diagnostics:
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_eager")
        with capture_diagnostics() as found, torch._dynamo.config.patch(**options):
            for _ in range(FEW):
                compiled(torch.randn(16, 64), torch.randint(100, (16,))).backward()
        return found

    for options, name in (
        ({}, "rows picked by torch.nn"),
        ({"capture_dynamic_output_shape_ops": True}, "size that is not known"),
    ):
        reasons = trained(picked, **options).graph_break_reasons
        assert {cause and cause.name for cause in map(breaks.cause_of_break, reasons)} == {name}
        assert ("a Linear and cross_entropy" in (breaks.advice_on_break(reasons[0]) or "")) is (not options)
        assert remedy_of({"graph_break_reasons": reasons}) is None, "the option that torch names changes nothing here"
    assert is_clean(trained(computed))


NAMES = [f"sensor {number}" for number in range(8)]


def of_any_sensors(net: Net, readings: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> Tensor:
    total = net.heat
    for name, reading in readings.items():
        total = total + net.layer(reading).tanh() * (weights[name] if weights else 1)
    return total


def of_sorted_sensors(net: Net, readings: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> Tensor:
    return of_any_sensors(net, {name: readings[name] for name in sorted(readings)}, weights)


def _trained_on_sensors(forward: Any, fill: Callable[[set[str], dict[str, Tensor]], Sequence[Any]]) -> Diagnostics:
    draw = random.Random(0)
    torch._dynamo.reset()
    compiled, net = torch.compile(forward, backend="aot_eager"), Net()
    with capture_diagnostics() as found:
        for _ in range(20):
            names = draw.sample(NAMES, draw.randint(2, 7))
            compiled(net, *fill(set(names), {name: torch.randn(4, 8) for name in names})).sum().backward()
    return found


def _filled(names: set[str], readings: dict[str, Tensor], zeros: Callable[[], Tensor]) -> Sequence[Any]:
    every = {name: readings[name] if name in names else zeros() for name in NAMES}
    return every, {name: torch.tensor(float(name in names)) for name in NAMES}


@pytest.mark.slow
def test_any_subset_of_keys_takes_a_graph_sorted_or_not_and_all_keys_with_weights_take_one() -> None:
    for forward in (of_any_sensors, of_sorted_sensors):
        found = _trained_on_sensors(forward, lambda names, readings: (readings,))
        (hit,) = found.recompile_limit_hits
        limit, _ = guards.cause_of_limit(hit, found.recompile_reasons)
        series = fold_recompiles(found.recompile_reasons)
        told = {cause.name for one in series if (cause := guards.cause_of_series(one, (), found.recompile_reasons))}
        assert limit is not None
        assert {limit.name, *told} == {"batches of several kinds"}, found.recompile_reasons
        assert "a new tensor of zeros with a weight of 0" in limit.advice
        assert "sorted(" not in limit.advice
    shared = torch.zeros(4, 8)
    found = _trained_on_sensors(of_any_sensors, lambda names, readings: _filled(names, readings, lambda: shared))
    (hit,) = found.recompile_limit_hits
    cause, _ = guards.cause_of_limit(hit, found.recompile_reasons)
    assert cause is not None
    assert (cause.name, "x.clone() or a new torch.zeros(n)" in cause.advice) == ("one tensor under several names", True)
    found = _trained_on_sensors(of_any_sensors, lambda names, readings: _filled(names, readings, lambda: torch.zeros(4, 8)))
    assert (is_clean(found), found.graphs) == (True, 1)


@pytest.mark.parametrize("shared_first", [True, False])
def test_a_tensor_that_is_given_under_two_names_takes_a_graph_and_a_clone_of_it_none(shared_first: bool) -> None:
    def given(*, clones: bool) -> Diagnostics:
        torch._dynamo.reset()
        compiled = torch.compile(lambda batch: batch["a"] * 2 + batch["b"], backend="eager")
        with capture_diagnostics() as found:
            for shares in (shared_first, not shared_first):
                x = torch.ones(3)
                compiled({"a": x, "b": (x.clone() if clones else x) if shares else torch.ones(3)})
        return found

    told = [guards.cause_of_series(one) for one in fold_recompiles(given(clones=False).recompile_reasons)]
    assert [cause and cause.name for cause in told] == ["one tensor under several names"]
    assert given(clones=True).recompile_reasons == []


class Prompted(nn.Module):
    """Prompts are added while it trains, as in continual learning."""

    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        self.masks = masks
        self.layer = nn.Linear(8, 8)
        self.added = nn.ParameterList()
        self.prompts = nn.Parameter(torch.ones(12, 8))
        self.register_buffer("in_use", torch.zeros(12, 1))
        self.in_use: Tensor

    def add(self, number: int) -> None:
        if self.masks:
            self.in_use[number] = 1
        else:
            self.added.append(nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.masks:
            return y + (self.prompts * self.in_use).sum(0)
        for prompt in self.added:
            y = y + prompt
        return y


@pytest.mark.slow
def test_parameters_that_are_added_take_a_graph_each_and_a_mask_of_those_in_use_takes_one() -> None:
    def trained(model: Prompted) -> tuple[Diagnostics, Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager")
        with capture_diagnostics() as found:
            for number in range(12):
                model.add(number)
                y = compiled(torch.ones(4, 8))
        return found, y - model.layer(torch.ones(4, 8))

    found, expected = trained(Prompted(masks=False))
    (hit,) = found.recompile_limit_hits
    cause, _ = guards.cause_of_limit(hit, found.recompile_reasons)
    assert cause is not None
    assert cause.name == "modules that are added"
    assert "with a mask of those in use" in cause.advice
    mended, result = trained(Prompted(masks=True))
    assert (is_clean(mended), mended.graphs) == (True, 1)
    torch.testing.assert_close(result, expected)


def test_a_type_of_numbers_and_a_size_that_change_have_advice_where_nothing_is_known_of_the_batches() -> None:
    def told(*batches: Tensor, converts: bool = False) -> list[str]:
        net = Net()

        def forward(x: Tensor) -> Tensor:
            return net.layer(x.float())

        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="eager")
        with capture_diagnostics() as found:
            for batch in batches:
                compiled(batch.float() if converts else batch)
        return list(short_findings({**vars_of(found)}))

    x = torch.randn(4, 8)
    _, advice = told(x, x.double(), x.half())
    assert (
        advice
        == "  → the dtype of x changed: give it the same in every step, as by x.float() before the forward, under one autocast"
    )
    assert told(x, x.double(), x.half(), converts=True) == []
    _, advice = told(torch.randn(4, 8), torch.randn(5, 8), torch.randn(6, 8))
    assert "dynamic=auto makes one graph more, for all sizes but 0 and 1" in advice


def vars_of(found: Diagnostics) -> dict[str, list[str]]:
    return {"graph_break_reasons": found.graph_break_reasons, "recompile_reasons": found.recompile_reasons}


def with_scale_by_a_counter(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x) * SCALES[net.count]
    net.count += 1
    return y


def with_scale_by_a_buffer(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x) * torch.stack(SCALES)[net.steps.long()[None]]
    net.steps = net.steps + 1
    return y


SCALES = [torch.full((8,), float(number)) for number in range(12)]


@pytest.mark.slow
def test_a_list_that_a_counter_indexes_is_stacked_and_indexed_by_a_buffer() -> None:
    found = run(with_scale_by_a_counter)
    (hit,) = found.recompile_limit_hits
    assert "torch.stack(tables)[self.count.long()[None]]" in guards.advice_on_limit(hit, found.recompile_reasons)
    assert is_clean(run(with_scale_by_a_buffer))
    first, second = Net(), Net()
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(with_scale_by_a_buffer(second, x), with_scale_by_a_counter(first, x))


class Points(torch.Tensor):
    """A subclass that torch cannot take apart."""


@pytest.mark.slow
def test_a_subclass_of_tensors_that_ends_in_an_error_is_mended_by_its_plain_tensor() -> None:
    net = Net()
    torch._dynamo.reset()
    compiled = torch.compile(net.layer.forward, backend="aot_eager")
    x = torch.randn(4, 8)
    with pytest.raises(TypeError, match="Multiple dispatch failed") as raised:
        compiled(x.as_subclass(Points))
    for advice in (errors.advice_on_error, errors.advice_on_exception):
        assert "x.as_subclass(torch.Tensor)" in (advice(str(raised.value)) or "")
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(x.as_subclass(Points).as_subclass(torch.Tensor)), net.layer(x))
