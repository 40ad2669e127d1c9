"""Parts of modules that are captured where the whole cannot be; on a CPU, with graphs of `graphs_on_cpu.py`."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_sweep.harness.diagnostics.capture import Diagnostics
from compile_sweep.script.apply import captured
from compile_sweep.script.apply.captured import CapturedModule, capture, captured_in_parts, with_uncaptured
from compile_sweep.script.apply.graph_recording import _waiting_is_an_error
from compile_sweep.script.discover import Target
from tests.scripts.test_captured import on_gpu

WAITS = "it waits for the GPU, as by .item(), .cpu() or a mask's size"


def encoder() -> nn.Sequential:
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 4))


class Contrast(nn.Module):
    """Compares with a queue, which it moves on by a number, and with a network that follows it, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.ModuleList([nn.Linear(4, 4)])
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.queue: Tensor
        self.place: Tensor
        self.register_buffer("queue", torch.ones(4, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        found = self.head[0](self.encoder(x))
        with torch.no_grad():
            for one, other in zip(self.encoder.parameters(), self.follower.parameters(), strict=True):
                other.data = 0.9 * other.data + 0.1 * one.data
            keys = self.follower(x)
        scores: Tensor = torch.cat([(found * keys).sum(1, keepdim=True), found @ self.queue.clone()], 1)
        place = int(self.place)
        self.queue[:, place : place + 2] = keys[:2].T
        self.place[0] = (place + 2) % 8
        return scores


def trained(net: nn.Module, call: Callable[[Tensor], Tensor], device: str = "cpu") -> tuple[list[float], list[Tensor]]:
    """Returns the losses of eight steps, and what the model holds in the end."""
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for seed in range(8):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), torch.zeros(6, dtype=torch.long, device=device))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [one.clone() for one in net.state_dict().values()]


def made(kind: type[nn.Module], device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return kind().to(device)


def test_what_a_module_calls_is_captured_where_the_module_cannot_be(recorder: Recorder) -> None:
    plain, net = made(Contrast), made(Contrast)
    expected = trained(plain, plain)
    target = Target(net, net, "model")
    capture([target])
    losses, state = trained(net, net)
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(state, expected[1], strict=True))
    assert (recorder.recorded, recorder.replayed) == (1, 3)  # of the last three calls
    assert target.captured == {"encoder"}
    assert with_uncaptured(Diagnostics(), [target]) == Diagnostics()
    reason = "its weights are in other memory from call to call"
    assert list(captured_in_parts([target])) == [f"model runs eagerly: {reason}; captured as CUDA graphs of its own: encoder"]


class Halves(nn.Module):
    """Counts its calls, which a graph would not, and keeps what a part returned."""

    def __init__(self, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList([shared or encoder(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))])
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.calls, self.kept = 0, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.parts[0](x)
        self.kept.append(hidden.detach())
        found: Tensor = self.last(self.parts[1](hidden))
        return found


@pytest.mark.usefixtures("recorder")
def test_what_a_part_returned_can_be_kept() -> None:
    plain, net = made(Halves), made(Halves)
    expected = trained(plain, plain)
    target = Target(net, net, "model")
    capture([target])
    assert trained(net, net)[0] == expected[0]
    assert target.captured == {"parts.0", "parts.1"}
    told = "numbers that its forward reads change from call to call; captured as CUDA graphs of its own: parts.0 and 1 other"
    assert list(captured_in_parts([target])) == [f"model runs eagerly: {told}"]
    assert isinstance(net, Halves)
    assert isinstance(plain, Halves)
    assert all(torch.equal(one, other) for one, other in zip(net.kept, plain.kept, strict=True))


