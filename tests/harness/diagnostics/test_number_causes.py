"""Python numbers that change: what torch lets vary, what it fixes, and what helps, run before and after."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from faulty_models import TORCH, Net
from torch import Tensor, nn

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics.advice import KnownSizes, explain_recompiles
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes import guards
from compile_sweep.schema.causes.breaks import cause_of_break
from compile_sweep.schema.causes.errors import advice_on_error, advice_on_exception
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
    (series,) = fold_recompiles(
        [f"forward (m.py:3): self.alpha == {value} # y = x * math.exp(self.alpha) # m.py:4 in forward" for value in values]
    )
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
    is_split = (2, 13) <= TORCH < (2, 15)  # into its first value and the differences; others guard its values alone
    begins = {"first value of a number"} if is_split else set()
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


def cosine_of_numpy(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * (1 + np.cos(np.pi * net.count / 100))


@pytest.mark.parametrize(
    ("forward", "graphs"),
    [(ramp, 8), (ramp_by_a_list, 8), (cosine_of_numpy, 8), (cosine, 2), (ramp_in_a_buffer, 1)],
)
def test_a_counter_may_vary_unless_its_exponential_is_taken_or_a_list_is_indexed(forward: Any, graphs: int) -> None:
    found = run(forward, allow_unspec_int_on_nn_module=True)
    assert found.graphs == graphs
    assert bool(found.recompile_limit_hits) == (graphs == 8)
    if forward is ramp:
        assert "torch.exp(self.count) in place of math.exp(self.count)" in limit(found)
    counter = next(cause for cause in guards.GUARDS if cause.name == "module's counter")
    assert "each value that a list is indexed with takes a graph" in counter.documented
    assert "torch.exp(self.steps) in place of math.exp(self.steps)" in counter.documented


def tokens(net: Net, x: Tensor) -> Tensor:
    net.count += x.numel() + net.count // 3
    return net.layer(x) * min(1.0, net.count / 10000)


def curriculum(net: Net, x: Tensor) -> Tensor:
    net.count = int(net.count * 1.2) + 2
    return net.layer(x) + net.whole_table[: net.count].mean(0)


@pytest.mark.parametrize("forward", [tokens, curriculum])
def test_a_count_that_grows_unevenly_is_let_vary_and_is_not_taken_for_a_cache_alone(forward: Any) -> None:
    found = run(forward)
    assert {*causes(found)} == {"cache that grows"}
    assert "if it counts, such as tokens or samples" in limit(found)
    record = {"label": "recompile-limit", "recompile_limit_hits": found.recompile_limit_hits}
    assert remedy_of({**record, "recompile_reasons": found.recompile_reasons}) == "dynamo.allow_unspec_int_on_nn_module=on"
    mended = run(forward, allow_unspec_int_on_nn_module=True)
    assert mended.graphs <= 2
    assert mended.recompile_limit_hits == []


@pytest.mark.parametrize(
    ("guard", "source", "name"),
    [
        ("G['__import_train_dot_loop'].STATE['step'] == 2", "G['STATE']['step']", "step"),
        ("G['__import_model'].Net.calls == 2", "G['Net'].calls", "calls"),
        ("G['step'] == 2", "G['step']", "step"),
        ("self.model.weights['aux'] == 0.95", "self.model.weights['aux']", "aux"),
        ("self.model.scales[2] == 0.95", "self.model.scales[2]", "steps"),
    ],
)
def test_a_number_in_a_dictionary_or_another_file_is_called_by_its_own_name(guard: str, source: str, name: str) -> None:
    (series,) = fold_recompiles([f"forward (model.py:3): {guard} # y = x * math.exp(step) # model.py:4 in forward"] * 2)
    cause = guards.lasting_cause(series, (), ())
    assert cause is not None
    assert series.first.source == source
    advice = guards.named_advice(cause, series)
    assert f"self.register_buffer('{name}', torch." in advice
    assert f"torch.exp(self.{name})" in advice


def timed(net: Net, x: Tensor) -> Tensor:
    began = time.perf_counter()
    y = net.layer(x)
    print(f"{time.perf_counter() - began:.3f} s")
    return y


def timed_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return net.layer(x)
    return timed(net, x)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.skipif(TORCH >= (2, 14), reason="seen with torch 2.13")
def test_a_text_of_a_time_ends_in_the_compilers_error_and_one_that_is_not_compiled_does_not() -> None:
    with pytest.raises(Exception, match="Unknown format code") as error:
        run(timed)
    assert is_compiler_error(error.value)
    assert "only if not torch.compiler.is_compiling()" in str(advice_on_error(str(error.value)))
    mended = run(timed_unless_compiling)
    assert (mended.graphs, mended.graph_break_reasons) == (1, [])


def chosen_by_a_set(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * (1 if int(x[:, 0].argmax()) in (1, 2) else 2)


def test_a_value_that_is_looked_up_among_others_is_a_value_of_a_tensor_and_no_list() -> None:
    assert {*causes(run(chosen_by_a_set))} <= {"value read from a tensor"}
    told = guards.cause_of_guard("not (___stack1 == 1 or ___stack1 == 2)")
    counted = guards.cause_of_guard("not (self.count == 1 or self.count == 2)")
    assert told is not None
    assert counted is not None
    assert (told.name, counted.name) == ("value read from a tensor", "number that crosses a limit")


class Dropping(torch.nn.Module):
    """A block with a rate of its own."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = torch.nn.Linear(8, 8), rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.layer(x), self.rate)


