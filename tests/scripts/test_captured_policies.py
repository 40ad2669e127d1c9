"""Captures networks that sample from distributions, as in reinforcement learning; on a CPU, with graphs of `graphs_on_cpu.py`."""

import pytest
import torch
from graphs_on_cpu import Recorder
from torch import Tensor, nn

from compile_sweep.script.apply import module_call
from compile_sweep.script.apply.captured import CapturedModule


class Policy(nn.Module):
    """Samples actions, as in reinforcement learning; torch validates a distribution by waiting for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.net(x).chunk(2, -1)
        actions = torch.distributions.Normal(mean, spread.exp()).rsample()
        return actions, torch.distributions.Normal(mean, spread.exp()).log_prob(actions)


def test_distributions_are_not_validated_in_a_captured_call(monkeypatch: pytest.MonkeyPatch) -> None:
    validated, is_all_true = list[Tensor](), torch._is_all_true

    def noting(valid: Tensor) -> Tensor:
        validated.append(valid)
        return is_all_true(valid)

    monkeypatch.setattr(torch, "_is_all_true", noting)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # libraries may turn it off
    monkeypatch.setattr(module_call, "_generator_states", lambda device: 0)  # on a CPU, the policy draws there
    net, recorder = Policy(), Recorder()
    call = CapturedModule(net, net._call_impl, lambda reason: None, recorder=recorder)
    call(torch.ones(4, 6))[1].sum().backward()
    assert validated
    number = len(validated)
    call(torch.ones(4, 6))[1].sum().backward()
    recorded = len(validated) - number  # by the stand-in's replay, which calls the policy
    assert recorder.recorded == 1
    assert recorded == number
    assert torch.distributions.Distribution._validate_args


@pytest.mark.gpu
def test_a_policy_is_captured_on_a_gpu() -> None:
    states = []
    for captures in (False, True):
        torch.manual_seed(0)
        net, reasons = Policy().cuda(), list[str]()
        call = CapturedModule(net, net._call_impl, reasons.append) if captures else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for seed in range(6):
            x = torch.randn(9, 6, generator=torch.Generator().manual_seed(seed)).cuda()
            optimizer.zero_grad()
            actions, chance = call(x)
            loss = actions.square().mean() - 0.1 * chance.mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        states.append(losses)
        assert not reasons
    assert states[1] == pytest.approx(states[0], rel=1e-5)
