"""Causes of recompiles in how compiled code is called: arguments, layout in memory, frozen layers, breaks, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faulty_models import TORCH, Net, is_clean, plain, run
from test_recompile_causes import cause_of, dropped
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_recompiles
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.coverage import Expectation, steps_of
from compile_sweep.schema.causes.breaks import NOTHING_TO_DO, advice_on_break
from compile_sweep.schema.causes.guards import _NAMED, advice_on_limit, cause_of_guard, cause_of_series
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.settings import CompileSettings

pytestmark = pytest.mark.slow


def passed_on(*args: Tensor, **kwargs: Tensor) -> Tensor:
    return torch.mul(*args, **kwargs)


def test_code_that_is_called_in_different_ways_has_its_cause_and_one_graph_for_each_way() -> None:
    compiled, x = torch.compile(passed_on, backend="eager"), torch.ones(4)
    with capture_diagnostics() as found:
        compiled(input=x, other=x)
        compiled(x, other=x)
        compiled(x, x)
    series = fold_recompiles(found.recompile_reasons)
    assert {one.name for each in series if (one := cause_of_series(each))} == {"arguments of different calls"}
    assert found.graphs == 3


def test_a_transposed_tensor_is_laid_out_differently_and_a_contiguous_one_takes_no_graph_more() -> None:
    told = []
    for other in (torch.ones(4, 3).T, torch.ones(4, 3).T.contiguous()):
        torch._dynamo.reset()
        compiled = torch.compile(torch.sin, backend="eager")
        with capture_diagnostics() as found:
            compiled(torch.ones(3, 4))
            compiled(other)
        told.append((found.graphs, {one.name for text in found.recompile_reasons if (one := cause_of(text))}))
    assert told == [(2, {"layout in memory"}), (1, set())]


def test_a_column_of_batches_of_several_widths_is_laid_out_differently_and_its_copies_take_one_graph() -> None:
    """As the first tokens of texts do, after which a decoder is given tokens that it has chosen."""
    told = []
    for laid_out in (Tensor.detach, Tensor.contiguous):
        torch._dynamo.reset()
        compiled = torch.compile(torch.sin, backend="eager")
        with capture_diagnostics() as found:
            for tokens in (torch.ones(16, 9)[:, 0], torch.ones(16, 8)[:, 0], torch.ones(16)):
                compiled(laid_out(tokens))
        told.append((found.graphs, {one.name for text in found.recompile_reasons if (one := cause_of(text))}))
    assert told == [(3, {"layout in memory"}), (1, set())]


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x)).tanh()


def with_lengths(view: Callable[[Tensor], Tensor]) -> Diagnostics:
    """Runs blocks that share their code at several lengths; the first one gets what this makes of a view."""
    torch._dynamo.reset()
    project, blocks = nn.Linear(8, 8), [Normalized(), Normalized()]
    with capture_diagnostics() as found:
        for block in blocks:
            block.compile(backend="eager")
        for length in (5, 6, 7, 9):
            x = view(project(torch.randn(3 * length, 8)).view(3, length, 8))
            for block in blocks:
                x = block(x)
    return found


def test_a_view_takes_a_graph_of_its_own_where_lengths_change_and_its_copy_does_not() -> None:
    found = with_lengths(lambda x: x)
    assert "view of another tensor" in {one.name for text in found.recompile_reasons if (one := cause_of(text))}
    hit = "forward (net.py:3) hit recompile_limit 8: 'NoneType' object has no attribute 'size'"
    reasons = [f"forward (net.py:3): {text.partition(': ')[2]}" for text in found.recompile_reasons]
    assert "one graph for all lengths" in advice_on_limit(hit, reasons), "the view took one graph, and lengths the others"
    copied = with_lengths(Tensor.clone)
    assert "view of another tensor" not in {one.name for text in copied.recompile_reasons if (one := cause_of(text))}
    assert copied.graphs == found.graphs - 1


def with_bias_if_given(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.sin() if bias is None else x.sin() + bias


def test_an_argument_that_only_some_calls_give_is_not_made_in_the_first_forward() -> None:
    compiled, x = torch.compile(with_bias_if_given, backend="eager"), torch.ones(4)
    with capture_diagnostics() as found:
        compiled(x)
        compiled(x, x)
    assert [one.name for text in found.recompile_reasons if (one := cause_of(text))] == ["argument of changing type"]


@contextlib.contextmanager
def frozen_at_first(net: Net, number: int) -> Iterator[None]:
    net.layer.weight.requires_grad_(number >= 3)
    yield


def test_layers_that_are_unfrozen_late_take_one_graph_more() -> None:
    found = run(dropped, around=frozen_at_first)
    guards = [text.partition("): ")[2] for text in found.recompile_reasons]
    assert [one.name for guard in guards if (one := cause_of_guard(guard))] == ["frozen and trained parameters"], guards
    assert is_clean(found)


@torch.compiler.disable
def plus_one(x: Tensor) -> Tensor:
    return x + 1


def broken_by_a_call(x: Tensor) -> Tensor:
    return plus_one(x * 2) * 3


def broken_between_lines(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y * 3


@pytest.mark.parametrize("function", [broken_by_a_call, broken_between_lines])
def test_a_length_behind_a_graph_break_is_not_marked_and_the_break_is_what_to_fix(function: Callable[[Tensor], Tensor]) -> None:
    compiled = torch.compile(function, backend="eager")
    with capture_diagnostics() as found:
        for length in (4, 7, 9):
            torch._dynamo.mark_dynamic(x := torch.randn(3, length), 1)
            compiled(x)
    (series,) = fold_recompiles(found.recompile_reasons)
    settings = CompileSettings.parse("scope=full,dynamic=mark,pad_multiple=1")
    said = explain_recompiles(series, KnownSizes(settings=settings, max_length=9, batch_size=3), found.graph_break_reasons)
    assert said.endswith("fix the break at this line")


def test_blocks_of_different_kinds_take_a_graph_each_and_are_named() -> None:
    kinds = (nn.Tanh, nn.GELU, nn.ReLU)
    blocks = [nn.Sequential(nn.Linear(8, 8), kind()) for kind in kinds for _ in range(2)]
    x = torch.randn(4, 8, requires_grad=True)
    with capture_diagnostics() as found:
        for block in blocks:
            torch.compile(block, backend="eager")(x)
    assert found.graphs == len(kinds)
    assert {text.partition(" (")[0] for text in found.recompile_reasons} == {"module of torch.nn"}
    assert {one.name for text in found.recompile_reasons if (one := cause_of(text))} == {"blocks of different kinds"}


def with_moving_average(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    with torch.no_grad():
        net.heat.lerp_(y.detach().mean(), 0.1)
    return y * net.heat


def test_a_buffer_moved_by_an_average_in_the_forward_is_one_graph() -> None:
    found = run(with_moving_average)
    assert is_clean(found)
    assert not found.recompile_reasons


def trained_with(rate: Any) -> Diagnostics:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, foreach=True)
    step = torch.compile(optimizer.step, backend="eager")
    with capture_diagnostics() as found:
        for _ in range(10):
            layer(torch.randn(2, 4)).sum().backward()
            if isinstance(rate, Tensor):
                optimizer.param_groups[0]["lr"].mul_(0.9)
            else:
                optimizer.param_groups[0]["lr"] *= 0.9
            step()
    return found


def test_a_learning_rate_that_changes_is_mended_by_a_tensor() -> None:
    guards = [text.partition("): ")[2] for text in trained_with(0.1).recompile_reasons]
    assert "learning rate" in {cause.name for guard in guards if (cause := cause_of_guard(guard))}, guards
    assert not trained_with(torch.tensor(0.1)).recompile_reasons


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the compiled step is not the one that is counted
def test_a_momentum_that_a_schedule_changes_is_mended_by_a_schedule_that_keeps_it() -> None:
    def trained(**options: Any) -> set[str]:
        torch._dynamo.reset()
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(0.1), momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, **options)
        step = torch.compile(optimizer.step, backend="eager", dynamic=False)
        with capture_diagnostics() as found:
            for _ in range(4):
                layer(torch.randn(2, 4)).sum().backward()
                step()
                schedule.step()
        return {cause.name for text in found.recompile_reasons if (cause := cause_of(text))}

    assert trained() - trained(cycle_momentum=False) == {"number of an optimizer"}
    assert not {"learning rate", "number of an optimizer"} & trained(cycle_momentum=False)


def with_rows_of_two_kinds(net: Net, x: Tensor) -> Tensor:
    high = (x[:, 0] > 0).nonzero().squeeze(1)
    low = (x[:, 0] <= 0).nonzero().squeeze(1)
    y: Tensor = x.index_add(0, high, net.layer(x[high])).index_add(0, low, net.layers[0](x[low]))
    return y


def test_rows_that_were_picked_before_an_earlier_break_depend_on_the_data_and_are_no_input() -> None:
    found = run(with_rows_of_two_kinds, dynamic=False)
    series = [one for one in fold_recompiles(found.recompile_reasons) if one.first.source == "high"]
    assert series, found.recompile_reasons
    causes = [cause_of_series(one, found.graph_break_reasons) for one in series]
    assert {cause.name for cause in causes if cause} == {"output of unknown size"}, causes


def with_values_and_a_break(net: Net, x: Tensor) -> Tensor:
    values = torch.unique_consecutive(x[:, 0] > 0)
    net.last = x[0, 0].item()
    return net.layer(x) + values.sum() / values.shape[0]


def test_values_that_were_picked_before_an_earlier_break_depend_on_the_data_too() -> None:
    found = run(with_values_and_a_break, dynamic=False)
    series = [one for one in fold_recompiles(found.recompile_reasons) if one.first.source == "values"]
    assert series, found.recompile_reasons
    causes = [cause_of_series(one, found.graph_break_reasons) for one in series]
    assert {cause.name for cause in causes if cause} == {"output of unknown size"}, causes


class Warming(torch.optim.SGD):
    """An optimizer with a schedule of its own, whose step calls that of torch."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        rate = min(1.0, self.count / 1000)
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return super().step(closure)


