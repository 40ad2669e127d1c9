"""Gradients of scripts: finite differences on the script's own calls find what is wrong only in compiled code."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_sweep.harness.numerics.finite_differences import Differentiated
from compile_sweep.harness.numerics.gradient_check import GradientCheck, Outcome
from compile_sweep.script import gradients, session_results
from compile_sweep.script.discover import Target
from compile_sweep.script.gradients import CallRecorder, check_calls, together
from tests.scripts.conftest import Run

AOT = "scope=full,dynamic=auto,backend=aot_eager"

SPOILED = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(16, 32), nn.Dropout(DROPOUT), nn.Linear(32, 10)

    def forward(self, x):
        weight = self.head.weight
        if torch.compiler.is_compiling():  # the same value, another gradient
            weight = FACTOR * weight - ((FACTOR - 1) * weight).detach()
        return nn.functional.linear(self.drop(self.body(x).tanh()), weight, self.head.bias)

model = Head()
# Weights stay, because the number of steps before the check depends on the speed of the machine.
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
scaler = torch.amp.GradScaler("cpu")
while True:
    optimizer.zero_grad()
    for _ in range(2):
        x = torch.randn(512, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=AUTOCAST):
            scores = model(x)
        scaler.scale(nn.functional.cross_entropy(scores.float(), x.argmax(1) % 10) / 2).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def spoiled(folder: Path, factor: float, dropout: float = 0.0, *, autocast: bool = False) -> str:
    text = SPOILED.replace("FACTOR", str(factor)).replace("DROPOUT", str(dropout)).replace("AUTOCAST", str(autocast))
    (folder / "spoiled.py").write_text(text)
    return "spoiled.py"


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "autocast", "factor"), [(0.0, False, 1.05), (0.5, False, 1.2), (0.1, True, 3.0)])
def test_a_wrong_gradient_in_compiled_code_is_found_under_accumulation_and_scaling(
    dropout: float, autocast: bool, factor: float, run: Run, folder: Path
) -> None:
    session, error = run(spoiled(folder, factor, dropout, autocast=autocast), AOT)
    assert error is session.error is None
    found = session.gradient_check
    assert found is not None
    assert found.outcome is Outcome.WRONG
    assert next(iter(found.layers)) == "head"


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.5, False), (0.1, True)])
def test_right_gradients_are_right(dropout: float, autocast: bool, run: Run, folder: Path) -> None:
    session, error = run(spoiled(folder, 1.0, dropout, autocast=autocast), AOT)
    assert error is session.error is None
    assert session_results.model_facts(session)["autocasts"] is autocast
    found = session.gradient_check
    assert found is not None
    assert found.outcome is not Outcome.WRONG
    if not autocast:  # its rounding may hide the fault
        assert (found.outcome, found.reason, found.share_checked) == (Outcome.OK, None, 1.0)


APART = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        weight = self.linear.weight
        if torch.compiler.is_compiling():  # the same value, another gradient
            weight = FACTOR * weight - ((FACTOR - 1) * weight).detach()
        return nn.functional.linear(x.tanh(), weight, self.linear.bias)

torch.manual_seed(0)
body, head = nn.Linear(16, 64), Head()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.0)
while True:
    x = torch.randn(512, 16)
    with torch.autocast("cpu", torch.bfloat16):
        scores = head(body(x))
    loss = nn.functional.cross_entropy(scores.float(), x.argmax(1) % 10)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "outcome"), [(1.0, Outcome.OK), (3.0, Outcome.WRONG)])
def test_a_module_whose_input_has_gradients_in_half_precision_is_checked(
    factor: float, outcome: Outcome, run: Run, folder: Path
) -> None:
    (folder / "apart.py").write_text(APART.replace("FACTOR", str(factor)))
    session, error = run("apart.py", AOT)
    assert error is session.error is None
    found = session.gradient_check
    assert found is not None
    assert found.outcome is outcome, found.reason
    assert list(found.layers)[:1] == (["head.linear"] if outcome is Outcome.WRONG else [])


CONVOLUTIONS = """
import torch
from torch import nn

class Spoiled(nn.Conv2d):
    def forward(self, x):
        weight = self.weight
        if torch.compiler.is_compiling():  # the same value, another gradient
            weight = FACTOR * weight - ((FACTOR - 1) * weight).detach()
        return nn.functional.conv2d(x, weight, None, self.stride, self.padding)

