"""The table of causes: each has a test and a line in the documentation, and labels use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_models import TORCH, Net, run, with_break_in_loop
from test_break_causes import BREAKS
from test_recompile_causes import GUARDS
from torch import Tensor

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics.advice import KnownSizes, advise_on_hint, explain_recompiles
from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.harness.diagnostics.compiler_errors import is_compiler_error
from compile_sweep.schema.causes import breaks, errors, guards
from compile_sweep.schema.causes.recompiles import fold_recompiles
from compile_sweep.schema.causes.remedies import remedy_of
from compile_sweep.schema.outcome import Death, Label, judge_death, judge_measurement
from compile_sweep.schema.settings import CompileSettings


def force_loss(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(net.layer(x).tanh().sum(), x, create_graph=True)
    return force.square().sum()


def test_a_double_backward_is_the_compilers_error_and_is_mended_by_the_advice() -> None:
    net = Net()
    layer = torch.compile(net.layer, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    (force,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward") as raised:
        force.square().sum().backward()
    assert is_compiler_error(raised.value)
    advice = errors.advice_on_error(str(raised.value))
    assert advice is not None
    assert "torch.func.grad(lambda x: model(x).sum())(x)" in advice
    assert "add dynamo.trace_autograd_ops=on to scope=full" in advice
    record = {"label": "compile-error", "reason": str(raised.value)}
    assert remedy_of(record) == "dynamo.trace_autograd_ops=on"
    assert remedy_of({**record, "reason": "compiled with non-empty donated buffers"}) == "functorch.donated_buffer=off"

    def loss(x: Tensor) -> Tensor:
        return torch.func.grad(lambda places: net.layer(places).tanh().sum())(x).square().sum()

    torch._dynamo.reset()
    torch.compile(loss, backend="aot_eager")(torch.randn(4, 8)).backward()
    assert net.layer.weight.grad is not None
    force_loss(net, torch.randn(4, 8)).backward()


@pytest.mark.slow
@pytest.mark.parametrize("asks_before", [True, False])
def test_a_gradient_penalty_is_one_graph_where_autograd_is_traced_and_its_input_asks_for_gradients_before(
    asks_before: bool,
) -> None:
    def penalty(net: Net, x: Tensor) -> Tensor:
        between = 0.3 * x + 0.7
        between = between if asks_before else between.requires_grad_()
        (slope,) = torch.autograd.grad(net.layer(between).tanh().sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8, requires_grad=asks_before)
    (expected,) = torch.autograd.grad(penalty(net, x), net.layer.weight)
    with torch._dynamo.config.patch(trace_autograd_ops=True), capture_diagnostics() as found:
        torch.compile(penalty, backend="aot_eager")(net, x).backward()
    torch.testing.assert_close(net.layer.weight.grad, expected)
    told = {one and one.name for one in map(breaks.cause_of_break, found.graph_break_reasons)}
    assert (found.graphs, told) == ((1, set()) if asks_before else (found.graphs, {"requires_grad_() in the forward"}))


def test_a_marked_length_that_the_code_fixes_is_the_compilers_error_and_is_mended_by_the_advice() -> None:
    x, fixed = torch.zeros(3, 8), torch.zeros(3, 8)
    torch._dynamo.mark_dynamic(x, 1)
    add = torch.compile(lambda x: x + fixed, backend="eager")
    with pytest.raises(RuntimeError) as raised:
        add(x)
    assert is_compiler_error(raised.value)
    advice = errors.advice_on_error(str(raised.value))
    assert advice is not None
    assert "dynamic=auto" in advice
    torch._dynamo.reset()
    torch.compile(lambda x: x + fixed, backend="eager", dynamic=None)(torch.zeros(3, 8))


def with_gradients_now_and_then(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    with torch.set_grad_enabled(net.count % 4 != 0):
        return net.layer(x)


def with_gradients_decided(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    with torch.set_grad_enabled(not net.count % 4):
        return net.layer(x)


def test_a_number_that_must_be_a_constant_is_the_compilers_error_and_is_mended_by_the_advice() -> None:
    with (
        torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True),
        pytest.raises(Exception, match="is not a const") as raised,
    ):
        run(with_gradients_now_and_then, steps=4)
    assert is_compiler_error(raised.value)
    assert "set_grad_enabled(not step % 4)" in (errors.advice_on_error(str(raised.value)) or "")
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert run(with_gradients_decided, steps=9).graphs == 3  # the first value, and two answers


def test_an_error_of_the_models_own_code_is_not_the_compilers() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.compile(lambda x: x @ torch.ones(3, 3), backend="aot_eager", dynamic=False)(torch.zeros(2, 3)).sum().backward()
    assert not is_compiler_error(raised.value)


def test_a_custom_operator_without_a_fake_implementation_is_mended_by_the_advice() -> None:

    @torch.library.custom_op("tests_causes::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    compiled = torch.compile(lambda x: doubled(x) + 1, backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        compiled(torch.ones(2))
    reason = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert "making fake tensor call: There was no fake impl registered for <CustomOpDef(tests_causes::doubled)>" in reason
    assert "@torch.library.register_fake('tests_causes::doubled')" in reason
    doubled.register_fake(torch.empty_like)
    torch._dynamo.reset()
    assert compiled(torch.ones(2)).tolist() == [3, 3]


@pytest.mark.slow
def test_a_custom_operator_with_a_wrong_fake_implementation_is_the_compilers_error_and_is_mended_by_the_advice() -> None:

    def flipped(x: Tensor) -> Tensor:
        return x.t().contiguous()

    # Two operators, because Inductor's cache does not know that a fake implementation changed.
    wrong, right = (
        torch.library.custom_op(f"tests_causes::flipped_{name}", flipped, mutates_args=(), schema="(Tensor x) -> Tensor")
        for name in ("wrong", "right")
    )
    wrong.register_fake(torch.empty_like)
    right.register_fake(lambda x: x.new_empty(x.size(1), x.size(0)))
    with pytest.raises(AssertionError) as raised:
        torch.compile(lambda x: wrong(x))(torch.ones(2, 3))
    reason = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert reason.startswith("AssertionError: expected size")
    assert "x.new_empty(x.size(1), x.size(0))" in reason
    assert torch.compile(lambda x: right(x))(torch.ones(2, 3)).tolist() == [[1, 1]] * 3


def test_a_wrong_fake_implementation_that_only_the_backward_meets_is_mended_by_the_advice() -> None:

    @torch.library.custom_op("tests_causes::halved", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return x[: len(x) // 2].clone()

    halved.register_fake(torch.empty_like)
    halved.register_autograd(lambda ctx, gradient: torch.cat([gradient, torch.zeros_like(gradient)]))
    x = torch.ones(4, 2, requires_grad=True)
    compiled = torch.compile(lambda x: halved(x).sum(), backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        compiled(x)
    assert "torch.library.opcheck(" in advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    halved.register_fake(lambda x: x.new_empty(len(x) // 2, x.size(1)))
    torch._dynamo.reset()
    compiled(x).backward()


def test_a_custom_operator_without_a_backward_is_told_in_the_reason_and_mended_by_the_advice() -> None:

    @torch.library.custom_op("tests_causes::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return 3 * x

    tripled.register_fake(torch.empty_like)
    x = torch.ones(2, requires_grad=True)
    compiled = torch.compile(lambda x: tripled(x).sum(), backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        compiled(x)
    reason = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert "raised: RuntimeError: Trying to backward through tests_causes.tripled" in reason
    assert "my_op.register_autograd(" in reason
    tripled.register_autograd(lambda ctx, gradient: 3 * gradient, setup_context=lambda ctx, inputs, output: None)
    torch._dynamo.reset()
    compiled(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]


def test_an_operator_that_fails_while_it_is_traced_is_mended_by_a_look_at_the_shapes() -> None:
    net, square = Net(), torch.ones(3, 3)

    def with_try(x: Tensor) -> Tensor:
        try:
            x = x @ square
        except RuntimeError:
            x = x * 2
        return net.layer(x)

    def by_shape(x: Tensor) -> Tensor:
        return net.layer(x @ square if x.size(1) == len(square) else x * 2)

    x = torch.randn(4, 8)
    torch._dynamo.reset()
    if TORCH < (2, 14):  # from which on the exception is caught while tracing, too
        with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
            torch.compile(with_try, backend="eager")(x)
        assert is_compiler_error(raised.value)
        assert "decide by shapes or dtypes" in (errors.advice_on_error(str(raised.value)) or "")
    torch.testing.assert_close(torch.compile(by_shape, backend="eager", fullgraph=True)(x), with_try(x))


def advice_of_a_trial(error: BaseException, label: Label = Label.EXCEPTION, recompiles: Sequence[str] = ()) -> str:
    """Returns the verdict's text on a trial that raised an exception, by default of the workload."""
    times: dict[str, Any] = {"in_phase_s": 1.0, "elapsed_s": 9.0, "compile_deadline_s": 60.0, "trial_deadline_s": 90.0}
    verdict = judge_death(
        Death(
            phase="warming-up",
            **times,
            recompiles=recompiles,
            error_type=f"{type(error).__module__}.{type(error).__name__}",
            error_text=str(error),
            error_is_compilers=is_compiler_error(error),
        )
    )
    assert verdict.label is label
    return verdict.reason or ""