class Renamed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def stepped(optimizer_class: type[torch.optim.SGD], rate: float | Tensor) -> Diagnostics:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    optimizer = optimizer_class(layer.parameters(), lr=rate, foreach=True)
    expected = Expectation(what="", targets={"the optimizer's step": steps_of(optimizer)}, cudagraphs=False)
    step = torch.compile(optimizer.step, backend="eager")
    with capture_diagnostics(expected) as found:
        for _ in range(4):
            layer(torch.randn(2, 4)).sum().backward()
            step()
    return found


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 does not compile a step that sets an attribute of its optimizer")
def test_a_step_that_calls_the_one_it_overrides_is_compiled_and_its_learning_rate_is_mended_by_filling_a_tensor() -> None:
    found = stepped(Warming, 1e-3)
    assert "learning rate" in {cause.name for text in found.recompile_reasons if (cause := cause_of(text))}
    mended = stepped(Warming, torch.tensor(1e-3))
    assert mended.fallbacks == []
    assert "learning rate" not in {cause.name for text in mended.recompile_reasons if (cause := cause_of(text))}


def test_the_break_that_torch_makes_in_an_optimizer_is_not_told_as_one_of_the_line_that_calls_it() -> None:
    found = stepped(Renamed, torch.tensor(1e-3))
    assert any("return super().step(closure)" in text for text in found.graph_break_reasons)
    assert {advice_on_break(text) for text in found.graph_break_reasons} <= {*NOTHING_TO_DO}