@pytest.mark.parametrize("shapes_change", [False, True])
def test_parts_of_a_module_that_is_called_in_many_ways_are_captured_unless_shapes_differ(shapes_change: bool) -> None:
    class Scheduled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.last = encoder(), nn.Linear(4, 4)

        def forward(self, x: Tensor, weight: float) -> Tensor:
            return self.last(self.encoder(x)) * weight

    net, parts, reasons = Scheduled(), list[str](), list[str]()
    call = CapturedModule(net, net._call_impl, reasons.append, captured=parts.append, recorder=Recorder())
    for number in range(captured.MOST_KINDS + 3):
        call(torch.ones(2 + number * shapes_change, 6), 1.0 + number).sum().backward()
    if shapes_change:
        assert (parts, set(reasons)) == ([], {f"it is called in more than {captured.MOST_KINDS} ways, by shapes or values"})
    else:
        assert (parts, set(reasons)) == (["encoder"], {"numbers that it is called with change from call to call"})


@pytest.mark.usefixtures("recorder")
def test_a_part_that_a_captured_module_calls_too_belongs_to_its_graph() -> None:

    def losses(captures: bool) -> list[float]:
        torch.manual_seed(0)
        shared = encoder()
        counting, plain = Halves(shared), nn.Sequential(shared, nn.Linear(4, 4))
        targets = [Target(counting, counting, "counting"), Target(plain, plain, "plain")]
        if captures:
            capture(targets)
        found = trained(nn.ModuleList([counting, plain]), lambda x: counting(x) + plain(x))[0]
        assert [target.captured for target in targets] == ([{"parts.0", "parts.1"}, {""}] if captures else [set(), set()])
        return found

    assert losses(captures=True) == losses(captures=False)


class Recomputed(Halves):
    """Recomputes what its parts keep for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = checkpoint(self.parts[0], x.requires_grad_(), use_reentrant=self.calls % 2 == 0)
        found: Tensor = self.last(self.parts[1](hidden))
        return found


@pytest.mark.usefixtures("recorder")
def test_parts_that_are_recomputed_run_eagerly() -> None:
    plain, net = made(Recomputed), made(Recomputed)
    expected = trained(plain, plain)
    target = Target(net, net, "model")
    capture([target])
    assert trained(net, net)[0] == expected[0]
    assert target.captured == {"parts.1"}


@pytest.mark.usefixtures("recorder")
def test_a_module_without_parts_worth_a_graph_counts_as_skipped() -> None:

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only, self.calls = nn.Linear(6, 4), 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.only(x)

    net = Single()
    target = Target(net, net, "model")
    capture([target])
    trained(net, net)
    assert with_uncaptured(Diagnostics(), [target]).cudagraph_skips == 4
    assert list(captured_in_parts([target])) == []


def test_waiting_for_the_gpu_is_an_error_in_a_trial_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a script makes warnings errors: torch warns of the mode after it was set."""
    modes: list[int | str] = [0]

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("a prototype", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _waiting_is_an_error():
            assert modes[-1] == "error"
    assert modes == [0, "error", 0]


@on_gpu
@pytest.mark.parametrize("kind", [Contrast, Halves])
def test_parts_train_the_same_on_a_gpu(kind: type[nn.Module]) -> None:
    plain, net = made(kind, "cuda"), made(kind, "cuda")
    expected = trained(plain, plain, "cuda")
    target = Target(net, net, "model")
    capture([target])
    losses, state = trained(net, net, "cuda")
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(state, expected[1], strict=True))
    assert target.captured == ({"encoder"} if kind is Contrast else {"parts.0", "parts.1"})


@on_gpu
def test_a_call_that_waits_for_the_gpu_is_left_eager() -> None:
    class Waits(Halves):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.parts[0](x)
            return self.last(self.parts[1](hidden)) * (1.0 if hidden.sum().item() > 0 else 1.5)

    plain, net = made(Waits, "cuda"), made(Waits, "cuda")
    reasons = list[str]()
    parts = list[str]()
    call = CapturedModule(net, net._call_impl, reasons.append, captured=parts.append)
    assert trained(net, call, "cuda")[0] == pytest.approx(trained(plain, plain, "cuda")[0], rel=1e-5)
    assert set(reasons) == {WAITS}
    assert parts == ["parts.0", "parts.1"]
