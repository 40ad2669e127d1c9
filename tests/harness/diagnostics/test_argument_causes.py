"""Causes of recompiles in what a forward is given: dictionaries, lists and numbers, and the names they are called by."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_models import Net, is_clean, run
from test_recompile_causes import runs_with
from torch import Tensor

from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.schema.causes.breaks import advice_on_break, cause_of_break
from compile_sweep.schema.causes.guards import cause_of_limit, cause_of_series, named_advice
from compile_sweep.schema.causes.recompiles import fold_recompiles

pytestmark = pytest.mark.slow

_NAMES = ("image", "text", "audio", "depth")


def causes_of(found: Diagnostics) -> set[str]:
    series = fold_recompiles(found.recompile_reasons)
    reasons = (found.graph_break_reasons, found.recompile_reasons)
    return {cause.name for one in series if (cause := cause_of_series(one, *reasons))}


def summed(net: Net, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return net.layer(sum(inputs.values(), x))


def shuffled(step: int) -> dict[str, Tensor]:
    names = random.Random(step).sample(_NAMES, k=len(_NAMES))
    return {name: torch.ones(4, 8) for name in names}


def test_keys_in_another_order_are_batches_of_several_kinds_and_sorted_ones_take_one_graph() -> None:
    given = [shuffled(step) for step in range(10)]
    found = runs_with(summed, given)
    assert found.recompile_limit_hits
    assert causes_of(found) == {"batches of several kinds"}
    assert is_clean(runs_with(summed, [{name: batch[name] for name in sorted(batch)} for batch in given]))


def masked(net: Net, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return net.layer(x) * inputs["mask"] if "mask" in inputs else net.layer(x)


@pytest.mark.parametrize("kinds", [("mask", "none"), ("none", "mask")])
def test_a_tensor_that_some_batches_lack_is_told_and_ones_in_its_place_take_one_graph(kinds: tuple[str, str]) -> None:
    given = {"mask": {"mask": torch.ones(4, 1)}, "none": {}}
    found = runs_with(masked, [given[kind] for kind in kinds])
    assert (causes_of(found), found.graphs) == ({"batches of several kinds"}, 2)
    assert runs_with(masked, [given["mask"]] * 2).graphs == 1


def _called(net: Net, x: Tensor, **kwargs: Tensor) -> Tensor:
    return net.layer(x) * kwargs["mask"] if "mask" in kwargs else net.layer(x)


def averaged(net: Net, x: Tensor, crops: list[Tensor]) -> Tensor:
    return torch.stack([net.layer(crop).mean() for crop in crops]).mean()


def averaged_at_once(net: Net, x: Tensor, crops: Tensor) -> Tensor:
    return net.layer(crops.flatten(0, 1)).mean()


def test_a_list_of_another_length_is_told_and_a_stack_of_its_tensors_takes_two_graphs() -> None:
    given = [[torch.ones(4, 8)] * count for count in range(2, 12)]
    found = runs_with(averaged, given)
    assert causes_of(found) == {"list of another length"}
    (hit,) = found.recompile_limit_hits
    cause, _ = cause_of_limit(hit, found.recompile_reasons)
    assert cause is not None
    assert "torch.stack(crops)" in cause.advice
    assert is_clean(runs_with(averaged_at_once, [torch.stack(crops) for crops in given]))


def dropped(net: Net, x: Tensor, p: float) -> Tensor:
    return torch.nn.functional.dropout(net.layer(x), p)


def dropped_by_tensors(net: Net, x: Tensor, p: Tensor) -> Tensor:
    y = net.layer(x)
    return y * (torch.rand_like(y) >= p) / (1 - p)


def spaced(net: Net, x: Tensor, n: int) -> Tensor:
    return net.layer(x) * torch.linspace(0, 1, n).mean()


def spaced_by_a_range(net: Net, x: Tensor, n: int) -> Tensor:
    return net.layer(x) * (torch.arange(n) / (n - 1)).mean()


def cut(net: Net, x: Tensor, share: float) -> Tensor:
    n = int((1 - share) * 8)
    return net.layer(torch.nn.functional.pad(x[:, :n], (0, 8 - n)))


def cut_at(net: Net, x: Tensor, n: int) -> Tensor:
    return net.layer(torch.nn.functional.pad(x[:, :n], (0, 8 - n)))


_RATES = [0.3 + step / 20 for step in range(10)]


@pytest.mark.parametrize(
    ("before", "given", "after", "changed", "words"),
    [
        (dropped, _RATES, dropped_by_tensors, torch.tensor, "(torch.rand_like(x) >= p) / (1 - p)"),
        (spaced, range(3, 13), spaced_by_a_range, int, "torch.arange(n) / (n - 1)"),
    ],
)
def test_a_number_that_fixes_an_operator_is_told_what_it_is_made_and_that_leaves_it_free(
    before: Any, given: Any, after: Any, changed: Callable[[Any], Any], words: str
) -> None:
    found = runs_with(before, given)
    (hit,) = found.recompile_limit_hits
    cause, series = cause_of_limit(hit, found.recompile_reasons)
    assert cause is not None
    assert (cause.name, words in named_advice(cause, series)) == ("number that the forward is given", True)
    assert is_clean(runs_with(after, [changed(value) for value in given]))


def test_a_size_that_follows_from_a_share_is_computed_outside() -> None:
    told = []
    for forward, given in ((cut, _RATES), (cut_at, [int((1 - share) * 8) for share in _RATES])):
        torch._dynamo.reset()
        compiled, net = torch.compile(forward, backend="aot_eager"), Net()
        with capture_diagnostics() as found:
            for value in given:
                compiled(net, torch.randn(4, 8), value)
        told.append([cause_of_limit(hit, found.recompile_reasons) for hit in found.recompile_limit_hits])
    (((cause, series),), mended) = told
    assert cause is not None
    assert (cause.name, "n = int(share * length)" in named_advice(cause, series)) == ("number that the forward is given", True)
    assert mended == []


def labeled(net: Net, x: Tensor, step: int) -> Tensor:
    net.last = f"step {step}"
    return net.layer(x)


def labeled_unless_compiling(net: Net, x: Tensor, step: int) -> Tensor:
    if not torch.compiler.is_compiling():
        net.last = f"step {step}"
    return net.layer(x)


def named_by_its_step(net: Net, x: Tensor, step: int) -> Tensor:
    net.last = "step " + str(step)
    return net.layer(x)


@pytest.mark.parametrize("forward", [labeled, named_by_its_step])
def test_a_text_of_a_number_is_told_as_such_although_nothing_is_printed(forward: Any) -> None:
    found = runs_with(forward, range(10))
    (told,) = found.graph_break_reasons
    assert (cause := cause_of_break(told))
    assert cause.name == "text of a number"
    assert is_clean(runs_with(labeled_unless_compiling, range(10)))


def with_recent_values(net: Net, x: Tensor) -> Tensor:
    net.last.append(net.layer(x).abs().mean().item())
    return net.layer(x) / sum(net.last)


def with_recent_tensors(net: Net, x: Tensor) -> Tensor:
    net.queue = torch.cat([net.queue[1:], net.layer(x).detach().abs().mean(0, keepdim=True)])
    return net.layer(x) / net.queue.mean()


def _begin(net: Net, number: int) -> contextlib.nullcontext[None]:
    if number == 0:
        net.last = deque(maxlen=3)
    return contextlib.nullcontext()


def test_a_method_that_is_looked_up_before_a_value_is_read_has_the_cause_of_that_value() -> None:
    found = run(with_recent_values, around=_begin)
    causes = [cause_of_limit(hit, found.recompile_reasons, found.graph_break_reasons)[0] for hit in found.recompile_limit_hits]
    assert {cause.name for cause in causes if cause} == {"value read from a tensor"}
    assert is_clean(run(with_recent_tensors))


def _schedule() -> Callable[[], float]:
    step = 0

    def scale() -> float:
        nonlocal step
        step += 1
        return step / 100

    return scale


def with_a_variable_of_a_closure(net: Net, x: Tensor) -> Tensor:
    scaled: float = net.last()
    return net.layer(x) * scaled


def _begin_a_schedule(net: Net, number: int) -> contextlib.nullcontext[None]:
    if number == 0:
        net.last = _schedule()
    return contextlib.nullcontext()


def test_a_variable_of_a_closure_is_not_called_by_torchs_name_for_its_cell() -> None:
    found = run(with_a_variable_of_a_closure, around=_begin_a_schedule)
    (series,) = fold_recompiles(found.recompile_reasons)
    cause = cause_of_series(series)
    assert cause is not None
    assert "cell_contents" in series.first.source
    assert "cell_contents" not in named_advice(cause, series)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert is_clean(run(with_a_variable_of_a_closure, around=_begin_a_schedule))


def test_keywords_that_some_calls_lack_are_told_as_calls_that_differ() -> None:
    torch._dynamo.reset()
    compiled, net, x = torch.compile(_called, backend="eager"), Net(), torch.ones(4, 8)
    with capture_diagnostics() as found:
        compiled(net, x, mask=torch.ones(4, 1))
        compiled(net, x)
    assert causes_of(found) == {"arguments of different calls"}


def test_an_assert_is_told_of_its_text_and_an_if_of_both_sides() -> None:
    headline = "net.py:3 in forward: Data-dependent branching"
    told = {word: advice_on_break(f"{headline}\n  code: {word} x.sum() > 0") or "" for word in ("assert", "if", "y =")}
    assert told["assert"].startswith("a check stays in the graph as an assert with a fixed text")
    assert told["if"] == told["y ="]
    assert told["if"].startswith("compute both sides")