def test_a_schedule_with_fewer_steps_than_a_trial_says_so() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    optimizer.step()
    for _ in range(3):
        schedule.step()
    with pytest.raises(ValueError, match="Tried to step") as raised:
        schedule.step()
    assert "the number of steps of a whole training run" in advice_of_a_trial(raised.value)


@pytest.mark.slow
def test_a_state_that_holds_the_graph_of_the_step_before_is_no_error_of_the_compilers_and_detached_it_works() -> None:
    def run_steps(*, detaches: bool) -> None:
        torch._dynamo.reset()
        net = Net()

        def forward(x: Tensor) -> Tensor:
            y = net.layer(x)
            mean = 0.9 * net.heat + 0.1 * y.exp().mean()
            net.heat = mean.detach() if detaches else mean
            return (y * net.heat).sum()

        step = torch.compile(forward, backend="aot_eager")
        for _ in range(2):
            step(torch.randn(4, 8)).backward()

    with pytest.raises(RuntimeError, match="second time") as raised:
        run_steps(detaches=False)
    assert not is_compiler_error(raised.value)
    assert "self.state = state.detach()" in advice_of_a_trial(raised.value)
    run_steps(detaches=True)


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 does not trace quantile")
def test_numpy_that_torch_computes_differently_is_told_and_mended_by_torch() -> None:
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    with pytest.raises(TypeError) as raised:
        torch.compile(lambda x: x * float(np.percentile(x.numpy(), 90)), backend="eager")(x)
    assert "compute this with torch" in advice_of_a_trial(raised.value)
    torch._dynamo.reset()
    found = torch.compile(lambda x: x * x.quantile(0.9), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(found, x * float(np.percentile(x.numpy(), 90)))


def test_a_buffer_that_compiled_code_keeps_for_its_backward_may_change_after_it() -> None:
    net, scale = Net(), torch.ones(8)
    torch._dynamo.reset()
    step = torch.compile(lambda x: (net.layer(x) * scale.sigmoid()).tanh().sum(), backend="aot_eager_decomp_partition")
    loss = step(torch.randn(4, 8))
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="inplace") as raised:
        loss.backward()
    assert is_compiler_error(raised.value)
    assert "change it after the backward" in (errors.advice_on_error(str(raised.value)) or "")
    step(torch.randn(4, 8)).backward()
    scale.mul_(2)


