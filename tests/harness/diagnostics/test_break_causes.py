"""Every cause of graph breaks is recognized in a model that has it, and its advice fixes that model: run before and after."""

from __future__ import annotations

import contextlib
import sys
import warnings

import pytest
import torch
from breaks_of_python import (
    BREAKS_OF_PYTHON,
    doubled,
    with_break_in_a_comprehension,
    with_forked_state,
    with_loop,
    with_match_kept,
    with_text_of_values,
    with_ufunc,
)
from breaks_of_torch import BREAKS_OF_TORCH, with_optimizer_made_there, with_recurrent_layer
from breaks_of_values import (
    BREAKS_OF_VALUES,
    with_copy,
    with_lengths_marked_one_by_one,
    with_setup_told_by_a_buffer,
    with_setup_told_by_a_number,
)
from faulty_models import FEW, TORCH, Case, Forward, Net, is_clean, plain, run, run_mended, with_break_in_loop
from torch import Tensor, nn

from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.schema.causes import breaks
from compile_sweep.schema.causes.remedies import remedy_of


def _raises() -> None:
    raise KeyError("missing")


def with_exception(net: Net, x: Tensor) -> Tensor:
    _raises()
    return net.layer(x)


def with_exception_caught(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(KeyError):
        _raises()
    return net.layer(x)


def with_break_in_a_try(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    try:
        y = doubled(y)
    except ValueError:
        net.last = None
    return y


def with_break_after_a_try(net: Net, x: Tensor) -> Tensor:
    try:
        y = net.layer(x)
    except ValueError:
        net.last = None
    return doubled(y)


def with_break_in_an_own_context(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        return doubled(net.layer(x))
    return x


def with_break_after_an_own_context(net: Net, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        y = net.layer(x)
    return doubled(y)


def with_rows_replaced(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    chosen = y.abs().mean(1) > 0.2
    z = y.clone()
    z[chosen] = net.layers[0](y[chosen])
    return z


def test_a_backend_that_fails_behind_a_break_has_the_advice_of_that_break() -> None:
    net = type("Model", (Net,), {"forward": with_rows_replaced})()
    with capture_diagnostics() as found:
        torch.compile(net, backend="aot_eager")(torch.randn(4, 8))
    (eager,) = found.fallbacks
    assert "Backend compiler exception" in eager
    assert (breaks.advice_on_fallback(eager, found.graph_break_reasons) or "").startswith(
        "the number of rows depends on the data"
    )
    assert {cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))} == {
        "output of unknown size"
    }


def with_loop_beside_a_gradient(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(net.layer(x).tanh().sum(), x, create_graph=True)
    torch._dynamo.graph_break()
    return rounds_until_they_converge(net, force)


def rounds_until_they_converge(net: Net, x: Tensor) -> Tensor:
    for _ in range(20):
        x = net.layer(x).tanh()
        if x.norm() < 0.1:
            break
    return x


def test_a_function_that_runs_eagerly_is_not_said_to_be_mended_by_what_helps_against_another_break() -> None:
    net = type("Model", (Net,), {"forward": with_loop_beside_a_gradient})()
    with capture_diagnostics() as found:
        torch.compile(net, backend="eager")(torch.randn(4, 8))
    assert any("rounds_until_they_converge" in text for text in found.fallbacks)
    named = {cause.name: cause.remedy for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))}
    assert named["gradient taken in the forward"] == "dynamo.trace_autograd_ops=on"
    record = {"label": "silent-fallback", "reason": "", "graph_break_reasons": found.graph_break_reasons}
    there = [text for text in found.fallbacks if "rounds_until_they_converge" in text]
    assert remedy_of({**record, "fallbacks": there}) is None
    assert remedy_of({**record, "label": None, "fallbacks": []}) == "dynamo.trace_autograd_ops=on"


def with_break_after_a_loop(net: Net, x: Tensor) -> Tensor:
    return doubled(with_loop(net, x))


BREAKS = [*BREAKS_OF_VALUES, *BREAKS_OF_PYTHON, *BREAKS_OF_TORCH]

_ON_NEWER_TORCH = {with_forked_state: ["value that is not a tensor"], with_ufunc: ["operator of another library"]}
"""More general causes, whose advice also mends the model, where newer versions of torch say less about the break."""

_BEFORE_2_13 = {
    with_copy: ["copy of a tensor by Python"],
    with_match_kept: ["untraceable builtin"],
    with_break_in_a_comprehension: ["disabled function"],
}
"""Causes of the breaks that older versions of torch have first in these models; their advice also mends them."""


@pytest.mark.slow
@pytest.mark.parametrize("case", BREAKS, ids=lambda case: f"{case.cause}: {case.before.__name__}")
def test_a_break_has_its_cause_and_the_advice_mends_it(case: Case) -> None:
    if case.before is with_text_of_values and TORCH >= (2, 14):
        pytest.skip("Dynamo of torch 2.14 and 2.15 raises an internal error when it formats a value read by .item()")
    found = run(case.before, steps=FEW)
    if (TORCH >= (2, 14) or sys.version_info >= (3, 12)) and is_clean(found):
        pytest.skip("this version of torch or Python has no break here")
    named = [cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))]
    told = [cause.name for text in found.fallbacks if (cause := breaks.cause_of_break(f"x: {text}"))]
    others = _ON_NEWER_TORCH if TORCH >= (2, 14) else _BEFORE_2_13 if TORCH < (2, 13) else {}
    expected = {case.cause, *others.get(case.before, ())}
    assert expected & {*named, *told}, [*found.graph_break_reasons, *found.fallbacks]
    assert is_clean(run_mended(case.after))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [with_setup_told_by_a_buffer, with_setup_told_by_a_number])
