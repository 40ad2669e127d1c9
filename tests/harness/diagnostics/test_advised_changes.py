"""Further changes that the table of causes advises: made in a model, each trains like eager, as one graph."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_models import TORCH, Net, plain, with_rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics.advice import advise_on_hint
from compile_sweep.harness.diagnostics.capture import Diagnostics, capture_diagnostics
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes import breaks, errors, guards

pytestmark = pytest.mark.slow

Step = Callable[[Any, Tensor], Tensor]


def before(*version: int) -> pytest.MarkDecorator:
    """Skips a test of what this version of torch has mended."""
    return pytest.mark.skipif(torch_version() >= version, reason=f"torch {'.'.join(map(str, version))} has mended it")


def with_cond(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y.sin(), (y,))


def with_asynchronous_assertion(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    torch._assert_async(y.isfinite().all())
    return y


def with_number_in_the_graph(net: Net, x: Tensor) -> Tensor:
    kept = int((x[:, 0] > 0).sum()) + 1
    return net.layer(x) * x.abs().sum().item() + x[:kept].mean()


def with_root_of_a_value(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * math.sqrt(x.abs().mean())


def with_root_of_a_tensor(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * torch.sqrt(x.abs().mean())


def with_norm_of_some_rows(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.layer(x[x[:, 0] != 0]))


def with_rows_of_experts(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate((net.layer, net.layers[0])):
        (rows,) = torch.where((x[:, 0] > 0) == number)
        out.index_add_(0, rows, expert(x[rows]))
    return out


def with_masked_rows_set(net: Net, x: Tensor) -> Tensor:
    y, chosen = net.layer(x).clone(), x[:, 0] > 0
    y[chosen] = y[chosen] * 2
    return y


def with_kinds(net: Net, x: Tensor) -> Tensor:
    kinds, places = torch.unique((x[:, 0] > 0).long(), return_inverse=True)
    return net.layer(x) * kinds.float()[places][:, None]


def with_rows_that_are_several(net: Net, x: Tensor) -> Tensor:
    rows = x[x[:, 0] != 0]
    torch._check(len(rows) > 1)
    return net.norm(net.layer(rows))


def with_weighted_loss(net: Net, x: Tensor) -> Tensor:
    mask = (x[:, 0] != 0).float()[:, None]
    return (net.layer(x).square() * mask).sum() / mask.sum()


def with_labels_left_out(net: Net, x: Tensor) -> Tensor:
    return cross_entropy(net.layer(x), torch.arange(len(x)).masked_fill(~(x[:, 0] != 0), -100))


def with_derivative(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    (slope,) = torch.autograd.grad(y.tanh().sum(), y)
    return y * slope.detach()


def with_adapted_weight(net: Net, x: Tensor) -> Tensor:
    """As MAML: the loss is that of a weight after a step, through which its gradient goes."""
    (slope,) = torch.autograd.grad(net.layer(x).tanh().sum(), net.layer.weight, create_graph=True)
    return nn.functional.linear(x, net.layer.weight - 0.1 * slope, net.layer.bias)


def with_index_add(net: Net, x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, torch.tensor([1, 0, 3, 2]), net.layer(x))


def with_padded_batches(net: Net, x: Tensor) -> Tensor:
    return net.layer(x) * (torch.arange(len(x)) < 3)[:, None]


def with_bank_of_fixed_size(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    net.queue = torch.cat([net.queue[len(y) :], y.detach()])
    return y + net.queue.mean()


def with_condition_on_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.steps = net.steps + 1
    y = net.layer(x)
    return torch.where(net.steps > 5, y * 2, y)


@torch.library.custom_op("tests_advised::squared", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 2)


squared.register_fake(torch.empty_like)
squared.register_autograd(
    lambda ctx, gradient: 2 * gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def with_custom_operator(net: Net, x: Tensor) -> Tensor:
    return squared(net.layer(x))


def with_no_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.layers[0](x[:2]) + net.whole_table[:2]
    return net.layer(x)[:2] - target


def detached_from_an_operator(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    return y * squared(y.detach())


def with_counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * (net.count / 100)


def with_branch_by_a_counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    y = net.layer(x)
    return y * 2 if net.count % 3 == 0 else y


def with_layer_by_a_counter(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return (net.layer, net.layers[0])[net.count % 2](x)


def with_load_balancing(net: Net, x: Tensor) -> Tensor:
    """As of the router's loss of a mixture of experts in transformers 5.17."""
    balance = x.new_zeros(8)
    for layer in (net.layer, net.layers[0]):
        scores = layer(x).softmax(-1)
        counts = torch.bincount(scores.topk(2).indices.reshape(-1), minlength=8).float()
        balance = balance + counts * scores.mean(0)
    return balance