def test_an_error_of_fullgraph_is_mended_by_the_advice() -> None:
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as raised:
        torch.compile(lambda x: print() or x * 16, backend="eager", fullgraph=True)(torch.ones(2))
    reason = advice_of_a_trial(raised.value, Label.COMPILE_ERROR)
    assert ", at test_causes.py:" in reason
    assert "remove fullgraph=on, or the graph break: print, log and warn outside the forward" in reason
    torch._dynamo.reset()
    torch.compile(lambda x: x * 16, backend="eager", fullgraph=True)(torch.ones(2))


def test_a_recompile_limit_under_fullgraph_is_one_and_has_the_advice_of_its_guard() -> None:
    net = type("Model", (Net,), {"forward": with_a_number_of_steps})()
    step = torch.compile(net, backend="eager", fullgraph=True)
    with capture_diagnostics() as found:
        for _ in range(8):
            step(torch.ones(4, 8))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) as raised:
            step(torch.ones(4, 8))
    assert is_compiler_error(raised.value)
    reason = advice_of_a_trial(raised.value, Label.RECOMPILE_LIMIT, found.recompile_reasons)
    assert "self.register_buffer('count'" in reason


def with_a_number_of_steps(net: Net, x: Tensor) -> Tensor:
    net.count += 1
    return net.layer(x) * net.count


