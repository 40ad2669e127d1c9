"""Findings in words that a person can act on; guards are those of the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_sweep.contract.installed_torch import torch_version
from compile_sweep.harness.diagnostics import advice
from compile_sweep.harness.diagnostics.advice import KnownSizes
from compile_sweep.harness.diagnostics.capture import capture_diagnostics
from compile_sweep.schema.causes.recompiles import Recompile, RecompileSeries
from compile_sweep.schema.settings import CompileSettings

X = torch.ones(4, 6)


def lengths(spelled: str) -> KnownSizes:
    return KnownSizes(settings=CompileSettings.parse(spelled), max_length=128, batch_size=3)


def explained(guard: str, sizes: KnownSizes) -> str:
    return advice.explain_recompiles(RecompileSeries.of(Recompile.parse(guard)), sizes)


def failed_guard(function: Callable[..., Any], *calls: tuple[Any, ...]) -> str:
    """Returns the guard because of which the last of these calls recompiles the function."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", dynamic=False)
    with capture_diagnostics() as found:
        for arguments in calls:
            compiled(*arguments)
    return found.recompile_reasons[-1].partition("): ")[2]


def on_fallback(text: str) -> str | None:
    return advice.advice_on_fallback(text, ())


class Box:
    flag = 1


def boxed(**attributes: int) -> Box:
    box = Box()
    vars(box).update(attributes)
    return box


GUARDS: list[tuple[Callable[..., Any], list[tuple[Any, ...]], str]] = [
    (lambda x: x + 1, [(X,), (X.bfloat16(),)], "the dtype of x changed: give it the same"),
    (
        lambda x: x + 1,
        [(X,), (X.t().contiguous().t(),)],
        "the stride of x changed: one call gets a tensor of the same shape that is laid out differently",
    ),
    (lambda x: x + 1, [(X,), (X[None],)], "the rank of x changed"),
    (lambda x: x + 1, [(X,), (X.clone().requires_grad_(),)], "the requires_grad of x changed"),
    (lambda x, k: x + k, [(X, 3), (X, 5)], "the Python value k was 3 and changed: each value of this Python number"),
    (lambda x, y: x * 2 if y is None else x + y, [(X, None), (X, X)], "the Python value y was None and changed"),
    (lambda x, box: x + box.flag, [(X, boxed()), (X, boxed(flag=7))], "an object's attributes changed"),
    (lambda x, names: x + len(names), [(X, [1]), (X, [1, 2])], "the length of names was 1 and changed: a list"),
    (lambda x, module: module(x), [(X, torch.nn.Linear(6, 6)), (X, torch.nn.Identity())], "was replaced by another"),
    (lambda x: x + 1, [(X,), (torch.ones(5, 6),)], "dimension 0 of x changed from 4 to 5: keep it fixed"),
]


@pytest.mark.parametrize(("function", "calls", "words"), GUARDS)
def test_a_failed_guard_is_put_in_words(function: Callable[..., Any], calls: list[tuple[Any, ...]], words: str) -> None:
    assert words in explained(failed_guard(function, *calls), lengths("scope=full"))


def test_gradients_switched_off_between_steps_are_a_global_setting() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    with capture_diagnostics() as found:
        compiled(X)
        with torch.no_grad():
            compiled(X)
    guard = found.recompile_reasons[0].partition("): ")[2]
    told = explained(guard, lengths("scope=full"))
    assert "both with and without gradients" in told
    assert "accept one more where a network or another of its class is also called under no_grad" in told


@pytest.mark.parametrize(
    ("spelled", "before", "now", "words"),
    [
        (
            "scope=full,dynamic=auto",
            64,
            72,
            "the sequence length changed from 64 to 72 (dimension 0 of ids): dynamic=auto compiles",
        ),
        ("scope=full,dynamic=buckets", 64, 96, "as expected, one graph for each bucket"),
        ("scope=full,dynamic=mark", 64, 72, "although it is marked"),
        ("scope=full,dynamic=true", 64, 72, "use dynamic=mark or buckets"),
        ("scope=full,dynamic=auto", 3 * 64, 3 * 72, "the sequence length changed from 192 to 216"),
        ("scope=full,dynamic=auto", 64, 73, "dimension 0 of ids changed from 64 to 73: keep it fixed"),
        ("scope=full,dynamic=static", 3, 2, "dimension 0 of ids changed from 3 to 2"),
    ],
)
def test_a_size_that_batches_are_padded_to_is_the_sequence_length(spelled: str, before: int, now: int, words: str) -> None:
    def keywords(**inputs: torch.Tensor) -> torch.Tensor:
        return inputs["ids"] + 1

    torch._dynamo.reset()
    compiled = torch.compile(keywords, backend="eager", dynamic=False)
    with capture_diagnostics() as found:
        compiled(ids=torch.ones(before))
        compiled(ids=torch.ones(now))
    assert words in explained(found.recompile_reasons[0].partition("): ")[2], lengths(spelled))