def test_a_flag_of_a_setup_from_the_first_batch_is_to_be_a_bool(forward: Forward) -> None:
    (told,) = run(forward, steps=FEW).graph_break_reasons
    assert "self.ready = True in place of self.ready.fill_(1)" in (breaks.advice_on_break(told) or "")


def with_break_in_an_argument(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).add(doubled(x))


def with_argument_in_a_line_of_its_own(net: Net, x: Tensor) -> Tensor:
    y, added = net.layer(x), doubled(x)
    return y.add(added)


@pytest.mark.slow
def test_a_method_of_a_tensor_that_is_called_after_a_break_in_its_arguments_is_no_call_of_another_library() -> None:
    found = run(with_break_in_an_argument, steps=FEW)
    named = {cause and cause.name for cause in map(breaks.cause_of_break, found.graph_break_reasons)}
    if named == {"disabled function"}:
        pytest.skip("this version of torch calls the method in the graph")
    assert named == {"disabled function", "break in an argument"}
    (left,) = run(with_argument_in_a_line_of_its_own, steps=FEW).graph_break_reasons
    assert breaks.cause_of_break(left) == breaks.cause_of_break(found.graph_break_reasons[0])


@pytest.mark.slow
def test_what_runs_eagerly_because_it_makes_an_optimizer_is_not_said_to_be_of_torchs_own_break() -> None:
    found = run(with_optimizer_made_there, steps=FEW)
    told = {breaks.advice_on_fallback(text, found.graph_break_reasons) for text in found.fallbacks}
    assert told <= {next(cause.advice for cause in breaks.BREAKS if cause.name == "optimizer made in the forward")}
    assert not {breaks.advice_on_break(text) for text in found.graph_break_reasons} & {*breaks.NOTHING_TO_DO}


@pytest.mark.slow
def test_an_exception_that_leaves_the_forward_is_a_cause_and_one_that_it_catches_is_not() -> None:
    with capture_diagnostics() as found, contextlib.suppress(KeyError):
        torch._dynamo.reset()
        torch.compile(lambda x: with_exception(Net(), x), backend="eager")(torch.ones(4, 8))
    named = {cause.name for text in found.graph_break_reasons if (cause := breaks.cause_of_break(text))}
    assert "exception in the forward" in named, found
    assert is_clean(run(with_exception_caught))


@pytest.mark.slow
def test_a_recurrent_layer_is_one_graph_for_each_length_where_dynamo_is_told_to_trace_it() -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        assert is_clean(run(with_recurrent_layer))
        layer = torch.compile(nn.GRU(2, 2), backend="eager")
        with capture_diagnostics() as found:
            for length in (3, 5, 4):
                layer(torch.ones(length, 1, 2))
    assert found.graphs == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch itself, before 2.13
def test_a_backward_hook_of_a_module_is_told_and_hooks_of_its_weight_and_its_output_are_one_graph() -> None:
    def with_hook_of_output(net: Net, x: Tensor) -> Tensor:
        y = net.layer(x)
        y.register_hook(lambda gradient: gradient * 2)
        return net.layers[0](y)

    def hooked(net: Net, number: int) -> contextlib.nullcontext[None]:
        if number == 0:
            net.layer.register_full_backward_hook(lambda module, inputs, outputs: None)
        return contextlib.nullcontext()

    def hooked_weight(net: Net, number: int) -> contextlib.nullcontext[None]:
        if number == 0:
            net.layer.weight.register_hook(lambda gradient: gradient * 2)
        return contextlib.nullcontext()

    found = run(plain, steps=FEW, around=hooked)
    assert {cause and cause.name for cause in map(breaks.cause_of_break, found.graph_break_reasons)} == {
        "backward hook of a module"
    }
    assert is_clean(run(plain, steps=FEW, around=hooked_weight))
    assert is_clean(run(with_hook_of_output, steps=FEW))
    gradients = []
    for backend in ("eager", "aot_eager", None):
        torch.manual_seed(0)
        net = type("Model", (Net,), {"forward": with_hook_of_output})()
        step = torch.compile(net, backend=backend) if backend else net
        step(torch.ones(4, 8)).sum().backward()
        gradients.append(net.layer.weight.grad)
    assert all(torch.equal(gradient, gradients[-1]) for gradient in gradients)


