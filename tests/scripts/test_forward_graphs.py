"""Calls without gradients that are captured as CUDA graphs: teachers, rollouts, evaluations; CPUs have `graphs_on_cpu.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn

from compile_sweep.script.apply import module_call
from compile_sweep.script.apply.captured import CapturedModule, capture, left_eager
from compile_sweep.script.apply.graph_recording import GraphRecorder
from compile_sweep.script.discover import Target
from compile_sweep.script.job import ScriptError
from tests.scripts.test_captured import Counts, Net


def captured_call(net: nn.Module, recorder: GraphRecorder) -> CapturedModule:
    return CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_have_graphs_of_their_own(mode: Callable[[], Any]) -> None:
    net, recorder = Net().eval(), Recorder()
    call = captured_call(net, recorder)
    results = []
    for number in range(5):
        x = torch.full((4, 6), float(number))
        with mode():
            results.append((call(x), net(x)))
        call(x)["logits"].sum().backward()  # changes no graph of the others
    for made, expected in results:  # each is kept, outside of the graph's memory
        torch.testing.assert_close(made["logits"], expected["logits"])
        assert not made["logits"].requires_grad
    assert (recorder.recorded_forward, recorder.recorded) == (1, 1)
    assert recorder.replayed_forward == 4


def test_weights_that_train_in_between_are_read_anew() -> None:
    net, recorder = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)), Recorder()
    call, optimizer, x = captured_call(net, recorder), torch.optim.SGD(net.parameters(), lr=0.1), torch.ones(4, 6)
    for _ in range(5):
        with torch.no_grad():
            torch.testing.assert_close(call(x), net(x))
        call(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert recorder.replayed_forward == 4


def test_a_frozen_network_with_gradients_turned_on_needs_none() -> None:
    """A perceptual loss calls its network with a made picture, whose gradients it needs, and with a real one."""
    net, recorder = Net().eval().requires_grad_(False), Recorder()
    call = captured_call(net, recorder)
    for _ in range(4):
        made = torch.ones(4, 6, requires_grad=True)
        (call(made)["hidden"] - call(torch.zeros(4, 6))["hidden"]).square().mean().backward()
        expected = torch.ones(4, 6, requires_grad=True)
        (net(expected)["hidden"] - net(torch.zeros(4, 6))["hidden"]).square().mean().backward()
        torch.testing.assert_close(made.grad, expected.grad)
    assert (recorder.recorded, recorder.recorded_forward) == (1, 1)
    assert (recorder.replayed, recorder.replayed_forward) == (3, 2)


class Fills(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(())


class Differentiates(nn.Linear):
    """Asks for gradients itself, as a network of forces does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize("kind", [Counts, Fills, Draws, Differentiates])
def test_what_a_graph_would_leave_out_runs_eagerly(kind: type[nn.Module]) -> None:
    net, recorder = kind() if kind is Counts else kind(6, 3), Recorder()  # type: ignore[call-arg]
    call = captured_call(net, recorder)
    results = []
    for one in (call, net):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append([one(torch.ones(4, 6)) for _ in range(4)])
    torch.testing.assert_close(results[0], results[1])
    assert not recorder.recorded_forward
    if isinstance(net, Counts):
        assert net.calls == 8


def test_ever_new_shapes_stay_eager() -> None:
    net, recorder = nn.Linear(6, 3), Recorder()
    call = captured_call(net, recorder)
    with torch.no_grad():
        for _ in range(2):
            for number in range(1, module_call.MOST_KINDS + 3):
                call(torch.ones(number, 6))
    assert not recorder.recorded_forward
    assert call(torch.ones(4, 6)).requires_grad


def test_what_is_captured_stays_so_when_many_shapes_follow() -> None:
    net, recorder = nn.Linear(6, 3), Recorder()
    call = captured_call(net, recorder)
    with torch.no_grad():
        for number in (1, 1, *range(2, module_call.MOST_KINDS + 5), 1):
            x = torch.randn(number, 6)
            torch.testing.assert_close(call(x), net(x))
    assert (recorder.recorded_forward, recorder.replayed_forward) == (1, 2)


def test_a_capture_that_fails_is_said_with_what_helps() -> None:
    class Fails(Recorder):
        def record(self, *_: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    net = nn.Linear(6, 3)
    call = captured_call(net, Fails())
    with torch.no_grad():
        call(torch.ones(4, 6))
        with pytest.raises(ScriptError, match=r"a call of Linear cannot be captured .*\(operation not permitted.*\)"):
            call(torch.ones(4, 6))


def test_a_teacher_is_captured_with_its_student(recorder: Recorder) -> None:
    teacher, student = Net().eval().requires_grad_(False), Net()
    capture([Target(teacher, teacher, "teacher"), Target(student, student, "student")])
    for _ in range(4):
        with torch.no_grad():
            wanted = teacher(torch.ones(4, 6))["logits"]
        (student(torch.ones(4, 6))["logits"] - wanted).square().mean().backward()
    assert (recorder.replayed, recorder.replayed_forward) == (3, 3)


def test_a_frozen_network_that_cannot_be_captured_is_told(recorder: Recorder) -> None:
    frozen = Net().eval().requires_grad_(False)
    frozen.one.register_forward_hook(lambda module, args, output: None)
    target = Target(frozen, frozen, "features")
    capture([target])
    for _ in range(3):
        frozen(torch.ones(4, 6, requires_grad=True))["logits"].sum().backward()
    assert list(left_eager([target])) == ["features runs eagerly: it has hooks, which a CUDA graph would not call"]
    assert not recorder.recorded


class Noisy(Net):
    """Dropout, drawn on the GPU in training mode."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("casts", [False, True])
def test_calls_without_gradients_are_the_same_on_a_gpu(mode: Callable[[], Any], casts: bool) -> None:
    found = []
    for captures in (False, True):
        torch.manual_seed(0)
        net = Noisy().cuda()
        call = captured_call(net, GraphRecorder()) if captures else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.cuda.manual_seed(5)
        results = []
        for number in range(6):
            x = torch.randn(9, 6, generator=torch.Generator().manual_seed(number)).cuda()
            with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                with mode():
                    results += [call(x)["logits"].float(), call(x + 1)["hidden"].float()]
                loss = call(x)["logits"].float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append(loss.detach())
        found.append([one.cpu() for one in results])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_stays_eager() -> None:
    class Waits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    net = Waits(6, 3).cuda()
    call = captured_call(net, GraphRecorder())
    for number in range(4):
        x = torch.full((4, 6), float(number), device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(call(x), net(x))
