"""Tests for calls of modules that are captured as CUDA graphs without being compiled; on a CPU, with those of `graphs_on_cpu`."""

import random
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn

from compile_sweep.script.apply import captured
from compile_sweep.script.apply.captured import CapturedModule
from compile_sweep.script.apply.graph_recording import apart
from compile_sweep.script.job import ScriptError

on_gpu = pytest.mark.gpu


class Net(nn.Module):
    """Two layers with batch normalization, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.temperature = 1.0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = self.norm(self.one(x)).tanh()
        return {"logits": self.two(hidden) * scale / self.temperature, "hidden": hidden}


Step = Callable[[Any, nn.Module, torch.optim.Optimizer, Tensor], Tensor]


def plain(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step as most scripts have it."""
    optimizer.zero_grad()
    loss: Tensor = call(x)["logits"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


def late_zero(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Gradients are zeroed in place between forward and backward."""
    loss: Tensor = call(x)["logits"].square().mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()
    return loss


def accumulating(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Three backward passes before an update."""
    optimizer.zero_grad()
    total = torch.zeros((), device=x.device)
    for part in x.chunk(3):
        loss = call(part)["logits"].square().mean()
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def twice(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Two calls wait for one backward pass, as a critic's with real and made pictures."""
    optimizer.zero_grad()
    loss: Tensor = call(x)["logits"].square().mean() - call(2 * x)["logits"].sin().mean()
    loss.backward()
    optimizer.step()
    return loss


def scheduled(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A number in the module changes now and then."""
    net.temperature = 2.0 if net.temperature == 1.0 else 1.0
    return plain(call, net, optimizer, x)


def scaled(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """An argument that is a number is one of three."""
    optimizer.zero_grad()
    loss: Tensor = call(x, scale=[0.5, 1.0, 2.0][int(x[0, 0] * 1000) % 3])["logits"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


def held(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The loss of the step before is still there, with all that it was computed from."""
    loss = plain(call, net, optimizer, x)
    net.last = loss  # type: ignore[assignment]
    return loss


def weighed(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Two losses weighed by the size of their gradients in the last layer, as a VQ-GAN's."""
    optimizer.zero_grad()
    made = call(x)
    one, other = made["logits"].square().mean(), made["logits"].exp().mean()
    last = [weight for name, weight in net.named_parameters() if name.endswith("two.weight") or name == "two.1.weight"]
    (of_one,) = torch.autograd.grad(one, last, retain_graph=True)
    (of_other,) = torch.autograd.grad(other, last, retain_graph=True)
    loss = one + other * (of_one.norm() / of_other.norm()).detach()
    loss.backward()
    optimizer.step()
    return loss


def by_hand(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Gradients of two batches, kept in lists and added by hand."""
    losses = [call(part)["logits"].square().mean() for part in x[:8].chunk(2)]
    found = [torch.autograd.grad(loss, list(net.parameters())) for loss in losses]
    for weight, *gradients in zip(net.parameters(), *found, strict=True):
        weight.grad = gradients[0] + gradients[1]
    optimizer.step()
    return losses[0] + losses[1]


def one_by_one(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The same, each batch's gradients before the next batch."""
    found, total = [], torch.zeros((), device=x.device)
    for part in x[:8].chunk(2):
        loss = call(part)["logits"].square().mean()
        found.append(torch.autograd.grad(loss, list(net.parameters())))
        total = total + loss.detach()
    for weight, *gradients in zip(net.parameters(), *found, strict=True):
        weight.grad = gradients[0] + gradients[1]
    optimizer.step()
    return total


def changed_in_place(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Results are changed in place, as transformers' Trainer multiplies its loss."""
    optimizer.zero_grad()
    made = call(x)
    made["logits"] *= 2
    loss: Tensor = made["logits"].square().mean()
    loss.backward()
    optimizer.step()
    return loss


def frozen_by_turns(call: Any, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A call without the weights' gradients, as where a generator trains through its critic, then a step."""
    net.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    call(leaf)["logits"].square().mean().backward()
    net.requires_grad_(True)
    assert leaf.grad is not None
    return plain(call, net, optimizer, x + 0.1 * leaf.grad)


STEPS = [plain, late_zero, accumulating, twice, scheduled, held, weighed, by_hand, one_by_one, changed_in_place, frozen_by_turns]


def trained(step: Step, captures: bool, batches: Sequence[Tensor]) -> tuple[list[float], list[Tensor], Recorder, list[str]]:
    torch.manual_seed(0)
    net, reasons = Net(), list[str]()
    recorder = Recorder(net)
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder) if captures else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = [float(step(call, net, optimizer, x).detach()) for x in batches]
    return losses, [one.clone() for one in net.state_dict().values()], recorder, reasons


@pytest.mark.parametrize("step", [*STEPS, scaled])
def test_training_is_the_same(step: Step) -> None:
    batches = [torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    losses, weights, _, _ = trained(step, captures=False, batches=batches)
    found, held, recorder, reasons = trained(step, captures=True, batches=batches)
    # Not to the last bit: on some processors a product's rounding depends on where its operands are in memory.
    assert found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(held, weights)
    assert not reasons
    assert recorder.replayed >= len(batches) - 4


class Counts(Net):
    """Counts its calls in Python."""

    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(x, scale)


class Center(Net):
    """Assigns a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        found = super().forward(x, scale)
        self.center = 0.9 * self.center + 0.1 * found["logits"].detach().mean(0)
        return found


class Collects(Net):
    """Collects losses in a list that the script reads."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        found = super().forward(x, scale)
        self.collected.append(found["hidden"].square().mean())
        return found


class DropsLayers(Net):
    """Leaves layers out at random, drawn in Python."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(x, scale if random.random() > 0.3 else 0.0)


class Dropout(Net):
    """Draws from the CPU's generator."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(x + torch.rand(1), scale)


class Result:
    """What a module may return that is no container torch knows."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Wraps(Net):
    """Returns an object."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        found = super().forward(x, scale)
        return {**found, "result": Result(found["logits"])}


class Elsewhere(Net):
    """Holds a weight in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.two.weight]

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        found = super().forward(x, scale)
        return {**found, "logits": found["logits"] + self.weights[0].sum()}


class Sparse(Net):
    """Looks up rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        found = super().forward(x, scale)
        return {**found, "logits": found["logits"] + self.table((x[:, 0] > 0).long())}


class InPlace(Net):
    """Changes its argument."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(x.add_(1), scale)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Counts, "its forward sets Counts.calls, which a CUDA graph would not"),
        (Center, "its forward sets Center.center, which a CUDA graph would not"),
        (Collects, "its forward sets Collects.collected, which a CUDA graph would not"),
        (DropsLayers, "it draws random numbers on the CPU"),
        (Dropout, "it draws random numbers on the CPU"),
        (Wraps, "it returns an object of class Result"),
        (Elsewhere, "it also holds weights outside of its modules"),
        (Sparse, "it has sparse gradients"),
        (InPlace, "it changes its arguments in place"),
    ],
)
def test_what_a_graph_would_leave_out_runs_eagerly(kind: type[Net], reason: str) -> None:
    states = []
    for captures in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        net, reasons = kind(), list[str]()
        call = CapturedModule(net, net._call_impl, reasons.append, recorder=Recorder()) if captures else net
        for seed in range(5):
            call(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))["logits"].square().mean().backward()
        gradients = [one.grad.to_dense() for one in net.parameters() if one.grad is not None]
        states.append([*net.state_dict().values(), *gradients])
        states[-1] += [getattr(net, "calls", 0), len(getattr(net, "collected", ()))]
    assert reasons == [reason] * 4
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(*states, strict=True))


def test_hooks_and_objects_as_arguments_run_eagerly() -> None:
    net, reasons = Net(), list[str]()
    net.one.register_forward_hook(lambda *_: None)
    CapturedModule(net, net._call_impl, reasons.append, recorder=Recorder())(torch.ones(4, 6))
    assert reasons == ["it has hooks, which a CUDA graph would not call"]
    net, reasons = Net(), []
    call = CapturedModule(net, lambda x, _: net(x), reasons.append, recorder=Recorder())
    call(torch.ones(4, 6), Result(torch.ones(1)))
    assert reasons == ["it is called with an object of class Result"]


def test_weights_that_others_stand_in_for_are_not_replayed() -> None:
    net, reasons, recorder = Net(), list[str](), Recorder()
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder)
    vars(net)["_compiled_call_impl"] = call
    x = torch.ones(4, 6)
    for _ in range(3):
        net(x)["logits"].sum().backward()
    others = {name: (2 * weight).detach().requires_grad_() for name, weight in net.named_parameters()}
    found = torch.func.functional_call(net, others, (x,))["logits"]
    with torch.no_grad():
        expected = torch.func.functional_call(net, others, (x,))["logits"]
    assert torch.equal(found, expected)
    assert reasons == ["other tensors stand in for its weights, as in torch.func.functional_call"]
    assert recorder.replayed == 2


class Frozen(dict[str, int]):
    """A configuration that refuses changes, as those of diffusers' models do."""

    def clear(self) -> None:
        raise TypeError("this configuration cannot be changed")


def test_a_configuration_that_refuses_changes_is_left_alone() -> None:
    net, recorder = Net(), Recorder()
    net.settings = Frozen(layers=2)  # type: ignore[assignment]
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)
    for _ in range(3):
        call(torch.ones(4, 6))["logits"].sum().backward()
    assert recorder.replayed == 2


SCALE = 1.0
OPTIONS = SimpleNamespace(shift=0.0)


def shifted(x: Tensor) -> Tensor:
    return x + OPTIONS.shift


class Configured(Net):
    """Reads a global, an option within a function that it calls, numbers of its configuration, and one of its options."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(weight=1.0, schedule={"warm": {"factor": 1.0}})
        self.options = {"offset": 0.0}

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = shifted(x) * self.config.weight * self.config.schedule["warm"]["factor"]
        return super().forward(x + self.options["offset"], SCALE)


def test_numbers_that_a_forward_reads_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, recorder = Configured(), Recorder()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)
    x = torch.ones(4, 6)
    for _ in range(3):
        call(x)["logits"].sum().backward()
    assert recorder.replayed == 2
    places = [vars(sys.modules[__name__]), vars(OPTIONS), vars(net.config), net.config.schedule["warm"], net.options]
    for number, (place, name) in enumerate(zip(places, ("SCALE", "shift", "weight", "factor", "offset"), strict=True)):
        monkeypatch.setitem(place, name, 3.0)
        call(x)["logits"].sum().backward()
        call(x)["logits"].sum().backward()
        assert (recorder.recorded, recorder.replayed) == (2 + number, 3 + number)


def test_ever_new_values_end_eagerly() -> None:
    net, reasons, recorder = Net(), list[str](), Recorder()
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder)
    for number in range(captured.MOST_KINDS + 2):
        call(torch.ones(4, 6), scale=1.0 + number)["logits"].sum().backward()
    assert reasons == ["numbers that it is called with change from call to call"] * (captured.MOST_KINDS - 2)
    assert not recorder.recorded


def test_what_cannot_be_captured_is_said_with_what_helps() -> None:
    class Fails(Recorder):
        def record(self, *_: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    net = Net()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=Fails())
    call(torch.ones(4, 6))["logits"].sum().backward()
    with pytest.raises(ScriptError, match=r"a call of Net cannot be captured .*\(operation not permitted.*\), as where it waits"):
        call(torch.ones(4, 6))


def test_an_lstm_can_be_captured() -> None:
    """Setting its weights, as capturing does, makes a list of them anew."""
    torch.manual_seed(0)
    net, recorder, reasons = nn.LSTM(4, 3, 2), Recorder(), list[str]()
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder)
    states = (torch.zeros(2, 5, 3), torch.zeros(2, 5, 3))
    for seed in range(4):
        x = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(seed))
        net.zero_grad()
        expected, _ = net(x, states)
        expected.square().mean().backward()
        gradients = [one.grad.clone() for one in net.parameters() if one.grad is not None]
        net.zero_grad()
        found, states = call(x, tuple(one.detach() for one in states))
        found.square().mean().backward()
        assert torch.equal(expected, found)
        assert all(torch.equal(one, other.grad) for one, other in zip(gradients, net.parameters(), strict=True))
        states = (torch.zeros(2, 5, 3), torch.zeros(2, 5, 3))
    assert not reasons
    assert recorder.replayed == 3


def test_recurrent_layers_with_dropout_are_captured_for_one_kind_of_call() -> None:
    """An eager call of another shape may begin cuDNN's dropout anew, whose memory the graphs use."""
    net, recorder, reasons = nn.GRU(4, 3, 2, dropout=0.1).eval(), Recorder(), list[str]()
    call = CapturedModule(net, net._call_impl, reasons.append, recorder=recorder)
    for length in (5, 5, 5, 6, 5, 6):
        call(torch.ones(length, 2, 4))[0].sum().backward()
    assert recorder.replayed == 2
    assert reasons == ["it has recurrent layers with dropout, and its calls differ"] * 3


def test_results_that_get_no_gradient_cost_none() -> None:
    """A model's logits beside its loss: their gradient would be zeros, as large as they are."""
    net, recorder = Net(), Recorder()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)

    def captured_with() -> list[list[tuple[int, ...]]]:
        return [[request.given for request in sequence] for sequence in call._kinds[0].requests.sequences]

    for _ in range(3):
        call(torch.ones(4, 6))["logits"].sum().backward()
    assert captured_with() == [[(0,)]]
    assert recorder.recorded_gradients == 1
    for _ in range(2):
        call(torch.ones(4, 6))["hidden"].sum().backward()
    assert captured_with() == [[(0, 1)]]
    assert recorder.recorded_gradients == 2, "captured anew once another result has a gradient"


def test_gradients_of_two_parameters_share_no_memory() -> None:
    one, other = torch.ones(3), torch.ones(3)
    found = apart([one, one, None, other, one[:2]], [other])
    pointers = [grad.untyped_storage().data_ptr() for grad in found if grad is not None]
    assert found[0] is one
    assert len({*pointers, other.untyped_storage().data_ptr()}) == 5
    assert found[2] is None


@on_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_lstm_is_captured_on_a_gpu(dropout: float) -> None:
    """Its own dropout cannot be put back to where it was: cuDNN draws on, so the masks differ from those of eager training."""
    states = []
    for captures in (False, True):
        torch.manual_seed(0)
        net, reasons = nn.LSTM(64, 64, 3, dropout=dropout).cuda(), list[str]()
        call = CapturedModule(net, net._call_impl, reasons.append) if captures else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        hidden = (torch.zeros(3, 5, 64, device="cuda"), torch.zeros(3, 5, 64, device="cuda"))
        losses = []
        for seed in range(8):
            x = torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(seed)).cuda()
            optimizer.zero_grad()
            found, hidden = call(x, tuple(one.detach() for one in hidden))
            loss = found.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        states.append(losses)
        assert not reasons
        fixed = tuple(one.detach().clone() for one in hidden)
        found, again = (call(x, fixed)[0].detach().clone() for _ in range(2))
        assert torch.equal(found, again) == (dropout == 0)
    assert states[1] == pytest.approx(states[0], rel=0.05 if dropout else 1e-4)


@on_gpu
@pytest.mark.parametrize(("step", "casts"), [*((step, False) for step in STEPS), (plain, True), (accumulating, True)])
def test_training_is_the_same_on_a_gpu(step: Step, casts: bool) -> None:
    batches = [torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)).cuda() for seed in range(12)]
    states = []
    for captures in (False, True):
        torch.manual_seed(0)
        net, reasons = Net().cuda(), list[str]()
        net.two = nn.Sequential(nn.Dropout(0.3), net.two)  # type: ignore[assignment]
        call = CapturedModule(net, net._call_impl, reasons.append) if captures else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        torch.cuda.manual_seed(5)
        losses = []
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                losses.append(float(step(call, net, optimizer, batch).detach()))
        states.append((losses, [one.clone() for one in net.state_dict().values()]))
        assert not reasons
    (losses, weights), (found, held) = states
    assert found == pytest.approx(losses, rel=1e-5)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(weights, held, strict=True))