def test_the_users_own_line_does_not_decide_about_an_error() -> None:
    text = "Failed to trace builtin operator\n  Explanation: builtin operator `print`\n\nfrom user code:\n  print(complex)"
    assert "print, log and warn" in (errors.advice_on_error(text) or "")


def test_every_cause_has_its_test() -> None:
    shown = {case.cause for case in BREAKS}
    elsewhere = {"modules that are added", "number that crosses a limit", "blocks of different sizes"}
    elsewhere |= {"blocks of different kinds", "length after a graph break", "number of each block"}
    elsewhere |= {"cache of keys and values", "argument of changing type", "KL divergence"}
    elsewhere |= {"number of rounds or modules", "end of a slice", "list of another length"}
    elsewhere |= {"arguments of different calls", "layout in memory", "first value of a number", "view of another tensor"}
    shown |= {
        "exception in the forward",
        "backward hook of a module",
        "size that is not known",
        "number that is not known",
        "metric in the forward",
        "requires_grad_() by transformers",
        "configuration copied in the forward",
        "layers left out at random",
        "tensor without dimensions as an index",
        "state in a class",
        "break in an argument",
        "text of a number",
        "module picked by a tensor",
        "rows picked by torch.nn",
    }
    shown |= {"number of numpy"} if torch_version() < (2, 13) else set()  # its code does not break there
    assert shown == {cause.name for cause in breaks.BREAKS}
    changed = {"train and eval mode", "gradients switched on and off", "autocast switched on and off", "learning rate"}
    changed |= {"number of an optimizer"}
    changed |= {"frozen and trained parameters", "global setting of torch"}
    elsewhere |= {"number that the forward is given", "gradient read in the forward", "batches of several kinds"}
    elsewhere |= {"one tensor under several names"}
    assert {case.cause for case in GUARDS} | changed | elsewhere == {cause.name for cause in guards.GUARDS}


@pytest.mark.parametrize("headline", ["Unsupported Tensor.item() call", "Something that nobody has met"])
def test_a_break_in_a_librarys_own_code_is_told_as_the_librarys(headline: str) -> None:
    text = f"transformers/models/detr/modeling_detr.py:7 in forward: {headline}\n  code: x\n  library: transformers"
    advice = breaks.advice_on_break(text)
    assert advice is not None
    assert advice.startswith("the line is in transformers, not in your code")
    assert ("keep the value a tensor" in advice) == ("item" in headline)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("self.layers.0.norm.bias", "blocks of different sizes"),
        ("self.table", "cache that grows"),
        ("self.bias_table", "cache that grows"),
    ],
)
def test_weights_of_other_sizes_are_blocks_and_no_cache(source: str, cause: str) -> None:
    found = guards.cause_of_guard(f"tensor '{source}' size mismatch at index 0. expected 8, actual 16")
    assert found is not None
    assert found.name == cause


def test_arguments_of_blocks_of_different_sizes_have_their_cause_and_lengths_do_not() -> None:
    texts = [
        "forward (net.py:3): tensor 'self.norm.bias' size mismatch at index 0. expected 8, actual 16",
        "forward (net.py:3): tensor 'x' size mismatch at index 1. expected 8, actual 16",
        "forward (net.py:3): tensor 'mask' size mismatch at index 1. expected 31, actual 24",
    ]
    found = [guards.cause_of_series(series, (), texts) for series in fold_recompiles(texts)]
    assert [cause and cause.name for cause in found] == ["blocks of different sizes"] * 2 + [None]
    assert found[0] is not None
    assert found[0].advice.endswith("use scope=full without graph breaks between them")


def test_the_documentation_lists_every_cause_with_its_advice() -> None:
    text = (Path(__file__).parents[3] / "docs" / "causes.md").read_text(encoding="utf-8")
    rows = [
        f"| {cause.name} | {cause.documented} |" for cause in (*breaks.BREAKS, *guards.GUARDS, *errors.ERRORS, *errors.EXCEPTIONS)
    ]
    assert [row for row in rows if row not in text] == []
    assert text.count("\n| ") - 4 == len(set(rows)), "a row of a cause that is no more"