def with_a_table_by_address(net: Net, x: Tensor) -> Tensor:
    at = x.data_ptr()
    if at not in net.tables:
        net.tables.clear()
        net.tables[at] = x.detach().mean(0)
    return net.layer(x) + net.tables[at]


def with_the_last_address(net: Net, x: Tensor) -> Tensor:
    if net.last != x.data_ptr():
        net.last = x.data_ptr()
    return net.layer(x)


@pytest.mark.parametrize("forward", [with_a_table_by_address, with_the_last_address])
def test_addresses_of_tensors_are_no_list_that_grows_and_no_number_to_hand_in(forward: Any) -> None:
    torch._dynamo.reset()
    net = type("Model", (Net,), {"forward": forward, "tables": {}})()
    kept = [torch.ones(4, 8) for _ in range(10)]  # so that no address is used again
    compiled = torch.compile(net, backend="eager")
    with capture_diagnostics() as found:
        for x in kept:
            compiled(x)
    of_addresses = fold_recompiles(found.recompile_reasons)[-1]
    assert cause_of_series(of_addresses, found.graph_break_reasons) is _NAMED["identity of an object"]
    (hit, *_) = found.recompile_limit_hits
    advice = advice_on_limit(hit, found.recompile_reasons, found.graph_break_reasons)
    assert "do not use id() or data_ptr() in the forward, also not as a key" in advice
    assert is_clean(run(plain, steps=4))