class DroppingByTable(Dropping):
    """A block with a rate from a table."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.layer(x), RATES[2])


RATES = np.linspace(0.1, 0.4, 4)


def test_a_rate_of_numpy_breaks_the_graph_or_ends_in_an_error_and_one_of_python_does_not() -> None:
    with capture_diagnostics() as found:
        torch.compile(Dropping(RATES[2]), backend="aot_eager")(torch.randn(4, 8)).sum().backward()
    (cause,) = {*map(cause_of_break, found.graph_break_reasons)}
    assert cause is not None
    assert "if it is a number of numpy, make it one of Python before the forward, float(rate)" in cause.advice
    DroppingByTable(0.1)(torch.randn(4, 8))
    with pytest.raises(TypeError) as error:  # behind its break, torch makes an array of the number
        torch.compile(DroppingByTable(0.1), backend="aot_eager")(torch.randn(4, 8))
    assert "tolist()" in str(advice_on_exception(str(error.value)))
    torch._dynamo.reset()
    with capture_diagnostics() as mended:
        torch.compile(Dropping(RATES.tolist()[2]), backend="aot_eager")(torch.randn(4, 8)).sum().backward()
    assert (mended.graphs, mended.graph_break_reasons) == (1, [])


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


@pytest.mark.skipif(torch_version() != (2, 13), reason="torch 2.11 and 2.12 bound it, and later ones were not tried")
def test_a_size_that_torch_fails_to_bound_is_told_and_mended_by_compiling_the_block() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.strided, self.block = nn.Conv1d(4, 8, 3, 4, 1), Block()

        def forward(self, x: Tensor) -> Any:
            return self.block(self.strided(x).transpose(1, 2)[:, None])

    def trained_once(*, is_whole: bool) -> None:
        torch._dynamo.reset()
        net = Encoder()
        (net if is_whole else net.block).compile(dynamic=True)
        net(torch.randn(2, 4, 21)).square().mean().backward()

    with pytest.raises(Exception, match="ValueRangeError: Invalid ranges") as raised:
        trained_once(is_whole=True)
    assert is_compiler_error(raised.value)
    assert "use scope=regional, whose blocks are given that size" in (advice_on_error(str(raised.value)) or "")
    trained_once(is_whole=False)
