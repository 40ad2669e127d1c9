"""Python numbers that change: what torch lets vary, what it fixes, and what helps, run before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from faulty_models import TORCH, Net
from torch import Tensor

from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_recompiles
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.schema.causes import guards
from compile_sweep.schema.causes.recompiles import Recompile, fold_recompiles
from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.settings import CompileSettings

pytestmark = pytest.mark.slow  # for `make quick`


def run(forward: Any, *further: Sequence[Any], steps: int = 12, **config: Any) -> Diagnostics:
    """Trains a compiled model, with one of `further` as a further argument in each step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = type("Model", (Net,), {"forward": forward})()
    compiled = torch.compile(net, backend="aot_eager")
    with torch._dynamo.config.patch(**config), capture_diagnostics() as found:
        for number in range(steps):
            compiled(torch.randn(4, 8), *(one[number] for one in further)).sum().backward()
    return found


def causes(found: Diagnostics) -> list[str]:
    told = (guards.cause_of_series(one, found.graph_break_reasons) for one in fold_recompiles(found.recompile_reasons))
    return [cause.name if cause else "" for cause in told]


def limit(found: Diagnostics) -> str:
    return guards.advice_on_limit(found.recompile_limit_hits[0], found.recompile_reasons, found.graph_break_reasons)


@pytest.mark.parametrize(
    ("guard", "source", "value", "cause"),
    [
        ("((-10.0)*(self.model.step / 1000)) == (-0.07)", "((-10.0)*(self.model.step / 1000))", "-0.07", "number that changes"),
        ("self.model.offset == (-1.5)", "self.model.offset", "-1.5", "Python number that changes"),
        ("self.model.rate == 1e-05", "self.model.rate", "1e-05", "Python number that changes"),
        ("self.model.count == (-3)", "self.model.count", "-3", "module's counter"),
        ("G['offset'] == (-2)", "G['offset']", "-2", "global number"),
        ("shift == (-2)", "shift", "-2", "number that the forward is given"),
        ("self.model.last == (4, 7)", "self.model.last", "(4, 7)", "Python value that changes"),
        ("self.model.last == (-4, 7)", "self.model.last", "(-4, 7)", "Python value that changes"),
        ("((-2) + self.model.count) <= (-6)", "((-2) + self.model.count) <= -6", "", "number that crosses a limit"),
        ("-5 <= self.model.count", "-5 <= self.model.count", "", "number that crosses a limit"),
        ("2 <= ___stack1.size()[0]", "2 <= ___stack1.size()[0]", "", "output of unknown size"),
        ("2 <= ___stack1.size()[1]", "2 <= ___stack1.size()[1]", "", "length after a graph break"),
    ],
)
def test_a_number_is_one_in_every_notation(guard: str, source: str, value: str, cause: str) -> None:
    one = Recompile.parse(f"forward (model.py:3): {guard} # y = x # model.py:4 in forward")
    assert (one.source, one.value) == (source, value)
    told = guards.cause_of_guard(guard)
    assert told is not None
    assert told.name.endswith(cause)


@pytest.mark.parametrize("values", [("0", "0.01", "0.02"), ("1e-05", "2e-05"), ("-1", "-0.5")])
def test_a_number_that_becomes_a_float_is_no_counter(values: Sequence[str]) -> None:
    (series,) = fold_recompiles([f"forward (m.py:3): self.alpha == {value}" for value in values])
    cause = guards.cause_of_series(series)
    assert cause is not None
    assert cause.name == "Python number that changes"
    advice = guards.named_advice(cause, series)
    assert "register_buffer('alpha', torch." in advice
    assert "torch.exp(self.alpha) in place of math.exp(self.alpha)" in advice


def test_a_function_that_the_user_calls_something_of_something_is_no_block() -> None:
    net = Net()

    def loss_of_batch(x: Tensor) -> Tensor:
        net.count += 1
        return net.layer(x).sum() * (net.count / 100)

    torch._dynamo.reset()
    compiled = torch.compile(loss_of_batch, backend="aot_eager")
    with capture_diagnostics() as found:
        for _ in range(10):
            compiled(torch.randn(4, 8)).backward()
    assert causes(found) == ["module's counter"]
    assert found.recompile_limit_hits[0].startswith("loss_of_batch (test_number_causes.py:")
    record = {"label": "recompile-limit", "recompile_limit_hits": found.recompile_limit_hits}
    kept = {**record, "recompile_reasons": found.recompile_reasons}
    assert remedy_of(kept) == "dynamo.allow_unspec_int_on_nn_module=on"


def falling(net: Net, x: Tensor) -> Tensor:
    net.temperature -= 0.7
    return net.layer(x) + math.tanh(net.temperature)


def falling_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.heat = net.heat - 0.7
    return net.layer(x) + torch.tanh(net.heat)