def test_keys_that_a_dictionary_lacks_are_told_in_one_line() -> None:
    lacked = [f"forward (net.py:3): KeyError on self.masks[{length}] # x # net.py:5 in forward" for length in (16, 24, 40)]
    (series,) = fold_recompiles(lacked)
    assert series.text == "forward (net.py:3): KeyError on self.masks[16], then 24, 40 (3 times) # x # net.py:5 in forward"
    assert cause_of_series(series) is _NAMED["list or dictionary that grows"]


def with_teacher(net: Net, x: Tensor) -> Tensor:
    if net.last is None:
        net.last = nn.Linear(8, 8)
    y: Tensor = net.layer(x) + net.last(x)
    return y


def test_a_module_that_the_first_forward_makes_is_no_dictionary_that_grows() -> None:
    found = run(with_teacher, steps=4)
    assert "made in the first forward" in [
        cause and cause.name for one in fold_recompiles(found.recompile_reasons) if (cause := cause_of_series(one))
    ]
    (series,) = fold_recompiles(["forward (net.py:3): KeyError on self.teacher # self.teacher(x) # net.py:5 in forward"])
    assert cause_of_series(series) is _NAMED["made in the first forward"]
    twice = fold_recompiles(["forward (net.py:3): KeyError on self.scales['a'] # x # net.py:5 in forward"] * 2)[0]
    assert cause_of_series(twice) is _NAMED["list or dictionary that grows"]


def with_loop_over_rows(net: Net, x: Tensor) -> Tensor:
    state = x[0]
    for row in x[1:]:
        state = torch.tanh(net.layers[0](row) + state)
    return state


def test_a_length_that_a_loop_fixes_takes_a_graph_each_and_what_the_loop_calls_takes_one() -> None:
    def found_with(of: Callable[[nn.Module], nn.Module]) -> Diagnostics:
        torch._dynamo.reset()
        net = type("Model", (Net,), {"forward": with_loop_over_rows})()
        compiled = torch.compile(of(net), backend="eager")
        with capture_diagnostics() as found:
            for rows in (9, 4, 6, 8, 5):
                compiled(torch.randn(rows, 8)) if compiled._orig_mod is net else with_loop_over_rows(net, torch.randn(rows, 8))
        return found

    whole = found_with(lambda net: net)
    (series,) = fold_recompiles(whole.recompile_reasons)
    lengths = KnownSizes(settings=CompileSettings.parse("scope=full,dynamic=auto,pad_multiple=1"), max_length=9, batch_size=1)
    said = explain_recompiles(series, lengths)
    assert "each length takes a graph although dynamic=auto lets lengths vary" in said
    assert "compile what the loop calls apart" in said
    assert "dynamic=mark does so" not in said
    assert "often in a Python loop over positions" in advice_on_limit(f"forward (model.py:3) hit {series.first.guard}")
    assert found_with(lambda net: net.layers[0]).graphs <= 1 < whole.graphs


def test_frames_that_come_out_of_a_recurrent_layer_are_a_length_and_no_rows_that_depend_on_the_data() -> None:
    net = type("Model", (Net,), {"forward": lambda net, x: net.layer(net.rnn(x)[0])})()
    net.rnn = nn.GRU(8, 8)
    step = torch.compile(lambda x: net(x)[-1].square().sum(), backend="eager")
    with capture_diagnostics() as found:
        for frames in (9, 4, 6):
            step(torch.randn(frames, 2, 8))
    causes = [cause_of_series(one, found.graph_break_reasons) for one in fold_recompiles(found.recompile_reasons)]
    assert "length after a graph break" in [cause and cause.name for cause in causes]
    assert "output of unknown size" not in [cause and cause.name for cause in causes]