MEASURED: dict[str, Any] = {
    "numerics": {"status": "ok"}, "recompile_limit_hits": [], "fallbacks": [], "cudagraph_skips": 0,
    "cudagraph_skip_reasons": [], "data_wait_share": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("guard", "helps", "never"),
    [
        ("self.temperature == 1.998", "hand it in as a tensor", "lengths"),
        ("len(self.history) == 7", "keep what grows out of the forward", "recompile_limit"),
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


def test_a_run_that_diverges_and_hit_a_recompile_limit_is_told_both() -> None:
    numerics = {"status": "diverges", "first_bad_step": 0, "worst": "loss: off", "advice": "try --bisect"}
    measured = {**MEASURED, "numerics": numerics, "recompile_limit_hits": ["f (m.py:1) hit recompile_limit 8: self.steps == 7"]}
    verdict = judge_measurement(measured, claims_cudagraphs=False)
    assert verdict.label is Label.DIVERGES
    assert verdict.reason is not None
    assert "try --bisect; and torch stopped compiling and runs eagerly, because f (m.py:1) hit" in verdict.reason
    assert "self.register_buffer('steps'" in verdict.reason


def test_the_buffer_for_a_number_begins_with_its_first_value() -> None:
    guards_that_failed = [f"forward (model.py:10): self.temperature == {value}" for value in (2.0, 1.998)]
    hit = "forward (model.py:10) hit recompile_limit 2: self.temperature == 1.998"
    advice = guards.advice_on_limit(hit, guards_that_failed)
    assert "'temperature', torch.tensor(2.0))" in advice
    assert "self.temperature = self.temperature * 0.99," in advice
    assert "'steps', torch.zeros(()))" in guards.advice_on_limit("f (m.py:1) hit recompile_limit 8: self.steps == 7")
    rising = guards.advice_on_limit("f (m.py:1) hit recompile_limit 8: self.beta == 0.0")
    assert "'beta', torch.tensor(0.0))" in rising
    assert "self.beta = self.beta + 0.01," in rising
    computed = guards.advice_on_limit("f (m.py:1) hit recompile_limit 8: min(1.0, 0.01 + self.losses[0].beta) == 0.02")
    assert "'beta', torch.tensor(…))" in computed, "the expression does not tell what it began with"


def test_a_fallback_has_the_advice_of_the_break_at_its_line() -> None:
    found = run(with_break_in_loop)
    assert found.fallbacks
    measured = {**MEASURED, "fallbacks": found.fallbacks, "graph_break_reasons": found.graph_break_reasons}
    verdict = judge_measurement(measured, claims_cudagraphs=False)
    assert "torch.compile cannot trace this operation of Python" in (verdict.reason or "")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("torch.compile with aot_autograd does not currently support double backward", "differentiated twice"),
        ("RuntimeError: Cannot set version_counter for inference tensor", "write torch.no_grad() in its place"),
        (
            "Constraints violated (L['x'].size()[1])!\n\nUser stack:\n"
            '  File "/a/sound.py", line 9, in forward\n  File "/a/site-packages/torch/functional.py", line 3, in istft\n',
            "at sound.py:9 (in phase warming-up); dynamic=mark insists",
        ),
        (
            'Constraints violated!\nUser stack:\n  File "/b/site-packages/rwkv/model.py", line 5, in forward\n',
            "at rwkv/model.py:5 (in phase warming-up)",
        ),
    ],
)
def test_an_error_of_the_compilers_says_what_helps(said: str, advice: str) -> None:
    known: dict[str, Any] = {"phase": "warming-up", "in_phase_s": 5.0, "elapsed_s": 60.0, "compile_deadline_s": 600.0}
    death = Death(
        **known,
        trial_deadline_s=900.0,
        error_type="builtins.RuntimeError",
        error_text=said,
        error_is_compilers=True,
    )
    verdict = judge_death(death)
    assert verdict.label is Label.COMPILE_ERROR
    assert advice in (verdict.reason or "")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.filterwarnings("always:Torchinductor does not support code generation:UserWarning")
