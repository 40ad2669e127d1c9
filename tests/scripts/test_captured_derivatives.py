"""Captured calls whose gradients are differentiated again (`create_graph=True`) in every step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn

from compile_sweep.script.apply.captured import CapturedModule, with_uncaptured
from tests.scripts.conftest import Run

Step = Callable[[Any, nn.Module, Tensor], Tensor]


class Field(nn.Module):
    """A smooth function of two coordinates, or of as many."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.three(self.two(self.one(x).tanh()).tanh())
        return result


def grad(result: Tensor, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(result, x, torch.ones_like(result), create_graph=True)
    return found


def burgers(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A differential equation of second order in one coordinate and first order in the other, and a boundary."""
    x = x.clone().requires_grad_()
    u = call(x)
    first = grad(u, x)
    second = grad(first[:, :1], x)[:, :1]
    residual = first[:, 1:] + u * first[:, :1] - 0.01 * second
    loss: Tensor = residual.square().mean() + call(x.detach()).square().mean()
    return loss


def plate(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """An equation of fourth order: both second derivatives are differentiated twice more."""
    x = x.clone().requires_grad_()

    def laplace(value: Tensor) -> Tensor:
        first = grad(value, x)
        return grad(first[:, :1], x)[:, :1] + grad(first[:, 1:], x)[:, 1:]

    return (laplace(laplace(call(x))) - 1).square().mean()


def critic(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A critic with real and made samples, and a penalty on gradients between them."""
    real, made = x, x.roll(1, 0) + 0.5
    between = (real + 0.3 * (made - real)).requires_grad_()
    penalty = (grad(call(between), between).norm(dim=1) - 1).square().mean()
    loss: Tensor = call(made).mean() - call(real).mean() + 10 * penalty
    return loss


def forces(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """Energies and forces, as a potential of atoms is trained: the positions are no leaves."""
    positions = x.clone().requires_grad_()
    energy = call(positions * 1.5)
    (found,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return (energy - 1).square().mean() + (found - 0.2).square().mean()


def learned_step(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A loss with the gradients of the weights, as sharpness-aware and meta-learning losses have."""
    loss: Tensor = call(x).square().mean()
    found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([one.square().sum() for one in found]).sum()


def through_backward(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """Gradients taken by `backward(create_graph=True)`, of which one is a part of the loss."""
    x = x.clone().requires_grad_()
    call(x).sum().backward(create_graph=True)
    assert x.grad is not None
    found, x.grad = x.grad, None
    net.zero_grad()
    return (found - 0.1).square().sum()


def joined(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """The gradients of more weights become part of the loss later."""
    loss: Tensor = call(x).square().mean()
    found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    net.steps = getattr(net, "steps", 0) + 1
    return loss + 0.1 * torch.stack([one.square().sum() for one in found[: 1 if net.steps < 7 else None]]).sum()


def unused(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """Gradients are taken with `create_graph=True`, but for a number alone."""
    x = x.clone().requires_grad_()
    result = call(x)
    scale = grad(result, x).detach().abs().mean()
    loss: Tensor = result.square().mean() / (1 + scale)
    return loss


def diffusion(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A flow that depends on the solution: the gradients that a derivative is given may be differentiated, too."""
    x = x.clone().requires_grad_()
    u = call(x)
    flow = u.exp() * grad(u, x)[:, :1]
    return (grad(grad(flow, x)[:, :1] * u, x).sum(1) - u).square().mean()


def repeated(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """Two backward passes through a call and its gradient, of which the first keeps what the second needs."""
    x = x.clone().requires_grad_()
    result = call(x)
    first = grad(result, x)
    first.square().sum().backward(retain_graph=True)
    loss: Tensor = result.square().mean() + first.sin().mean()
    return loss


def seldom(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A penalty on gradients that comes in every third step."""
    x = x.clone().requires_grad_()
    result = call(x)
    loss: Tensor = result.square().mean()
    net.steps = getattr(net, "steps", -1) + 1
    return loss if net.steps % 3 else loss + grad(result, x).square().mean()


def balanced(call: Any, net: nn.Module, x: Tensor) -> Tensor:
    """A VQ-GAN's adaptive weight: two losses are weighed by the gradients that they have for the last layer."""
    result = call(x)
    one, other = result.square().mean(), result.sin().mean()
    last = net.three.weight
    sizes = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (one, other)]
    loss: Tensor = one + (sizes[0] / (sizes[1] + 1e-4)).detach() * other
    return loss


STEPS = {
    burgers: (8, 62),
    plate: (8, 80),
    critic: (9, 74),
    forces: (3, 30),
    learned_step: (4, 40),
    through_backward: (3, 30),
    joined: (8, 38),
    unused: (3, 30),
    diffusion: (9, 90),
    repeated: (4, 40),
    seldom: (6, 21),
    balanced: (4, 40),
}
"""With the number of captures and of replays in twelve steps, of which the first two run as they are."""


def trained(
    step: Step, *, captures: bool, device: str = "cpu", casts: bool = False, part: nn.Module | None = None
) -> tuple[list[float], list[Tensor], Recorder]:
    torch.manual_seed(0)
    net, recorder, reasons = Field().to(device), Recorder(), list[str]()
    if part is not None:
        net.two = nn.Sequential(net.two, part.to(device))  # type: ignore[assignment]
    made = {} if device == "cuda" else {"recorder": recorder}
    call = CapturedModule(net, net._call_impl, reasons.append, **made) if captures else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    losses = []
    for seed in range(12):
        x = torch.randn(9, 2, generator=torch.Generator().manual_seed(seed)).to(device)
        torch.manual_seed(seed)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=casts):
            loss = step(call, net, x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not reasons
    return losses, [one.detach().clone() for one in net.state_dict().values()], recorder


def counted(recorder: Recorder) -> tuple[int, int]:
    """Returns the number of captures, of calls and of gradients, and that of replays."""
    return recorder.recorded + recorder.recorded_gradients, recorder.replayed + recorder.replayed_gradients


ignored = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")


@ignored
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_that_are_differentiated_again_are_captured(step: Step, casts: bool) -> None:
    losses, weights, _ = trained(step, captures=False, casts=casts)
    found, held, recorder = trained(step, captures=True, casts=casts)
    assert found == pytest.approx(losses, rel=0.02 if casts else 1e-5)
    torch.testing.assert_close(held, weights, rtol=0.02 if casts else 1e-4, atol=0.01 if casts else 1e-6)
    assert counted(recorder) == STEPS[step]


def test_a_backward_pass_to_one_layer_computes_no_more() -> None:
    """Each of a step's backward passes has a graph of its own, with the gradients that it asks for."""
    torch.manual_seed(0)
    net, recorder = Field(), Recorder()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)
    for _ in range(4):
        balanced(call, net, torch.randn(9, 2)).backward()
    (sequence,) = call._kinds[0].requests.sequences
    assert [sum(request.needed) for request in sequence] == [1, 1, 6]


def test_gradients_of_results_are_kept_no_longer_than_they_are_needed() -> None:
    """Those of a language model's logits take gigabytes, and a script holds its loss until the next one is there."""
    net = Field()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=Recorder())
    for _ in range(4):
        result = call(torch.randn(9, 2))
        result.square().sum().backward(retain_graph=True)
        result.sum().backward()
    history = result.grad_fn.run._history  # type: ignore[union-attr]
    assert [len(given) for _, given in history] == [0, 0]


@pytest.mark.parametrize("step", [critic, seldom])
def test_what_changes_its_state_does_so_once_a_step(step: Step) -> None:
    """Where a step asks for what was not captured, its call is computed anew, which must not count a batch twice."""
    losses, weights, _ = trained(step, captures=False, part=nn.BatchNorm1d(8))
    found, held, recorder = trained(step, captures=True, part=nn.BatchNorm1d(8))
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(held, weights, rtol=1e-4, atol=1e-6)
    assert counted(recorder) == STEPS[step]


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(
    "transform",
    [
        lambda call: torch.func.vmap(torch.func.jacrev(call)),
        lambda call: torch.func.vmap(call),
        lambda call: lambda x: torch.func.jvp(call, (x,), (x,))[1],
        lambda call: lambda x: torch.autograd.functional.jvp(call, (x,), (x,))[1],
    ],
    ids=["jacrev", "vmap", "jvp", "double backward"],
)
def test_calls_in_transforms_run_as_they_are(transform: Callable[[Any], Any]) -> None:
    net, recorder = Field(), Recorder()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)
    for seed in range(4):
        x = torch.randn(9, 2, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(transform(call)(x), transform(net)(x))


EQUATION = """
import torch
torch.manual_seed(0)
from torch.nn import Linear, Tanh
net = torch.nn.Sequential(Linear(2, 16), Tanh(), Linear(16, 16), Tanh(), Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
for _ in range(3000):
    x = torch.rand(32, 2, requires_grad=True)
    u = net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    loss = (first[:, 1] - 0.1 * second[:, 0]).square().mean() + (net(x.detach() * torch.tensor([1.0, 0.0])) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_that_solves_an_equation_trains_the_same(run: Run, folder: Path, recorder: Recorder) -> None:
    (folder / "equation.py").write_text(EQUATION)
    losses = []
    for settings in ("scope=eager,as_written=on", "scope=eager,cudagraphs=on"):
        session, error = run("equation.py", settings)
        assert error is session.error is None
        assert session.trajectory is not None
        losses.append(session.trajectory.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert counted(recorder)[0] == 8
    told = with_uncaptured(session.diagnostics, session.found.targets)
    assert not told.cudagraph_skips


@ignored
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.gpu
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_that_are_differentiated_again_are_the_same_on_a_gpu(step: Step, casts: bool) -> None:
    losses, weights, _ = trained(step, captures=False, device="cuda", casts=casts)
    found, held, _ = trained(step, captures=True, device="cuda", casts=casts)
    assert found == pytest.approx(losses, rel=0.05 if casts else 1e-4)
    torch.testing.assert_close(held, weights, rtol=0.05 if casts else 1e-3, atol=0.02 if casts else 1e-5)


@ignored
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.gpu
@pytest.mark.parametrize("step", [burgers, critic, learned_step, diffusion])
def test_second_derivatives_of_what_draws_random_numbers_are_captured(step: Step) -> None:
    """What is captured computes nothing anew, so that dropout is the same in a call and its gradients."""
    torch.manual_seed(0)
    losses, weights, _ = trained(step, captures=True, device="cuda", part=nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    found, held, _ = trained(step, captures=False, device="cuda", part=nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    assert found == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(held, weights, rtol=1e-3, atol=1e-5)