def test_rows_that_the_model_pads_itself_are_told_by_their_order_and_padded_before_it_take_one_graph() -> None:
    def padding(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) + 1

    def padded(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    batches = [[torch.ones(length, 3) for length in lengths] for lengths in ((4, 5, 6), (5, 4, 7), (7, 6, 5))]
    torch._dynamo.reset()
    compiled = torch.compile(padding, backend="eager", dynamic=True)
    with capture_diagnostics() as found:
        for rows in batches:
            compiled(rows)
    told = [explained(text.partition("): ")[2], lengths("scope=full")) for text in found.recompile_reasons]
    assert told or torch_version() >= (2, 14), "torch 2.15 takes one graph for them"
    assert all("is larger, and each answer takes a graph: pad them to one length before the forward" in words for words in told)
    compiled = torch.compile(padded, backend="eager", dynamic=True)
    with capture_diagnostics() as found:
        for rows in batches:
            compiled(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    assert (found.recompile_reasons, found.graphs) == ([], 1)


def test_a_size_the_code_compares_with_is_told_apart() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 5 else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(branches, backend="eager", dynamic=True)
    with capture_diagnostics() as found:
        compiled(X)
        compiled(torch.ones(7, 6))
    found_words = explained(found.recompile_reasons[0].partition("): ")[2], lengths("scope=full"))
    assert "dimension 0 of x left the range its graph was compiled for" in found_words


@pytest.mark.parametrize(
    ("of", "finding", "words"),
    [
        (advice.advice_on_break, "model.py:28 in forward: Unsupported Tensor.item() call", "keep the value a tensor"),
        (advice.advice_on_break, "model.py:30 in forward: Data-dependent branching", "or use torch.cond"),
        (advice.advice_on_break, "torch/optim/optimizer.py:79: Call to `torch._dynamo.graph_break()`", "nothing to do"),
        (advice.advice_on_break, "model.py:3 in forward: something torch will invent", None),
        (on_fallback, "nothing was compiled: torch made no graph", "TORCH_COMPILE_DISABLE"),
        (on_fallback, "encoder was meant to be compiled and never was", "call the module itself"),
        (advice.advice_on_cudagraph_skip, "skipping cudagraphs due to mutated inputs (1 instances)", "work on a clone"),
        (advice.advice_on_cudagraph_skip, "skipping cudagraphs due to something new", "leave CUDA graphs off"),
        (advice.advise_on_hint, "TensorFloat32 tensor cores available but not enabled", "matmul_precision=high"),
        (advice.advise_on_hint, "Grad tensors [148 of them] will be copied", "static_gradients=on"),
    ],
)
def test_a_finding_has_the_advice_that_usually_helps(of: Callable[[str], str | None], finding: str, words: str | None) -> None:
    found = of(finding)
    assert found is None if words is None else found is not None and words in found


def test_a_tensor_inside_a_list_of_a_batch_is_named_in_full() -> None:
    recompile = "forward (m.py:42): tensor 'batch['1.0.boxes']' size mismatch at index 0. expected 1, actual 3"
    series = RecompileSeries.of(Recompile.parse(recompile))
    assert "dimension 0 of 1.0.boxes changed from 1 to 3" in advice.explain_recompiles(series, lengths("scope=full"))


def test_a_condition_of_a_length_is_no_python_number() -> None:
    guard = "forward (m.py:42): (batch['input_ids'].size()[1] % 2) == 0"
    said = advice.explain_recompiles(RecompileSeries.of(Recompile.parse(guard)), lengths("scope=full"))
    assert "the code asks whether dimension 1 of input_ids is a multiple of 2" in said


def test_what_the_gradient_check_could_not_see_is_told() -> None:
    check = {"outcome": "ok", "error": 0.31, "allowed": 0.37, "layers": {}, "share_checked": 1.0}
    told = "gradients belong to the loss within 31% of one layer's (37% allowed), by finite differences in the compiled code"
    assert advice._gradient_check(check) == told
    assert advice._gradient_check({**check, "share_checked": 0.935}) == f"{told}; 6.5% of the layers could not be checked"


def test_gradients_of_an_uneven_loss_are_not_said_to_belong_to_it() -> None:
    check = {"outcome": "ok", "error": 0.0, "allowed": 0.003, "layers": {}, "share_checked": 1.0, "follows_eager": True}
    told = "gradients are eager's within 0% of one layer's (0.3% allowed), by how both losses change along them; "
    assert advice._gradient_check(check).startswith(told)
    assert "fine if meant" in advice._gradient_check({**check, "eager_error": 0.5})


def test_gradients_that_were_compared_with_eagers_are_told_as_such() -> None:
    check = {"outcome": "ok", "error": 0.004, "allowed": 0.015, "layers": {}, "share_checked": 0.57, "beside_eager": True}
    told = "gradients are eager's within 0.4% of one layer's (1.5% allowed), at the same weights and batch"
    assert advice._gradient_check(check) == f"{told}; 43% of the layers could not be checked"
    wrong = {**check, "outcome": "wrong", "error": 0.2, "layers": {"head": 0.2}}
    assert advice._gradient_check(wrong) == "gradients are not eager's: head +20%, at the same weights and batch"
