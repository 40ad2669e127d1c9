"""Every cause in the table is recognised in a model that shows it, and its advice mends that model: run before and after."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema import causes
from compile_sweep.schema.outcome import Death, Label, judge_death, judge_measurement
from compile_sweep.schema.recompiles import Recompile, fold_recompiles

_steps = iter(range(10**6))
_log = logging.getLogger("a model of the tests")


class Net(nn.Module):
    """One layer, and what models keep beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.history: list[Tensor] = []
        self.last: Any = None
        self.count, self.temperature, self.flag = 0, 2.0, True
        self.seen: set[int] = set()
        self.dropout = nn.Dropout(0.1)
        self.table = torch.zeros(1, 8)
        self.whole_table = torch.zeros(100, 8)
        self.activation: Any = torch.tanh
        self.numpy = np.random.default_rng(1)
        self.generator = torch.Generator().manual_seed(1)
        self.scale: nn.Parameter | None = None
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("heat", torch.tensor(2.0))
        self.steps: Tensor
        self.heat: Tensor


Forward = Callable[[Net, Tensor], Tensor]


def plain(net: Net, x: Tensor) -> Tensor:
    return net.layer(x)


def with_item(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().item()
    return y


def with_tensor_kept(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.last = y.sum().detach()
    return y


def with_branch(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    if y.sum() > 0:
        y = y * 2
    return y


def with_where(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.where(y.sum() > 0, y * 2, y)


def with_rows(net: Net, x: Tensor) -> Tensor:
    (rows,) = torch.where(x[:, 0] > 0)
    return x.index_add(0, rows, net.layer(x[rows]))


def with_mask(net: Net, x: Tensor) -> Tensor:
    return x + (x[:, 0] > 0).float()[:, None] * net.layer(x)


def with_python_random(net: Net, x: Tensor) -> Tensor:
    if random.random() > 0.2:
        x = x + net.layer(x)
    return x


def with_torch_random(net: Net, x: Tensor) -> Tensor:
    return x + (torch.rand(()) > 0.2) * net.layer(x)


def with_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.randn(x.shape, generator=net.generator))


def with_default_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.randn(x.shape))


def with_numpy_generator(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * net.numpy.random()


def with_generator_made_there(net: Net, x: Tensor) -> Tensor:
    generator = torch.Generator()
    generator.manual_seed(1)
    return net.layer(x) * torch.rand(8, generator=generator)


def with_seed(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return net.layer(x + torch.rand(8))


def with_drawn_noise(net: Net, x: Tensor) -> Tensor:
    return net.layer(x + torch.rand(8))


def with_standard_output(net: Net, x: Tensor) -> Tensor:
    sys.stdout.write("")
    return net.layer(x)


def with_folder(net: Net, x: Tensor) -> Tensor:
    net.last = os.getcwd()
    return net.layer(x)


def with_input_that_needs_a_gradient(net: Net, x: Tensor) -> Tensor:
    x.requires_grad_()
    return net.layer(x)


def with_sparse(net: Net, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), net.layer(x))


def with_dense(net: Net, x: Tensor) -> Tensor:
    return torch.eye(4) @ net.layer(x)


def with_packed(net: Net, x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(net.layer(x)[None], torch.tensor([4]), batch_first=True).data


def with_print(net: Net, x: Tensor) -> Tensor:
    print("step")
    return net.layer(x)


def with_print_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        print("step")
    return net.layer(x)


def with_logging(net: Net, x: Tensor) -> Tensor:
    _log.warning("step")
    return net.layer(x)


def with_warning(net: Net, x: Tensor) -> Tensor:
    warnings.warn("step", stacklevel=1)
    return net.layer(x)


def with_logging_unless_compiling(net: Net, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        _log.warning("step")
    return net.layer(x)


def with_clock(net: Net, x: Tensor) -> Tensor:
    net.last = time.perf_counter()
    return net.layer(x)


def with_new_parameter(net: Net, x: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = nn.Parameter(torch.ones(8))
    return net.layer(x) * net.scale


def with_gradient(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(net.layer(x).square().sum(), x)[0]


def with_func_grad(net: Net, x: Tensor) -> Tensor:
    return torch.func.grad(lambda places: net.layer(places).square().sum())(x)


def with_deepcopy(net: Net, x: Tensor) -> Tensor:
    return net.layer(copy.deepcopy(x))


def with_clone(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.clone())


def with_hook_added(net: Net, x: Tensor) -> Tensor:
    net.layer.register_forward_hook(lambda module, inputs, output: output * 1)
    return net.layer(x)


class Cleared(torch.autograd.Function):
    """Calls a method of its context that torch.compile does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.maybe_clear_saved_tensors()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Doubled(torch.autograd.Function):
    """The same from torch operators alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def with_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Cleared.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


def with_plain_function(net: Net, x: Tensor) -> Tensor:
    y: Tensor = Doubled.apply(net.layer(x))  # type: ignore[no-untyped-call]
    return y


_lock = threading.Lock()


def with_lock(net: Net, x: Tensor) -> Tensor:
    with _lock:
        return net.layer(x)


def with_hash(net: Net, x: Tensor) -> Tensor:
    net.last = hashlib.md5(b"a").digest_size
    return net.layer(x)


def with_break_in_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.layer(x)
        net.last = hashlib.md5(b"a")
    return x


def with_loop(net: Net, x: Tensor) -> Tensor:
    for _ in range(2):
        x = net.layer(x)
    return x


def with_open_file(net: Net, x: Tensor) -> Tensor:
    open("/dev/null").close()
    return net.layer(x)


def with_explicit_break(net: Net, x: Tensor) -> Tensor:
    x = net.layer(x)
    torch._dynamo.graph_break()
    return x


@torch.compiler.disable
def doubled(x: Tensor) -> Tensor:
    return x * 2


def with_disabled(net: Net, x: Tensor) -> Tensor:
    return doubled(net.layer(x))


def doubled_in_graph(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * 2


def with_builtin(net: Net, x: Tensor) -> Tensor:
    net.last = id(x) and memoryview(b"a")
    return net.layer(x)


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
    net.steps += 1
    return net.layer(x) * (net.steps / 100)


def with_float(net: Net, x: Tensor) -> Tensor:
    net.temperature = max(0.5, net.temperature * 0.99)
    return net.layer(x) / net.temperature


def with_float_in_buffer(net: Net, x: Tensor) -> Tensor:
    net.heat.mul_(0.99)
    return net.layer(x) / net.heat


def with_set(net: Net, x: Tensor) -> Tensor:
    net.seen.add(len(net.seen))
    return net.layer(x)


def with_dropout_schedule(net: Net, x: Tensor) -> Tensor:
    net.dropout.p = min(0.5, net.dropout.p + 0.01)
    return net.dropout(net.layer(x))


def with_dropout_of_tensors(net: Net, x: Tensor) -> Tensor:
    net.heat.add_(0.01)
    y = net.layer(x)
    return y * (torch.rand_like(y) >= net.heat) / (1 - net.heat)


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


def run(forward: Forward, *, dynamic: bool | None = None, around: Callable[[Net, int], Any] | None = None) -> Diagnostics:
    """Ten training steps of a model with this forward, compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = type("Model", (Net,), {"forward": forward})()
    compiled = torch.compile(net, backend="eager", dynamic=dynamic)
    with capture_diagnostics() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(10):
            with around(net, number) if around else contextlib.nullcontext():
                compiled(torch.randn(4, 8))
    return found


@dataclass(frozen=True)
class Case:
    cause: str
    before: Forward
    after: Forward


BREAKS = [
    Case("explicit break", with_explicit_break, plain),
    Case("disabled function", with_disabled, doubled_in_graph),
    Case("value of a tensor", with_item, with_tensor_kept),
    Case("data-dependent branch", with_branch, with_where),
    Case("output of unknown size", with_rows, with_mask),
    Case("Python's or numpy's random numbers", with_python_random, with_torch_random),
    Case("Python's or numpy's random numbers", with_numpy_generator, with_torch_random),
    Case("own random generator", with_generator, with_default_generator),
    Case("own random generator", with_generator_made_there, with_drawn_noise),
    Case("seed set in the forward", with_seed, with_drawn_noise),
    Case("print, logging and warnings", with_standard_output, with_print_unless_compiling),
    Case("file or clock", with_folder, plain),
    Case("requires_grad_() in the forward", with_input_that_needs_a_gradient, plain),
    Case("sparse tensor", with_sparse, with_dense),
    Case("packed sequences", with_packed, plain),
    Case("print, logging and warnings", with_print, with_print_unless_compiling),
    Case("print, logging and warnings", with_logging, with_logging_unless_compiling),
    Case("print, logging and warnings", with_warning, with_logging_unless_compiling),
    Case("file or clock", with_clock, plain),
    Case("file or clock", with_open_file, plain),
    Case("parameter made in the forward", with_new_parameter, plain),
    Case("gradient taken in the forward", with_gradient, with_func_grad),
    Case("copy of a tensor by Python", with_deepcopy, with_clone),
    Case("hooks", with_hook_added, plain),
    Case("custom autograd.Function", with_function, with_plain_function),
    Case("context manager", with_lock, plain),
    Case("operator of another library", with_hash, plain),
    Case("break in a loop", with_break_in_loop, with_loop),
    Case("untraceable builtin", with_builtin, plain),
]


def is_clean(found: Diagnostics) -> bool:
    return not (found.graph_break_reasons or found.recompile_limit_hits or found.fallbacks) and found.graphs in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", BREAKS, ids=lambda case: f"{case.cause}: {case.before.__name__}")
def test_a_break_has_its_cause_and_the_advice_mends_it(case: Case) -> None:
    found = run(case.before)
    named = [cause.name for text in found.graph_break_reasons if (cause := causes.cause_of_break(text))]
    told = [cause.name for text in found.fallbacks if (cause := causes.cause_of_break(f"x: {text}"))]
    assert case.cause in (*named, *told), [*found.graph_break_reasons, *found.fallbacks]
    assert is_clean(run(case.after))


def test_the_users_line_and_the_hints_do_not_decide() -> None:
    text = (
        "model.py:7 in forward: Unsupported Tensor.item() call with capture_scalar_outputs=False\n"
        "  code: print(x.item(), hook, generator)\n  explanation: x\n  hint: builtin `print`, context manager, autograd.Function"
    )
    cause = causes.cause_of_break(text)
    assert cause is not None
    assert cause.name == "value of a tensor"


GUARDS = [
    Case("list or dictionary that grows", with_list, with_buffer),
    Case("list or dictionary that grows", with_set, plain),
    Case("dropout that changes", with_dropout_schedule, with_dropout_of_tensors),
    Case("cache that grows", with_table_that_grows, with_whole_table),
    Case("made in the first forward", with_made_at_first, plain),
    Case("Python value that changes", with_flag, plain),
    Case("another object", with_object, plain),
    Case("module's counter", with_counter, with_counter_in_buffer),
    Case("hooks that are added", with_hook_added, plain),
    Case("value read from a tensor", with_value, with_tensor),
    Case("output of unknown size", with_rows, with_mask),
    Case("Python number that changes", with_float, with_float_in_buffer),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GUARDS, ids=lambda case: case.cause)
def test_a_recompile_has_its_cause_and_the_advice_mends_it(case: Case) -> None:
    found = run(case.before, dynamic=False)
    guards = [text.partition("): ")[2] for text in found.recompile_reasons]
    assert guards
    assert {cause.name for guard in guards if (cause := causes.cause_of_guard(guard))} == {case.cause}, guards
    after = run(case.after, dynamic=False)
    assert not after.recompile_reasons


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
    assert [one.name for guard in guards if (one := causes.cause_of_guard(guard))] == [cause], guards
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


def cause_of(recompile: str) -> causes.Cause | None:
    return causes.cause_of_guard(Recompile.parse(recompile).guard)


def with_warm_up(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * (2 if net.count > 5 else 1)


def test_a_counter_may_vary_and_what_is_left_is_the_limit_that_it_crosses() -> None:
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        found = run(with_warm_up)
        assert is_clean(run(with_counter))
    assert found.graphs == 3
    assert [cause.name for one in found.recompile_reasons if (cause := cause_of(one))][-1] == "number that crosses a limit"


def with_positions(self: Net, x: Tensor) -> Tensor:
    if len(x) > self.count:
        self.count = len(x)
        self.table = torch.arange(len(x)).float()[:, None]
    return self.layer(x) + self.table[: len(x)]


def test_a_number_that_follows_the_sizes_of_the_batches_is_a_cache_that_grows_and_no_counter() -> None:
    torch._dynamo.reset()
    net = type("Model", (Net,), {"forward": with_positions})()
    compiled = torch.compile(net, backend="eager", dynamic=True)
    with capture_diagnostics() as found:
        for rows in (4, 6, 9, 5, 14, 30):
            compiled(torch.randn(rows, 8))
    (series,) = (one for one in fold_recompiles(found.recompile_reasons) if one.first.source == "self.count")
    assert (cause := causes.cause_of_series(series))
    assert cause.name == "cache that grows"
    hit = f"{series.first.function} hit recompile_limit 5: self.count == 14"
    assert "build it once in __init__" in causes.advice_on_limit(hit, found.recompile_reasons)


@contextlib.contextmanager
def frozen_at_first(net: Net, number: int) -> Iterator[None]:
    net.layer.weight.requires_grad_(number >= 3)
    yield


def test_layers_that_are_unfrozen_late_take_one_graph_more() -> None:
    found = run(dropped, around=frozen_at_first)
    guards = [text.partition("): ")[2] for text in found.recompile_reasons]
    assert [one.name for guard in guards if (one := causes.cause_of_guard(guard))] == ["frozen and trained parameters"], guards
    assert is_clean(found)


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
    assert "learning rate" in {cause.name for guard in guards if (cause := causes.cause_of_guard(guard))}, guards
    assert not trained_with(torch.tensor(0.1)).recompile_reasons


def force_loss(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(net.layer(x).tanh().sum(), x, create_graph=True)
    return force.square().sum()


def test_a_double_backward_is_the_compilers_error_and_is_mended_by_the_advice() -> None:
    torch._dynamo.reset()
    net = Net()
    layer = torch.compile(net.layer, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    (force,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward") as raised:
        force.square().sum().backward()
    assert is_compiler_error(raised.value)
    advice = causes.advice_on_error(str(raised.value))
    assert advice is not None
    assert "torch.func.grad" in advice

    def loss(x: Tensor) -> Tensor:
        return torch.func.grad(lambda places: net.layer(places).tanh().sum())(x).square().sum()

    torch._dynamo.reset()
    torch.compile(loss, backend="aot_eager")(torch.randn(4, 8)).backward()
    assert net.layer.weight.grad is not None
    force_loss(net, torch.randn(4, 8)).backward()


def test_an_error_of_the_models_own_code_is_not_the_compilers() -> None:
    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: x @ torch.ones(3, 3), backend="aot_eager", dynamic=False)(torch.zeros(2, 3)).sum().backward()
    assert not is_compiler_error(raised.value)


def test_every_cause_has_its_test() -> None:
    shown = {case.cause for case in BREAKS}
    elsewhere = {"modules that are added", "number that crosses a limit"}
    assert shown == {cause.name for cause in causes.BREAKS}
    changed = {"train and eval mode", "gradients switched on and off", "autocast switched on and off", "learning rate"}
    changed |= {"frozen and trained parameters", "global setting of torch"}
    assert {case.cause for case in GUARDS} | changed | elsewhere == {cause.name for cause in causes.GUARDS}


def test_the_documentation_lists_every_cause_with_its_advice() -> None:
    text = (Path(__file__).parents[3] / "docs" / "causes.md").read_text(encoding="utf-8")
    rows = [f"| {cause.name} | {cause.advice} |" for cause in (*causes.BREAKS, *causes.GUARDS, *causes.ERRORS)]
    assert [row for row in rows if row not in text] == []
    assert text.count("\n| ") - 3 == len(set(rows)), "a row of a cause that is no more"


MEASURED: dict[str, Any] = {
    "numerics": {"status": "ok"}, "recompile_limit_hits": [], "fallbacks": [], "cudagraph_skips": 0,
    "cudagraph_skip_reasons": [], "data_wait_share": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("guard", "helps", "never"),
    [
        ("self.temperature == 1.998", "make it a tensor", "lengths"),
        ("len(self.history) == 7", "keep out of the forward what grows", "recompile_limit"),
        ("self.steps == 7 # x (HINT: torch.compile considers integer attributes", "register_buffer", "lengths"),
        ("tensor 'ids' size mismatch at index 1. expected 16, actual 24", "dynamic=mark", "buffer"),
    ],
)
def test_a_recompile_limit_has_the_advice_of_its_guard(guard: str, helps: str, never: str) -> None:
    hit = f"forward (model.py:10) hit recompile_limit 8: {guard}"
    verdict = judge_measurement({**MEASURED, "recompile_limit_hits": [hit]}, claims_cudagraphs=False)
    assert verdict.label is Label.RECOMPILE_LIMIT
    advice = (verdict.reason or "").rpartition("; ")[2] if ";" in (verdict.reason or "") else ""
    assert helps in (verdict.reason or "")
    assert never not in advice


def test_a_fallback_has_the_advice_of_the_break_at_its_line() -> None:
    found = run(with_break_in_loop)
    assert found.fallbacks
    measured = {**MEASURED, "fallbacks": found.fallbacks, "graph_break_reasons": found.graph_break_reasons}
    verdict = judge_measurement(measured, claims_cudagraphs=False)
    assert "torch.compile cannot see into this call" in (verdict.reason or "")


def test_an_error_of_the_compilers_says_what_helps() -> None:
    known: dict[str, Any] = {"phase": "warming-up", "in_phase_s": 5.0, "elapsed_s": 60.0, "compile_deadline_s": 600.0}
    death = Death(
        **known,
        trial_deadline_s=900.0,
        error_type="builtins.RuntimeError",
        error_text="torch.compile with aot_autograd does not currently support double backward",
        error_is_compilers=True,
    )
    verdict = judge_death(death)
    assert verdict.label is Label.COMPILE_ERROR
    assert "differentiated twice" in (verdict.reason or "")