class Block(nn.Module):
    def __init__(self, width, conv):
        super().__init__()
        self.one, self.two = conv(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return (x + self.norm2(self.two(self.norm1(self.one(x)).relu()))).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.Linear(32, 10)
        self.blocks = nn.Sequential(*(Block(32, Spoiled if at == 1 else nn.Conv2d) for at in range(3)))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
images, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
while True:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_convolutions_gradient_in_half_precision_is_seen_beside_eagers(factor: float, run: Run, folder: Path) -> None:
    """Finite differences see nothing of a network like this in bfloat16, not even a layer that is half wrong."""
    (folder / "convolutions.py").write_text(CONVOLUTIONS.replace("FACTOR", str(factor)))
    session, error = run("convolutions.py", AOT)
    assert error is session.error is None
    found = session.gradient_check
    assert found is not None
    assert found.beside_eager
    assert [*found.layers] == ["blocks.1.one"] * (factor > 1)
    if factor > 1:
        assert (found.outcome, round(found.error or 0.0, 2)) == (Outcome.WRONG, 0.2)
    else:
        assert found.outcome is Outcome.OK


@pytest.mark.slow
@pytest.mark.parametrize(("option", "factor"), [("on", 1.04), ("on", 1.0), ("off", 1.04)])
def test_a_few_per_cent_of_a_layer_are_seen_under_dropout_where_inductor_draws_eagers_random_numbers(
    option: str, factor: float, run: Run, folder: Path
) -> None:
    settings = f"scope=full,dynamic=auto,inductor.fallback_random={option}"
    session, error = run(spoiled(folder, factor, 0.1, autocast=True), settings)
    assert error is session.error is None
    found = session.gradient_check
    assert found is not None
    assert found.beside_eager is (option == "on")
    is_seen = option == "on" and factor > 1
    assert (found.outcome is Outcome.WRONG, list(found.layers)) == (is_seen, ["head"] * is_seen)


@pytest.mark.slow
def test_where_nothing_is_compiled_nothing_is_checked(run: Run, folder: Path) -> None:
    session, error = run(spoiled(folder, 1.5), "scope=eager,optimizer=fused")
    assert error is session.error is None
    assert session.gradient_check is None


def test_several_modules_are_wrong_if_one_is_and_right_if_all_are() -> None:
    right = GradientCheck(outcome=Outcome.OK, error=0.001, allowed=0.003, evaluations=6)
    wrong = GradientCheck(outcome=Outcome.WRONG, error=0.2, allowed=0.003, layers={"main.0": 0.2}, evaluations=9)
    unknown = GradientCheck(outcome=Outcome.SKIPPED, reason="the loss is not finite")
    both = together({"netG": right, "netD": wrong})
    assert (both.outcome, both.layers, both.evaluations) == (Outcome.WRONG, {"netD.main.0": 0.2}, 15)
    assert together({"netG": right, "netD": unknown}).reason == "netD: the loss is not finite"
    assert together({"netG": right}).outcome is Outcome.OK
    assert together({}).outcome is Outcome.SKIPPED


class Overwriting(torch.autograd.Function):
    """A linear layer without bias whose backward passes write all weight gradients to the same memory, as CUDA graphs may."""

    MEMORY = torch.zeros(16, 16)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return outer @ weight, torch.mm(outer.t(), x, out=Overwriting.MEMORY)


class OverwritingLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Overwriting.apply(input, self.weight)


def test_gradients_that_later_parts_of_the_backward_pass_overwrite_are_read_as_they_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layers = [OverwritingLinear(16, 16, bias=False) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    target, recorder = Target(model, model, "model"), CallRecorder()
    recorder.call(target, model, (torch.randn(64, 16),), {}).square().mean().backward()
    read: list[Any] = []

    def look(step: Differentiated, **given: Any) -> GradientCheck:
        step.run()
        read.extend(step.gradients())
        return GradientCheck(outcome=Outcome.OK)

    monkeypatch.setattr(gradients, "check_gradients", look)
    check_calls(recorder.calls, {target: model}, lambda _: 1e-6)
    for gradient, layer in zip(read, layers, strict=True):
        torch.testing.assert_close(gradient, layer.weight.grad)


class Converting(nn.Module):
    """Multiplies its input, in half precision, by what autocast makes half precision too: an error without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two((x.bfloat16().t() @ self.one(x)).float().tanh())


def test_a_forward_that_cannot_run_in_full_precision_is_checked_by_finite_differences() -> None:
    torch.manual_seed(0)
    model, recorder = Converting(), CallRecorder()
    target = Target(model, model, "model")
    with torch.autocast("cpu", torch.bfloat16):
        outputs = recorder.call(target, model, (torch.randn(64, 16),), {})
    outputs.float().square().mean().backward()
    found = check_calls(recorder.calls, {target: model}, lambda _: 2.0**-9)
    assert (found.outcome is not Outcome.WRONG, found.beside_eager) == (True, False)
    assert found.evaluations > 4
    assert "called again" not in (found.reason or "")


@pytest.mark.gpu
def test_gradients_of_blocks_with_cuda_graphs_are_right() -> None:
    """On an H200, most layers of a script with 24 such blocks seemed wrong, one by 256%."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))).cuda()
    target, recorder = Target(model, model, "model"), CallRecorder()
    for block in model:
        block.compile(mode="reduce-overhead")
    for _ in range(8):
        x = torch.randn(256, 64, device="cuda")
        recorder.call(target, model, (x,), {}).square().mean().backward()
        model.zero_grad()
    found = check_calls(recorder.calls, {target: model}, lambda _: 1e-6)
    assert (found.outcome, found.reason, found.share_checked) == (Outcome.OK, None, 1.0)


@pytest.mark.gpu
def test_a_check_records_no_cuda_graphs_anew_where_steps_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    recorded: list[None] = []
    record = CUDAGraphTreeManager.record_function
    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", lambda *given: recorded.append(None) or record(*given))
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).cuda()
    compiled, target, recorder = torch.compile(model, mode="reduce-overhead"), Target(model, model, "model"), CallRecorder()
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()  # as a compiled optimizer's step does
        outputs = recorder.call(target, compiled, (torch.randn(64, 16, device="cuda"),), {})
        outputs.square().mean().backward()
        model.zero_grad()
    before = len(recorded)
    assert before > 0
    found = check_calls(recorder.calls, {target: compiled}, lambda _: 1e-6)
    assert (found.outcome, found.reason) == (Outcome.OK, None)
    assert found.evaluations > 4
    assert len(recorded) <= before + 2


class Scored(nn.Module):
    """Returns its loss and, like models of transformers, scores that the script does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.two(self.one(x).tanh())
        return {"loss": scores.sum().square(), "scores": scores}  # no backward pass needs the scores


def test_outputs_that_the_script_does_not_keep_are_gone_before_the_check_goes_back() -> None:
    torch.manual_seed(0)
    model, recorder = Scored(), CallRecorder()
    compiled, target = torch.compile(model, backend="aot_eager"), Target(model, model, "model")
    are_gone: list[bool] = []

    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = compiled(x)
        scores = weakref.ref(outputs["scores"])
        outputs["loss"].register_hook(lambda _: are_gone.append(scores() is None))
        return outputs

    recorder.call(target, run, (torch.randn(64, 16),), {})["loss"].backward()
    assert are_gone == [True], "as in the script"
    found = check_calls(recorder.calls, {target: run}, lambda _: 1e-6)
    assert (found.outcome, found.reason) == (Outcome.OK, None)
    assert len(are_gone) > 1
    assert all(are_gone)


@pytest.mark.gpu
def test_a_check_of_a_model_whose_scores_the_script_drops_replays_its_cuda_graphs() -> None:
    """Of a BERT, each setting with CUDA graphs of the whole model had no check: its calls "could not be called again"."""
    torch.manual_seed(0)
    model = Scored().cuda()
    compiled, target, recorder = torch.compile(model, mode="reduce-overhead"), Target(model, model, "model"), CallRecorder()
    for _ in range(8):
        x = torch.randn(64, 16, device="cuda")
        recorder.call(target, compiled, (x,), {})["loss"].backward()
        model.zero_grad()
    found = check_calls(recorder.calls, {target: compiled}, lambda _: 1e-6)
    assert (found.outcome, found.reason) == (Outcome.OK, None)