ROWS = {"capture_dynamic_output_shape_ops": True}
NUMBERS = {"capture_scalar_outputs": True}
COUNTERS = {"allow_unspec_int_on_nn_module": True}


def trained(forward: Step, config: dict[str, bool], backend: str | None, steps: int) -> tuple[list[Tensor], Diagnostics]:
    """Trains for some steps; returns the gradients of the last, and what the compiler did."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net: Any = type("Model", (Net,), {"forward": forward})()
    model = torch.compile(net, backend=backend) if backend else net
    with torch._dynamo.config.patch(**config), capture_diagnostics() as found:
        for number in range(steps):
            net.zero_grad()
            model(torch.randn(4, 8) + (number % 2)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], found


@pytest.mark.parametrize(
    ("advised", "forward", "config", "graphs"),
    [
        ("torch.cond", with_cond, {}, 1),
        ("torch._assert_async(condition)", with_asynchronous_assertion, {}, 1),
        ("dynamo.capture_scalar_outputs=on", with_number_in_the_graph, NUMBERS, 1),
        ("dynamo.capture_dynamic_output_shape_ops=on", with_rows, ROWS, 1),
        ("dynamo.capture_dynamic_output_shape_ops=on", with_rows_of_experts, ROWS, 1),
        ("dynamo.capture_dynamic_output_shape_ops=on", with_masked_rows_set, ROWS, 1),
        ("dynamo.capture_dynamic_output_shape_ops=on", with_kinds, ROWS, 1),
        ("dynamo.capture_dynamic_output_shape_ops=on", with_load_balancing, ROWS, 1),
        ("torch.sqrt(x) in place of math.sqrt(x)", with_root_of_a_tensor, NUMBERS, 1),
        ("torch._check(len(rows) > 1)", with_rows_that_are_several, ROWS, 1),
        ("(loss * mask).sum() / mask.sum()", with_weighted_loss, {}, 1),
        ("labels.masked_fill(~mask, -100)", with_labels_left_out, {}, 1),
        ("dynamo.trace_autograd_ops=on", with_derivative, {"trace_autograd_ops": True}, 1),
        ("add dynamo.trace_autograd_ops=on to scope=full", with_adapted_weight, {"trace_autograd_ops": True}, 1),
        ("index_add", with_index_add, {}, 1),
        ("padded batches and a mask", with_padded_batches, {}, 1),
        ("self.bank = torch.cat([self.bank[len(rows):], rows])", with_bank_of_fixed_size, {}, 1),
        ("torch.where(self.steps > 5, a, b)", with_condition_on_a_buffer, {}, 1),
        ("torch.library.custom_op and register_autograd", with_custom_operator, {}, 1),
        ("call it on x.detach()", detached_from_an_operator, {}, 1),
        ("write torch.no_grad() in its place", with_no_gradients, {}, 1),
        ("dynamo.allow_unspec_int_on_nn_module=on", with_counter, COUNTERS, 2),  # one of them for the first value
        ("dynamo.allow_unspec_int_on_nn_module=on", with_branch_by_a_counter, COUNTERS, 3),
        ("dynamo.allow_unspec_int_on_nn_module=on", with_layer_by_a_counter, COUNTERS, 3),
    ],
)
def test_an_advised_change_trains_like_eager_as_one_graph(
    advised: str, forward: Step, config: dict[str, bool], graphs: int
) -> None:
    table = (*breaks.BREAKS, *guards.GUARDS, *errors.ERRORS)
    assert [cause.name for cause in table if advised in cause.documented]
    steps = 7 if config is COUNTERS else 3
    expected, _ = trained(forward, {}, None, steps)
    gradients, found = trained(forward, config, "aot_eager", steps)
    torch.testing.assert_close(gradients, expected)
    said = (found.graph_break_reasons, found.fallbacks, found.recompile_limit_hits, found.graphs)
    assert said == ([], [], [], graphs), found.recompile_reasons


@pytest.mark.parametrize(
    ("forward", "config", "cause"),
    [
        (with_root_of_a_value, NUMBERS, "number that is not known"),
        (with_norm_of_some_rows, ROWS, "size that is not known"),
    ],
)
def test_what_torch_must_know_although_a_number_is_in_the_graph_is_told(
    forward: Step, config: dict[str, bool], cause: str
) -> None:
    _, found = trained(forward, config, "aot_eager", 1)
    assert {one and one.name for one in map(breaks.cause_of_break, found.graph_break_reasons)} == {cause}


def prepared(change: Callable[[Any], Any]) -> Diagnostics:
    """Trains a model that is changed before it is compiled."""
    torch._dynamo.reset()
    net: Any = type("Model", (Net,), {"forward": plain})()
    change(net)
    compiled = torch.compile(net, backend="aot_eager")
    with capture_diagnostics() as found:
        for _ in range(3):
            compiled(torch.randn(4, 8)).square().sum().backward()
    return found


def lazy(net: Any) -> None:
    net.layer = nn.LazyLinear(8)
    net(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("advised", "change"),
    [
        (
            "register hooks once, before compiling",
            lambda net: net.layer.register_forward_hook(lambda _, inputs, output: output * 2),
        ),
        ("run one forward before compiling", lazy),
    ],
)
def test_what_is_done_before_compiling_takes_one_graph(advised: str, change: Callable[[Any], Any]) -> None:
    assert [cause.name for cause in breaks.BREAKS if advised in cause.advice]
    found = prepared(change)
    assert (found.graph_break_reasons, found.fallbacks, found.graphs) == ([], [], 1)


@pytest.mark.parametrize("context", [torch.autograd.graph.save_on_cpu, contextlib.nullcontext])
def test_a_context_that_is_entered_outside_compiled_code_and_an_output_whose_gradient_is_kept_take_one_graph(
    context: Any,
) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(8, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    with capture_diagnostics() as found, context():
        y = compiled(torch.randn(4, 8))
        y.retain_grad()
        y.square().sum().backward()
    assert y.grad is not None
    assert (found.graph_break_reasons, found.graphs) == ([], 1)


def test_jagged_tensors_that_are_made_before_the_step_and_plain_ones_taken_out_of_a_subclass_take_one_graph() -> None:
    layer = nn.Linear(8, 8)
    jagged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    labeled = type("Labeled", (Tensor,), {})(torch.ones(3, 8))
    for x in (jagged, labeled.as_subclass(Tensor)):
        torch._dynamo.reset()
        with capture_diagnostics() as found:
            torch.compile(lambda x: layer(x), backend="aot_eager")(x)
        assert (found.graph_break_reasons, found.graphs) == ([], 1)


def test_a_retained_graph_goes_back_twice_without_donated_buffers() -> None:
    layer = nn.Linear(8, 8)
    advice = errors.advice_on_error("donated buffers")
    assert advice is not None
    assert "functorch.donated_buffer=off" in advice
    with torch._functorch.config.patch(donated_buffer=False):
        loss = torch.compile(lambda x: layer(x).tanh().square().sum(), backend="aot_eager")(torch.randn(4, 8))
        loss.backward(retain_graph=True)
        loss.backward()


def test_an_lstm_that_is_unrolled_on_a_cpu_is_told_and_mended_by_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.LSTM(8, 8), torch.randn(2, 4, 8)

    def step() -> list[Tensor]:
        torch._dynamo.reset()
        layer.zero_grad()
        with torch._dynamo.config.patch(allow_rnn=True):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0].sum().backward()
        return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]

    if torch.backends.mkldnn.is_available():
        with pytest.raises(AssertionError) as raised:
            step()
        assert is_compiler_error(raised.value)
        assert "torch.backends.mkldnn.enabled = False" in (errors.advice_on_error(str(raised.value)) or "")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    gradients = step()
    layer.zero_grad()
    layer(x)[0].sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in layer.parameters()])


@before(2, 14)
def test_a_permutation_that_inductor_cannot_rewrite_is_told_and_mended_by_the_advice() -> None:
    x = torch.randn(16, 4)

    def loss(permutation: Callable[[], Tensor], **options: Any) -> Tensor:
        torch._dynamo.reset()
        weights = nn.Parameter(torch.ones(4))
        found: Tensor = torch.compile(lambda x: (x * weights)[permutation()].sum(), options=options)(x)
        found.backward()
        torch.testing.assert_close(weights.grad, x.sum(0))
        return found

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        loss(lambda: torch.randperm(len(x)))
    assert "torch.rand(n, device=x.device).argsort()" in (errors.advice_on_error(str(raised.value)) or "")
    torch.testing.assert_close(loss(lambda: torch.rand(len(x)).argsort()), x.sum())
    torch.testing.assert_close(loss(lambda: torch.randperm(len(x)), pattern_matcher=False), x.sum())


@before(2, 15)
def test_a_factor_that_inductors_rewrites_lose_is_kept_without_them() -> None:
    """As in pytorch 167313."""
    average, x, chosen = torch.randn(8, 16), torch.randn(32, 8), torch.randn(32, 16)

    def updated(**options: Any) -> Tensor:
        torch._dynamo.reset()
        found: Tensor = torch.compile(lambda *given: given[0].add(given[1].t() @ given[2], alpha=0.01), options=options)(
            average, x, chosen
        )
        return found

    right = average + 0.01 * (x.t() @ chosen)
    assert not torch.allclose(updated(), right, atol=1e-3)
    torch.testing.assert_close(updated(pattern_matcher=False), right)


@pytest.mark.skipif(TORCH < (2, 13), reason="compiled without an error by older versions of torch")
def test_an_embedding_with_sparse_gradients_that_is_called_twice_is_told_and_mended_by_dense_ones() -> None:
    first, second = torch.randint(30, (5,)), torch.randint(30, (5,))

    def trained_once(*, sparse: bool, joined: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        table = nn.Embedding(30, 16, sparse=sparse)

        def loss(first: Tensor, second: Tensor) -> Tensor:
            if not joined:
                return table(first).sum() + table(second).square().sum()
            rows = table(torch.cat([first, second]))
            return rows[: len(first)].sum() + rows[len(first) :].square().sum()

        loss(first, second).backward()
        expected = table.weight.grad
        table.zero_grad()
        torch.compile(loss)(first, second).backward()
        torch.testing.assert_close(table.weight.grad, expected)

    for joined in (False, True):
        with pytest.raises((AssertionError, torch._dynamo.exc.TorchDynamoException)) as raised:
            trained_once(sparse=True, joined=joined)
        assert is_compiler_error(raised.value)
        assert "pass sparse=False to torch.nn.Embedding" in (errors.advice_on_error(str(raised.value)) or "")
        trained_once(sparse=False, joined=joined)


def test_a_weighted_embedding_bag_with_sparse_gradients_is_told_and_mended_by_dense_ones() -> None:
    ids, weights = torch.randint(30, (4, 5)), torch.rand(4, 5)

    def trained_once(*, sparse: bool) -> None:
        torch._dynamo.reset()
        table = nn.EmbeddingBag(30, 16, mode="sum", sparse=sparse)
        table(ids, per_sample_weights=weights).square().sum().backward()
        expected = table.weight.grad
        table.zero_grad()
        torch.compile(table, backend="aot_eager")(ids, per_sample_weights=weights).square().sum().backward()
        torch.testing.assert_close(table.weight.grad, expected)

    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        trained_once(sparse=True)
    assert is_compiler_error(raised.value)
    assert "pass sparse=False to torch.nn.Embedding or EmbeddingBag" in (errors.advice_on_error(str(raised.value)) or "")
    trained_once(sparse=False)


def test_scipy_that_fails_only_in_compiled_code_is_mended_by_constants_made_before() -> None:
    from scipy.special import comb

    def basis(x: Tensor, numbers: list[float]) -> Tensor:
        return torch.stack([number * x**power for power, number in enumerate(numbers)])

    x = torch.rand(4)
    expected = basis(x, [float(comb(4, power)) for power in range(5)])
    torch._dynamo.reset()
    with pytest.raises(TypeError) as raised:
        torch.compile(lambda x: basis(x, [float(comb(4, power)) for power in range(5)]), backend="eager")(x)
    advice = errors.advice_on_exception(str(raised.value))
    assert advice is not None
    assert "for constants once in __init__" in advice
    torch._dynamo.reset()
    numbers = [float(comb(4, power)) for power in range(5)]
    torch.testing.assert_close(torch.compile(lambda x: basis(x, numbers), backend="eager", fullgraph=True)(x), expected)


@before(2, 14)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_forward_mode_derivative_that_fails_in_inductor_is_mended_by_going_backwards() -> None:
    torch.manual_seed(0)
    layer, x, v = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8), torch.randn(4, 8)

    def forwards(x: Tensor, v: Tensor) -> Tensor:
        y, derivative = torch.func.jvp(layer, (x,), (v,))
        return y.sum() + (v * derivative).sum()

    def backwards(x: Tensor, v: Tensor) -> Tensor:
        y, pull = torch.func.vjp(layer, x)
        return y.sum() + (v * pull(v)[0]).sum()

    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as raised:
        torch.compile(forwards)(x, v).backward()
    assert is_compiler_error(raised.value)
    assert "go backwards, y, pull = torch.func.vjp(f, x)" in (errors.advice_on_error(str(raised.value)) or "")
    torch.testing.assert_close(torch.compile(backwards, fullgraph=True)(x, v), forwards(x, v))


def test_a_norm_over_a_transposed_sequence_that_fails_with_aot_eager_is_mended_by_contiguous() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor, contiguous: bool) -> Tensor:
            channels = x.transpose(1, 2)
            return self.head(self.norm(channels.contiguous() if contiguous else channels).transpose(1, 2))

    model, x = Normed(), torch.randn(4, 7, 8)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError) as raised:
        compiled(x, False)
    assert "x.transpose(1, 2).contiguous(), or leave out backend=aot_eager" in str(errors.advice_on_exception(str(raised.value)))
    torch.testing.assert_close(compiled(x, True), model(x, False))


def test_a_size_that_is_drawn_before_the_forward_is_handed_in_as_an_int() -> None:
    from torch.nn.functional import interpolate

    assert [cause.name for cause in breaks.BREAKS if "a size as an int" in cause.advice] == ["Python's or numpy's random numbers"]
    layer = nn.Conv2d(1, 1, 3)
    compiled = torch.compile(lambda x, size: layer(interpolate(x, size=(size, size))), backend="aot_eager")
    for kind, number in ((int, 2), (torch.tensor, None)):
        torch._dynamo.reset()
        with capture_diagnostics() as found:
            for size in (8, 10, 12, 14, 8):
                compiled(torch.randn(2, 1, 12, 12), kind(size)).sum().backward()
        assert (found.graphs == number) == (not found.graph_break_reasons) == (kind is int)


@pytest.mark.usefixtures("one_thread")
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.filterwarnings("always:Torchinductor does not support code generation:UserWarning")
def test_what_is_computed_between_ffts_is_fused_as_pairs_and_the_ffts_stay() -> None:
    weights = torch.randn(4, 3, 2, requires_grad=True)

    def filtered(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(weights), n=4)

    def filtered_by_pairs(x: Tensor) -> Tensor:
        (a, b), (c, d) = torch.view_as_real(torch.fft.rfft(x)).unbind(-1), weights.unbind(-1)
        return torch.fft.irfft(torch.view_as_complex(torch.stack([a * c - b * d, a * d + b * c], -1)), n=4)

    def step(forward: Callable[[Tensor], Tensor], *, is_compiled: bool) -> tuple[Tensor, list[str]]:
        torch._dynamo.reset()
        weights.grad = None
        uncached = torch._inductor.config.patch({"fx_graph_cache": False})
        with capture_diagnostics() as found, uncached:
            (torch.compile(forward) if is_compiled else forward)(torch.arange(16.0).view(4, 4)).square().sum().backward()
        assert weights.grad is not None
        return weights.grad, [hint for hint in found.perf_hints if "aten.mul.Tensor (complex" in hint or "aten._fft" in hint]

    expected, _ = step(filtered, is_compiled=False)
    before, after = (step(forward, is_compiled=True) for forward in (filtered, filtered_by_pairs))
    torch.testing.assert_close((before[0], after[0]), (expected, expected))
    multiplied = [hint for hint in before[1] if "aten.mul" in hint]
    assert multiplied
    assert all("torch.view_as_real(x) of what an FFT returns" in (advise_on_hint(hint) or "") for hint in multiplied)
    assert after[1]
    assert all("as it should" in (advise_on_hint(hint) or "") for hint in after[1])


WRONG_LAYOUT = (
    "expected size 8==8, stride 4==8 at dim=0\nError in op: torch.ops.{}\n"
    "This error most often comes from a incorrect fake (aka meta) kernel for a custom op."
)


@pytest.mark.parametrize(
    ("operator", "cause"),
    [
        ("aten.convolution.default", "operator of torch with another layout"),
        ("mine.flipped.default", "custom operator with a wrong fake implementation"),
    ],
)
def test_an_operator_of_torch_is_not_the_users(operator: str, cause: str) -> None:
    found = errors.cause_of_error(WRONG_LAYOUT.format(operator))
    assert found is not None
    assert found.name == cause


def test_layers_left_out_at_random_are_told_and_mended_by_the_advice() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    def trained_once(layerdrop: float) -> Diagnostics:
        layers = {"encoder_layers": 2, "decoder_layers": 1, "encoder_layerdrop": layerdrop}
        sizes = {
            f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("attention_heads", 2), ("ffn_dim", 8))
        }
        config = BartConfig(**layers, **sizes, d_model=8, vocab_size=32, use_cache=False)
        torch.manual_seed(0)
        model = BartForConditionalGeneration(config).train()
        ids = torch.randint(3, 32, (2, 6))
        torch.compiler.reset()
        with capture_diagnostics() as found:
            torch.compile(model, backend="aot_eager", dynamic=False)(input_ids=ids, labels=ids).loss.backward()
        return found

    broken = trained_once(0.5)
    assert broken.fallbacks
    branches = [breaks.advice_on_break(text) or "" for text in broken.graph_break_reasons if "Data-dependent branching" in text]
    assert branches
    assert all("LayerDrop draws a number for each layer" in advice for advice in branches)
    own = "train.py:3 in forward: Data-dependent branching\n  code: if torch.rand(()) < self.layerdrop:"
    assert "torch.where(condition, a, b)" in (breaks.advice_on_break(own) or ""), "words of the user's line decide nothing"
    in_library = f"{own}\n  library: transformers".replace("train.py", "transformers/models/whisper/modeling_whisper.py")
    assert "LayerDrop" in (breaks.advice_on_break(in_library) or "")
    mended = trained_once(0.0)
    assert (mended.graph_break_reasons, mended.fallbacks, mended.graphs) == ([], [], 1)


def test_a_module_with_a_spectral_norm_that_is_called_twice_is_mended_by_going_back_after_each_call() -> None:
    torch.compiler.reset()
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 1)), nn.ReLU(), nn.Conv2d(4, 4, 3))
    compiled, images = torch.compile(module, dynamic=False), torch.randn(2, 4, 3, 8, 8)
    for _ in range(3):
        for batch in images:
            compiled(batch).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        (compiled(images[0]).sum() + compiled(images[1]).sum()).backward()
    assert "go back after each call" in (errors.advice_on_error(str(raised.value)) or "")