def test_a_fallback_at_a_break_of_unknown_cause_still_has_advice() -> None:
    fallback = "forward (model.py:3) runs eagerly: torch would not convert it (Something new), at model.py:7"
    advice = breaks.advice_on_fallback(fallback, ["model.py:7 in forward: Something new"])
    assert advice is not None
    assert advice.startswith("remove the graph break")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "block"),
    [
        (with_break_in_a_try, with_break_after_a_try, "`try`"),
        (with_break_in_an_own_context, with_break_after_an_own_context, "`with`"),
        (with_break_in_loop, with_break_after_a_loop, "loop"),
    ],
)
def test_a_break_that_leaves_a_function_eager_is_told_with_its_block_and_moved_out_it_does_not(
    before: Forward, after: Forward, block: str
) -> None:
    found = run(before)
    advice = breaks.advice_on_fallback(found.fallbacks[0], found.graph_break_reasons)
    assert f"a break inside a {block} leaves the whole function eager" in str(advice), found.fallbacks
    assert run(after).fallbacks == []


def test_lengths_that_are_read_one_by_one_are_told_how_all_are_marked_at_once() -> None:
    found = run(with_lengths_marked_one_by_one)
    told = [breaks.advice_on_fallback(text, found.graph_break_reasons) for text in found.fallbacks]
    assert told, found
    assert all("torch.arange(T) >= lengths[:, None], in place of a loop" in str(advice) for advice in told)


def test_the_users_line_and_the_hints_do_not_decide() -> None:
    text = (
        "model.py:7 in forward: Unsupported Tensor.item() call with capture_scalar_outputs=False\n"
        "  code: print(x.item(), hook, generator)\n  explanation: x\n  hint: builtin `print`, context manager, autograd.Function"
    )
    cause = breaks.cause_of_break(text)
    assert cause is not None
    assert cause.name == "value of a tensor"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TextIOWrapper", "file, clock or system call"), ("Condition", "lock or queue"), ("Region", "context manager")],
)
def test_a_context_is_told_by_its_class(kind: str, name: str) -> None:
    cause = breaks.cause_of_break(
        "model.py:7 in forward: Unsupported context manager\n  code: with self.entered:\n"
        f"  explanation: Dynamo does not know how to enter a `{kind}` context manager. ({kind})"
    )
    assert cause is not None
    assert cause.name == name


def test_shared_memory_is_told_by_the_words_of_torch_2_15() -> None:
    cause = breaks.cause_of_break("model.py:7 in forward: Unsupported Tensor.share_memory_() call")
    assert cause is not None
    assert cause.name == "memory of a tensor"


def test_a_lock_is_told_by_the_words_of_torch_2_15() -> None:
    text = "explanation: Dynamo does not know how to trace method `__enter__` of class `lock` (lock)"
    cause = breaks.cause_of_break(f"model.py:3 in forward: Unsupported method call\n  code: queue.put(0.0)\n  {text}")
    assert cause is not None
    assert cause.name == "lock or queue"


def test_a_break_of_fsdp2s_hooks_is_answered_with_regional_compiling() -> None:
    text = (
        "train.py:39 in forward of FSDPNet: Attempted to call function marked as skipped\n  code: x = block(x)\n"
        "  explanation: Dynamo developers have intentionally marked that the function `disable` should not be traced."
    )
    fallback = "forward of FSDPNet (train.py:37) runs eagerly: torch would not convert it (Attempted to call), at train.py:39"
    assert "scope=regional" in str(breaks.advice_on_fallback(fallback, [text]))
    assert "scope=regional" not in str(breaks.advice_on_break(text.replace("FSDPNet", "Net")))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_inputs_that_transformers_makes_require_gradients_are_told_and_adapters_train_without(times: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
    net = LlamaForCausalLM(LlamaConfig(**size, use_cache=False)).requires_grad_(False).train()
    net.lm_head.requires_grad_(True)
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # transformers renames it
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if times == 2:
        net.enable_input_require_grads()
    ids = torch.arange(8)[None]

    def found() -> list[str]:
        torch._dynamo.reset()
        with capture_diagnostics() as seen:
            torch.compile(net, backend="eager")(input_ids=ids, labels=ids).loss.backward()
        assert net.lm_head.weight.grad is not None
        return seen.graph_break_reasons

    (first, *_) = [breaks.cause_of_break(text) for text in found()]
    assert first is not None
    assert first.name == "requires_grad_() by transformers"
    if times == 2:  # transformers keeps track of the last hook only
        net.get_input_embeddings()._forward_hooks.clear()
    else:
        net.disable_input_require_grads()
    assert found() == []