def test_a_float_that_falls_below_zero_is_a_number_that_changes_and_a_buffer_mends_it() -> None:
    found = run(falling)
    begins = {"first value of a number"} if TORCH >= (2, 13) else set()  # before, each value of it is a constant
    assert {*causes(found)} == begins | {"Python number that changes"}
    assert "self.register_buffer('temperature'" in limit(found)
    assert run(falling_in_a_buffer).graphs == 1


def ramp(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * math.exp(-net.count / 100)


def ramp_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    return net.layer(x) * torch.exp(-net.steps / 100)


def ramp_by_a_list(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * [1.0 - number / 50 for number in range(50)][net.count]


def cosine(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * math.cos(net.count / 100) * 0.99**net.count * math.tanh(net.count / 10)


@pytest.mark.parametrize(
    ("forward", "graphs"),
    [(ramp, 8), (ramp_by_a_list, 8), (cosine, 2), (ramp_in_a_buffer, 1)],
)
def test_a_counter_may_vary_unless_its_exponential_is_taken_or_a_list_is_indexed(forward: Any, graphs: int) -> None:
    found = run(forward, allow_unspec_int_on_nn_module=True)
    assert found.graphs == graphs
    assert bool(found.recompile_limit_hits) == (graphs == 8)
    if forward is ramp:
        assert "torch.exp(self.count) in place of math.exp(self.count)" in limit(found)
    counter = next(cause for cause in guards.GUARDS if cause.name == "module's counter")
    assert "for each value that a list is indexed with and, in torch 2.13, for each that math.exp or math.log" in counter.advice


def scaled(net: Net, x: Tensor, alpha: float) -> Tensor:
    return net.layer(x) * alpha


ALPHAS = [0.0001 * number for number in range(1, 13)]


@pytest.mark.parametrize(("dynamic", "words"), [("auto", "first value apart"), ("static", "each value of this Python number")])
def test_a_float_that_the_forward_is_given_varies_from_its_second_value_on(dynamic: str, words: str) -> None:
    found = run(scaled, ALPHAS)
    (series,) = fold_recompiles(found.recompile_reasons)
    assert (found.graphs, series.count, causes(found)) == (2, 1, ["first value of a number"])
    sizes = KnownSizes(settings=CompileSettings.parse(f"scope=full,dynamic={dynamic}"), max_length=16, batch_size=4)
    assert words in explain_recompiles(series, sizes)


def test_a_float_that_diverges_after_its_first_value_is_still_told() -> None:
    told = guards.advice_on_stale_number(["forward (m.py:3): self.heat == 2.0 # self.heat *= 0.9 # m.py:4 in forward"])
    assert told is not None
    assert "self.register_buffer('heat', torch.tensor(2.0))" in told


def unrolled(net: Net, x: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        x = x + 0.1 * net.layer(x)
    return x


class Round(torch.nn.Module):
    """A round of a loop as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + 0.1 * self.layer(x)
        return y


def test_rounds_of_a_loop_take_a_graph_each_and_a_higher_limit_or_a_compiled_round_mends_it() -> None:
    rounds = list(range(1, 13))
    found = run(unrolled, rounds)
    assert causes(found) == ["number that the forward is given"]
    assert "the number of rounds of a loop, which no tensor can be, set recompile_limit above the number of its values" in limit(
        found
    )
    assert run(unrolled, [torch.tensor(number) for number in rounds]).graph_break_reasons, "a tensor is no number of rounds"
    raised = run(unrolled, rounds, recompile_limit=16)
    assert (raised.graphs, raised.recompile_limit_hits) == (12, [])
    torch._dynamo.reset()
    apart = torch.compile(Round(), backend="aot_eager")
    with capture_diagnostics() as mended:
        for number in rounds:
            x = torch.randn(4, 8)
            for _ in range(number):
                x = apart(x)
    assert mended.recompile_limit_hits == []
    assert mended.graphs <= 2  # the first round's input needs no gradient


def split(net: Net, x: Tensor, counts: Tensor) -> Tensor:
    return torch.stack([part.amax(0) for part in torch.split(net.layer(x), counts.tolist())])


def test_lengths_that_a_list_of_values_gives_have_a_remedy_that_makes_one_graph() -> None:
    counts = [torch.tensor([1 + number % 3, 3 - number % 3]) for number in range(12)]
    found = run(split, counts)
    hits = found.recompile_limit_hits or [
        f"{found.recompile_reasons[-1].partition('): ')[0]}) hit recompile_limit 8: ___stack1[0] == 1"
    ]
    record = {"label": "recompile-limit", "recompile_limit_hits": hits, "recompile_reasons": found.recompile_reasons}
    assert remedy_of({**record, "graph_break_reasons": found.graph_break_reasons}) == "dynamo.capture_scalar_outputs=on"
    assert {*causes(found)} == {"value read from a tensor"}
    assert not [one for one in map(Recompile.parse, found.recompile_reasons) if ")" in one.line.partition(".py:")[2]]
    mended = run(split, counts, capture_scalar_outputs=True)
    assert (mended.graphs, mended.recompile_reasons, mended.graph_break_reasons) == (1, [], [])