def test_complex_numbers_are_told_and_pairs_of_real_numbers_mend_it() -> None:
    angle = torch.rand(8)

    def turned(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (8, 2))) * torch.polar(torch.ones(8), angle)).flatten(-2)

    def turned_by_pairs(x: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (8, 2)).unbind(-1)
        return torch.stack(
            (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()), dim=-1
        ).flatten(-2)

    x = torch.randn(4, 16)
    torch.testing.assert_close(turned(x), turned_by_pairs(x))
    uncached = torch._inductor.config.patch({"cpp.vec_isa_ok": True, "fx_graph_cache": False})
    hints = []
    for function in (turned, turned_by_pairs):
        torch._dynamo.reset()
        with capture_diagnostics() as found, uncached:
            torch.testing.assert_close(torch.compile(function, dynamic=False)(x), function(x))
        hints.append([hint for hint in found.perf_hints if "omplex" in hint])
    before, after = hints
    assert before
    assert after == []
    advice = [advise_on_hint(hint) or "" for hint in before]
    assert all("compute with pairs of real numbers, such as cos and sin" in one for one in advice), before


CLOCK = "net.py:5 in forward: x\n  code: began=time.time()\n  explanation: Dynamo cannot trace the builtin `time.time.`"
DRAWN = "net.py:5 in forward: Unsupported Tensor.item() call\n  code: begin = int(torch.randint(4, ()))"
LATER = "net.py:9 in forward: Call to `torch._dynamo.graph_break()`\n  code: graph_break()"


@pytest.mark.parametrize(
    ("recompile", "breaks_before", "cause"),
    [
        ("began == 1.5 # y = f(began) # net.py:10 in forward", [LATER, CLOCK], "file, clock or system call"),
        ("begin == 3 # x[begin:] # net.py:10 in forward", [LATER, DRAWN], "value read from a tensor"),
        ("(0.1*___stack0 + 0.9*model.mean) == 1.5", [], "value read from a tensor"),
    ],
)
def test_a_number_that_an_earlier_break_returned_has_the_cause_of_that_break(
    recompile: str, breaks_before: list[str], cause: str
) -> None:
    (series,) = fold_recompiles([f"forward from line 9 on (net.py:3): {recompile}"])
    found = guards.cause_of_series(series, breaks_before)
    assert found is not None
    assert found.name == cause


def test_what_breaks_inside_a_metric_is_told_to_be_updated_after_the_step() -> None:
    text = (
        "train.py:9 in loss: Dynamic shape operator\n  code: metric(y)\n  inside: torchmetrics/functional/scores.py:320\n"
        "  library: torchmetrics\n  explanation: Operator `aten._unique2.default`'s output shape depends on input Tensor data."
    )
    assert "update metrics after the step" in (breaks.advice_on_break(text) or "")
    fallback = "wrapped (torchmetrics/metric.py:543) runs eagerly: not converted, at torchmetrics/functional/scores.py:320"
    assert breaks.advice_on_fallback(fallback, [text]) == breaks.advice_on_break(text)


def test_rows_that_shared_code_is_given_depend_on_the_data_where_a_break_does() -> None:
    (series,) = fold_recompiles(["forward of Act (act.py:3): tensor 'input' size mismatch at index 0. expected 33, actual 28"])
    settings = CompileSettings.parse("scope=full,dynamic=auto")
    sizes = KnownSizes(settings=settings, max_length=16, batch_size=4)
    picked = "moe.py:7 in forward: Dynamic shape operator\n  explanation: Operator `aten.nonzero.default`'s output shape depends"
    told = [explain_recompiles(series, sizes, seen) for seen in ([picked], [])]
    assert ["the number of rows" in one for one in told] == [True, False]


@pytest.mark.parametrize(
    ("guard", "cause"),
    [
        ("((1 + self.model.steps) % 2) == 0", "number that crosses a limit"),
        ("(1 + self.model.steps) == 7", "Python number that changes"),
        ("(x.size()[0] % 8) == 0", None),
    ],
)
def test_a_remainder_is_a_condition_of_a_number(guard: str, cause: str | None) -> None:
    found = guards.cause_of_guard(guard)
    assert (found.name if found else None) == cause
