"""Every cause of recompiles is recognized in a model that has it, and its advice fixes that model: run before and after."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from faulty_models import FEW, TORCH, Case, Net, is_clean, plain, run, run_mended, with_hook_added, with_mask, with_rows
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_recompiles
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.schema.causes.cause import Cause
from compile_sweep.schema.causes.guards import _NAMED, advice_on_limit, cause_of_guard, cause_of_series
from compile_sweep.schema.causes.recompiles import Recompile, fold_recompiles
from compile_sweep.schema.settings import CompileSettings

pytestmark = pytest.mark.slow


def with_list(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.history.append(y.detach().mean())
    return y


def with_buffer(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.steps.copy_(y.detach().mean())
    return y


def with_counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * (net.count / 100)


def with_counter_in_buffer(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    return net.layer(x) * (net.steps / 100)


def with_float(net: Net, x: Tensor) -> Tensor:
    net.temperature = max(0.5, net.temperature * 0.99)
    return net.layer(x) / net.temperature


def with_float_in_buffer(net: Net, x: Tensor) -> Tensor:
    net.heat = net.heat * 0.99
    return net.layer(x) / net.heat


def with_set(net: Net, x: Tensor) -> Tensor:
    net.seen.add(len(net.seen))
    return net.layer(x)


def with_dropout_schedule(net: Net, x: Tensor) -> Tensor:
    net.dropout.p = min(0.5, net.dropout.p + 0.01)
    return net.dropout(net.layer(x))


def with_dropout_of_tensors(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y * (torch.rand_like(y) >= net.heat) / (1 - net.heat)


def with_dropout_by_a_counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return nn.functional.dropout(net.layer(x), p=0.5 * min(1.0, net.count / 1000))


def with_dropout_by_a_counter_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    x, p = net.layer(x), 0.5 * (net.steps / 1000).clamp(max=1.0)
    return x * (torch.rand_like(x) >= p) / (1 - p)


def with_table_that_grows(self: Net, x: Tensor) -> Tensor:
    self.table = torch.cat([self.table, x.detach()[:1]])
    return self.layer(x) + self.table.sum()


def with_whole_table(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) + net.whole_table[:4].sum()


def with_made_at_first(net: Net, x: Tensor) -> Tensor:
    if net.last is None:
        net.last = torch.ones(8)
    return net.layer(x) * net.last


def with_flag(net: Net, x: Tensor) -> Tensor:
    net.flag = not net.flag
    return net.layer(x) * (2 if net.flag else 1)


def with_object(net: Net, x: Tensor) -> Tensor:
    net.activation = torch.relu if net.activation is torch.tanh else torch.tanh
    return net.activation(net.layer(x))


def with_value(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * x.sum().item()


def with_tensor(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * x.sum()


def with_attribute_made_there(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "positions"):
        net.positions = torch.arange(8.0)  # type: ignore[assignment]
    return net.layer(x) + net.positions


def with_identity(net: Net, x: Tensor) -> Tensor:
    net.last = id(x)
    return net.layer(x)


def with_list_of_values(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    counts = (x > 0).sum(1).tolist()
    return torch.stack([row * count for row, count in zip(y, counts, strict=True)])


def with_counts(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * (x > 0).sum(1, keepdim=True)


_steps = 0


def with_global_counter(net: Net, x: Tensor) -> Tensor:
    global _steps
    _steps += 1
    return net.layer(x) * _steps


_numbers = itertools.count(1)


def with_iterator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * next(_numbers)


def with_metric(net: Net, x: Tensor) -> Tensor:
    net._update_count += 1
    return net.layer(x)


def with_dropped_attribute(net: Net, x: Tensor) -> Tensor:
    net.rest.p = min(0.5, net.rest.p + 0.01)
    return net.rest(net.layer(x))


def with_momentum(net: Net, x: Tensor) -> Tensor:
    net.norm.momentum = 0.9 * (net.norm.momentum or 0.1)
    return net.norm(net.layer(x))


def with_momentum_left(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.layer(x))


GUARDS = [
    Case("value read from a tensor", with_list_of_values, with_counts),
    Case("global number", with_global_counter, with_counter_in_buffer),
    Case("made in the first forward", with_attribute_made_there, plain),
    Case("identity of an object", with_identity, plain),
    Case("list or dictionary that grows", with_list, with_buffer),
    Case("list or dictionary that grows", with_set, plain),
    Case("dropout that changes", with_dropout_schedule, with_dropout_of_tensors),
    Case("cache that grows", with_table_that_grows, with_whole_table),
    Case("made in the first forward", with_made_at_first, plain),
    Case("Python value that changes", with_flag, plain),
    Case("another object", with_object, plain),
    Case("module's counter", with_counter, with_counter_in_buffer),
    Case("module's counter", with_dropout_by_a_counter, with_dropout_by_a_counter_in_a_buffer),
    Case("hooks that are added", with_hook_added, plain),
    Case("value read from a tensor", with_value, with_tensor),
    Case("output of unknown size", with_rows, with_mask),
    Case("Python number that changes", with_float, with_float_in_buffer),
    Case("Python number that changes" if TORCH >= (2, 12) else "value read from a tensor", with_iterator, with_counter_in_buffer),
    Case("metric in the forward", with_metric, plain),
    Case("dropout that changes", with_dropped_attribute, with_dropout_of_tensors),
    Case("setting of a torch.nn module", with_momentum, with_momentum_left),
]


@pytest.mark.parametrize("case", GUARDS, ids=lambda case: case.cause)
def test_a_recompile_has_its_cause_and_the_advice_mends_it(case: Case) -> None:
    found = run(case.before, steps=FEW, dynamic=False)
    guards = [text.partition("): ")[2] for text in found.recompile_reasons]
    assert guards
    assert {cause.name for guard in guards if (cause := cause_of_guard(guard))} == {case.cause}, guards
    assert not run_mended(case.after, dynamic=False).recompile_reasons


def traced_as_inductor_does(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A back-end that makes Inductor's forward and backward graphs, which recompute values, and generates no code."""

    def run_graph(module: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    make = aot_autograd(
        fw_compiler=run_graph,
        bw_compiler=run_graph,
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        keep_inference_input_mutations=True,
    )
    return make(graph, inputs)


def heated_anew(net: Net, x: Tensor) -> Tensor:
    net.heat = net.heat * 0.5
    return net.layers[0](net.layer(x) * net.heat.sigmoid())


def counted_anew(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    return net.layers[0]((net.layer(x) * (net.steps / 10)).tanh())


def heated_after_the_backward(net: Net, x: Tensor) -> Tensor:
    return net.layers[0](net.layer(x) * net.heat.sigmoid())


def remembered(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.heat.copy_(y.detach().mean())
    return net.layers[0](y.tanh())


def heated_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.layers[0](net.layer(x) * net.heat.sigmoid())
    net.heat.mul_(0.5)
    return y


def gradients(forward: Callable[[Net, Tensor], Tensor], *, is_compiled: bool) -> tuple[list[Tensor], int]:
    """Trains for six steps; returns the gradients of each and the number of graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = type("Model", (Net,), {"forward": forward})()
    model = torch.compile(net, backend=traced_as_inductor_does) if is_compiled else net
    found = []
    with capture_diagnostics() as diagnostics:
        for _ in range(6):
            net.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            found.append(torch.cat([net.layer.weight.grad.flatten(), net.layers[0].weight.grad.flatten()]))
            if forward is heated_after_the_backward:
                net.heat.mul_(0.5)
    return found, diagnostics.graphs


@pytest.mark.parametrize("forward", [heated_anew, counted_anew, heated_after_the_backward, remembered])
def test_a_buffer_that_is_changed_as_advised_has_eagers_gradients_and_one_graph(forward: Any) -> None:
    eager, _ = gradients(forward, is_compiled=False)
    compiled, graphs = gradients(forward, is_compiled=True)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager)


def test_no_advice_is_to_change_in_place_what_the_forward_reads() -> None:
    if TORCH <= (2, 13):  # then the backward computes with the changed buffer, without an error
        pairs = zip(*(gradients(heated_in_place, is_compiled=is_compiled)[0] for is_compiled in (True, False)), strict=True)
        assert all((found - right).norm() > 0.01 * right.norm() for found, right in pairs)
    told = {name: _NAMED[name].advice for name in ("module's counter", "global number", "Python number that changes")}
    assert all("never change it in place in the forward that reads it" in advice for advice in told.values())
    assert not [cause.name for cause in _NAMED.values() if "updated in place" in cause.advice]


def given(net: Net, x: Tensor, step: Any) -> Tensor:
    return net.layer(x) * step


def picked(net: Net, x: Tensor, step: int) -> Tensor:
    return net.layer(x) * net.history[step]


def picked_by_a_tensor(net: Net, x: Tensor, step: Tensor) -> Tensor:
    return net.layer(x) * net.whole_table[step]


def runs_with(forward: Any, steps: Sequence[Any], *, dynamic: bool | None = None) -> Diagnostics:
    """Runs a compiled model with another second argument in each step."""
    torch._dynamo.reset()
    net: Any = type("Model", (Net,), {"forward": forward})()
    net.history = [torch.ones(8)] * 10
    compiled = torch.compile(net, backend="eager", dynamic=dynamic)
    with capture_diagnostics() as found:
        for step in steps:
            compiled(torch.randn(4, 8), step)
    return found


@pytest.mark.parametrize(
    ("before", "after", "dynamic"),
    [(given, given, False), (picked, picked_by_a_tensor, False), (picked, picked_by_a_tensor, None)],
)
def test_a_number_that_the_forward_is_given_is_mended_by_a_tensor(before: Any, after: Any, dynamic: bool | None) -> None:
    found = runs_with(before, range(1, 10), dynamic=dynamic)
    assert found.recompile_limit_hits
    series = fold_recompiles(found.recompile_reasons)
    assert {cause.name for one in series if (cause := cause_of_series(one))} == {"number that the forward is given"}
    assert not runs_with(after, [torch.tensor([step]) for step in range(1, 10)], dynamic=dynamic).recompile_reasons


def test_a_tensor_without_dimensions_is_read_to_index_with_it() -> None:
    found = runs_with(picked_by_a_tensor, [torch.tensor(step) for step in range(1, 10)])
    causes = {cause.name for one in found.recompile_reasons if (cause := cause_of(one))}
    assert causes == (set() if TORCH >= (2, 14) else {"value read from a tensor"})  # torch 2.14 indexes within the graph


def test_a_number_that_the_forward_is_given_is_not_made_there_and_may_vary() -> None:
    found = runs_with(given, range(10))
    (series,) = fold_recompiles(found.recompile_reasons)
    assert (cause := cause_of_series(series))
    assert (cause.name, "as a number that varies" in cause.advice, found.graphs) == ("first value of a number", True, 2)


def with_options(net: Net, x: Tensor, options: dict[str, int]) -> Tensor:
    return net.layer(x) * sum(options.values())


def test_keys_that_change_are_batches_of_several_kinds() -> None:
    found = runs_with(with_options, [{f"step {step}": 1} for step in range(9)])
    assert {cause.name for one in found.recompile_reasons if (cause := cause_of(one))} == {"batches of several kinds"}
    assert not runs_with(with_options, [{"step": 1}] * 9).recompile_reasons


def alternating(net: Net, x: Tensor, step: int) -> Tensor:
    return net.layer(x) * (2 if step % 2 else 1)


def test_a_condition_of_a_number_is_a_limit_that_it_crosses() -> None:
    found = runs_with(alternating, range(2, 10))
    assert [cause.name for one in found.recompile_reasons if (cause := cause_of(one))][-1] == "number that crosses a limit"


@pytest.mark.parametrize("lengths", [9, 64])
def test_a_counter_is_no_cache_whatever_the_lengths_of_the_batches(lengths: int) -> None:
    (series,) = fold_recompiles(run(with_counter, dynamic=False).recompile_reasons)
    settings = CompileSettings.parse("scope=full,dynamic=mark,pad_multiple=1")
    said = explain_recompiles(series, KnownSizes(settings=settings, max_length=lengths, batch_size=4))
    assert "self.register_buffer('count'" in said
    assert "self.count = self.count + 1" in said


def with_gradient_looked_at(net: Net, x: Tensor) -> Tensor:
    gradient = net.layer.weight.grad
    return net.layer(x) if gradient is None else net.layer(x) * gradient.norm()


def test_a_gradient_read_in_the_forward_is_a_cause_and_without_it_there_is_one_graph() -> None:
    counts = []
    for forward in (with_gradient_looked_at, plain):
        torch._dynamo.reset()
        net: Any = type("Model", (Net,), {"forward": forward})()
        compiled = torch.compile(net, backend="eager")
        with capture_diagnostics() as found:
            for _ in range(3):
                compiled(torch.randn(4, 8)).sum().backward()
        names = {cause.name for one in found.recompile_reasons if (cause := cause_of(one))}
        counts.append((found.graphs, names))
    assert counts == [(2, {"gradient read in the forward"}), (1, set())]


@contextlib.contextmanager
def in_turn_training(net: Net, number: int) -> Iterator[None]:
    net.train(number % 2 == 0)
    yield


def in_turn_without_gradients(net: Net, number: int) -> Any:
    return torch.set_grad_enabled(number % 2 == 0)


def in_turn_autocast(net: Net, number: int) -> Any:
    return torch.autocast("cpu", enabled=number % 2 == 0)


@contextlib.contextmanager
def in_turn_frozen(net: Net, number: int) -> Iterator[None]:
    net.layer.weight.requires_grad_(number % 2 == 0)
    yield


@contextlib.contextmanager
def in_turn_deterministic(net: Net, number: int) -> Iterator[None]:
    torch.use_deterministic_algorithms(number % 2 == 0)
    yield
    torch.use_deterministic_algorithms(False)


def dropped(net: Net, x: Tensor) -> Tensor:
    return nn.functional.dropout(net.layer(x), 0.1, net.training)


@pytest.mark.parametrize(
    ("cause", "around"),
    [
        ("train and eval mode", in_turn_training),
        ("gradients switched on and off", in_turn_without_gradients),
        ("autocast switched on and off", in_turn_autocast),
        ("frozen and trained parameters", in_turn_frozen),
        ("global setting of torch", in_turn_deterministic),
    ],
)
def test_what_changes_around_the_model_has_its_cause_and_two_graphs(cause: str, around: Callable[[Net, int], Any]) -> None:
    found = run(dropped, around=around)
    guards = [text.partition("): ")[2] for text in found.recompile_reasons]
    assert [one.name for guard in guards if (one := cause_of_guard(guard))] == [cause], guards
    assert found.graphs == 2
    assert is_clean(run(dropped))


@contextlib.contextmanager
def deeper(net: Net, number: int) -> Iterator[None]:
    net.layers.append(nn.Linear(8, 8))
    yield


def with_all_layers(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def test_modules_that_are_added_are_a_cause_and_those_made_before_are_not() -> None:
    found = run(with_all_layers, around=deeper)
    assert {cause.name for one in found.recompile_reasons if (cause := cause_of(one))} == {"modules that are added"}
    assert is_clean(run(with_all_layers))


def cause_of(recompile: str) -> Cause | None:
    return cause_of_guard(Recompile.parse(recompile).guard)


def with_warm_up(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * (2 if net.count > 5 else 1)


def test_a_counter_may_vary_and_what_is_left_is_the_limit_that_it_crosses() -> None:
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        found = run(with_warm_up)
        assert is_clean(run(with_counter))
    assert found.graphs == 3
    causes = [cause_of_series(series) for series in fold_recompiles(found.recompile_reasons)]
    assert [cause.name for cause in causes if cause] == ["first value of a number", "number that crosses a limit"]


def with_queue(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.whole_table[net.count : net.count + 4] = y.detach()
    net.count += 4
    return y


def test_a_counter_that_begins_a_slice_may_vary() -> None:
    assert run(with_queue).recompile_limit_hits
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert is_clean(run(with_queue))


def with_positions(self: Net, x: Tensor) -> Tensor:
    if len(x) > self.count:
        self.count = len(x)
        self.table = torch.arange(len(x)).float()[:, None]
    return self.layer(x) + self.table[: len(x)]


def test_a_number_that_follows_the_sizes_of_the_batches_is_a_cache_that_grows_and_no_counter() -> None:
    net = type("Model", (Net,), {"forward": with_positions})()
    compiled = torch.compile(net, backend="eager", dynamic=True)
    with capture_diagnostics() as found:
        for rows in (4, 6, 9, 5, 14, 30):
            compiled(torch.randn(rows, 8))
    (series,) = (one for one in fold_recompiles(found.recompile_reasons) if one.first.source == "self.count")
    assert (cause := cause_of_series(series))
    assert cause.name == "cache that grows"
    hit = f"{series.first.function} hit recompile_limit 5: self.count == 14"
    assert "build it once in __init__" in advice_on_limit(hit, found.recompile_reasons)


def with_tuple(net: Net, x: Tensor) -> Tensor:
    net.last = (*(net.last or ()), 1)
    return net.layer(x)


def test_what_held_nothing_at_first_and_then_grows_is_told_by_what_it_holds_later() -> None:
    (series,) = fold_recompiles(run(with_tuple).recompile_reasons)
    assert (series.first.guard, series.count) == ("net.last is None", 8)
    assert (cause := cause_of_series(series))
    assert cause.name == "list or dictionary that grows"


def with_dictionary_filled_once(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.features["layer"] = y  # type: ignore[operator, assignment]
    return y


@contextlib.contextmanager
def with_features(net: Net, number: int) -> Iterator[None]:
    if number == 0:
        net.features = {}  # type: ignore[assignment]
    yield


def with_table_of_a_size(net: Net, x: Tensor) -> Tensor:
    if len(x) not in net.features:  # type: ignore[operator]
        net.features[len(x)] = torch.arange(8.0)  # type: ignore[operator, assignment]
    return net.layer(x) + net.features[len(x)]  # type: ignore[index]


@pytest.mark.parametrize("forward", [with_dictionary_filled_once, with_table_of_a_size])
def test_a_dictionary_that_only_the_first_forward_fills_does_not_grow(forward: Any) -> None:
    (series,) = fold_recompiles(run(forward, around=with_features).recompile_reasons)
    assert (cause := cause_of_series(series))
    assert cause.name == "made in the first forward"


def with_initialization_from_data(net: Net, x: Tensor) -> Tensor:
    if net.flag:
        net.heat.copy_(x.std())
        net.flag = False
    return net.layer(x / net.heat)


def test_a_flag_that_the_first_forward_clears_takes_no_graph_after_one_forward() -> None:
    def run_first(net: Net, number: int) -> contextlib.nullcontext[None]:
        if number == 0:
            net(torch.randn(4, 8))
        return contextlib.nullcontext()

    (series,) = fold_recompiles(run(with_initialization_from_data).recompile_reasons)
    assert "run one forward before compiling" in (cause_of_series(series) or _NAMED["another object"]).advice
    assert run(with_initialization_from_data, around=run_first).graphs == 1


def with_duration(net: Net, x: Tensor) -> Tensor:
    began = time.perf_counter()
    y = net.layer(x)
    net.last = time.perf_counter() - began
    return y


def with_mix(net: Net, x: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return net.layer(share * x + (1 - share) * x.flip(0))


def with_choice(net: Net, x: Tensor) -> Tensor:
    act = random.choice([torch.tanh, torch.relu])
    return act(net.layer(x))


def with_rows_skipped(net: Net, x: Tensor) -> Tensor:
    return torch.stack([net.layer(row) if row[0] > 0 else row for row in x])


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        (with_rows_skipped, "data-dependent branch"),
        (with_duration, "file, clock or system call"),
        (with_mix, "Python's or numpy's random numbers"),
        (with_choice, "Python's or numpy's random numbers"),
    ],
)
def test_what_a_break_returned_has_the_cause_of_the_break(forward: Any, cause: str) -> None:
    random.seed(0)
    found = run(forward, dynamic=False)
    told = [cause_of_series(one, found.graph_break_reasons) for one in fold_recompiles(found.recompile_reasons)]
    assert {one.name for one in told if one} == {cause}, found.recompile_reasons
    for hit in found.recompile_limit_hits:
        advice = advice_on_limit(hit, found.recompile_reasons, found.graph_break_reasons)
        assert "tensor" not in advice or "draw with torch" in advice
