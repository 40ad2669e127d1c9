"""What captured calls compute again, because it was not captured: in some steps, a script asks for more gradients."""

from typing import Any

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn

from compile_sweep.script.apply import captured
from compile_sweep.script.apply.captured import CapturedModule
from compile_sweep.script.job import ScriptError
from tests.scripts.test_captured import Net, Step, trained


def repeated(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Now and then a backward pass is repeated."""
    optimizer.zero_grad()
    is_special = int(x[0, 0] * 1000) % 3 == 0
    loss: Tensor = call(x)["logits"].square().mean()
    loss.backward(retain_graph=is_special)
    if is_special:
        loss.backward()
    optimizer.step()
    return loss


def penalized(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Now and then there is a penalty on gradients, as in StyleGAN's lazy regularization."""
    optimizer.zero_grad()
    x = x.clone().requires_grad_()
    loss: Tensor = call(x)["logits"].square().mean()
    if int(x[0, 0] * 1000) % 3 == 0:
        (of_input,) = torch.autograd.grad(call(x)["logits"].sum(), x, create_graph=True)
        loss = loss + of_input.square().sum()
    loss.backward()
    optimizer.step()
    return loss


def helped(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """After some steps another result has a loss, too, as where a critic joins in late."""
    optimizer.zero_grad()
    made = call(x)
    net.steps = getattr(net, "steps", 0) + 1
    loss: Tensor = made["logits"].square().mean()
    if net.steps > 5:
        loss = loss + made["hidden"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


SOMETIMES = [repeated, penalized, helped]


@pytest.mark.parametrize("step", SOMETIMES)
def test_what_was_not_captured_is_computed_again(step: Step) -> None:
    """Batches of 12 seeds, of which some ask for more than the first ones."""
    batches = [torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    batches.sort(key=lambda x: int(x[0, 0] * 1000) % 3 == 0)  # those with more come last
    losses, weights, _, _ = trained(step, captures=False, batches=batches)
    found, held, recorder, reasons = trained(step, captures=True, batches=batches)
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(held, weights)
    assert not reasons
    assert recorder.replayed >= 10


@pytest.mark.parametrize(("weights_bytes", "most"), [(0, 32), (2**27, 8), (2**30, 4)])
def test_more_calls_of_small_modules_may_wait_for_their_backward_pass(
    weights_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a policy that acts several times before it learns."""
    net, recorder, reasons = nn.Linear(6, 3), Recorder(), list[str]()
    own_bytes = sum(one.nbytes for one in net.parameters())
    monkeypatch.setattr(captured, "PENDING_BYTES", captured.PENDING_BYTES * own_bytes // max(own_bytes, weights_bytes))
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder)
    call(torch.ones(4, 6)).sum().backward()
    net.zero_grad()
    torch.stack([call(torch.full((4, 6), float(number))).sum() for number in range(most + 2)]).sum().backward()
    assert recorder.replayed == most
    assert reasons == [f"more than {most} of its calls wait for their backward pass"] * 2
    assert net.weight.grad is not None
    assert torch.allclose(net.weight.grad, torch.tensor(4.0 * sum(range(most + 2))))


def test_a_backward_pass_is_repeated_after_another_call() -> None:
    net = Net()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=Recorder())
    for _ in range(3):
        loss = call(torch.ones(4, 6))["logits"].sum()
        loss.backward(retain_graph=True)
    call(torch.zeros(4, 6))["logits"].sum().backward()
    net.zero_grad()
    loss.backward()
    found = [one.grad for one in net.parameters()]
    net.zero_grad()
    net(torch.ones(4, 6))["logits"].sum().backward()
    for one, gradient in zip(net.parameters(), found, strict=True):
        torch.testing.assert_close(gradient, one.grad)


def test_dropout_of_recurrent_layers_cannot_be_drawn_again() -> None:
    net = nn.GRU(4, 3, 2, dropout=0.1).eval()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=Recorder())
    for _ in range(3):
        loss = call(torch.ones(5, 2, 4))[0].sum()
        loss.backward(retain_graph=True)
    with pytest.raises(ScriptError, match="and the module has dropout of recurrent layers; leave cudagraphs out"):
        loss.backward()


def test_a_call_whose_arguments_changed_cannot_run_again() -> None:
    net = Net()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=Recorder())
    for _ in range(3):
        x = torch.ones(4, 6)
        loss = call(x)["logits"].sum()
        loss.backward(retain_graph=True)
    x.zero_()
    with pytest.raises(ScriptError, match="was given a tensor that changed since"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("step", SOMETIMES)
def test_what_was_not_captured_is_computed_again_on_a_gpu(step: Step) -> None:
    """Dropout draws the same numbers again."""
    batches = [torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    batches = [x.cuda() for x in sorted(batches, key=lambda x: int(x[0, 0] * 1000) % 3 == 0)]
    states = []
    for captures in (False, True):
        torch.manual_seed(0)
        net = Net().cuda()
        net.two = nn.Sequential(nn.Dropout(0.3), net.two)  # type: ignore[assignment]
        call = CapturedModule(net, net._call_impl, lambda reason: None) if captures else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.cuda.manual_seed(5)
        losses = [float(step(call, net, optimizer, x).detach()) for x in batches]
        states.append((losses, [one.clone() for one in net.state_dict().values()]))
    (losses, weights), (found, held) = states
    assert found == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(weights, held, strict=True))
