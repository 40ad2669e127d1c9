"""Which of the modules that a script calls are trained, without running a script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compile_sweep.script.discover import Watch
from tests.scripts.conftest import Run


@pytest.mark.parametrize(("parts_are_trained", "found"), [(False, ["Sequential"]), (True, ["Linear", "Linear"])])
def test_of_a_module_and_its_parts_those_that_are_called_in_the_loop_are_found(parts_are_trained: bool, found: list[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(lambda: None, lambda: None)
    watch.begin()
    try:
        (model if parts_are_trained else model[0])(torch.ones(2, 4))  # as a library builds a model, or prints a summary of it
        for _ in range(3):
            outputs = model[1](model[0](torch.ones(2, 4))) if parts_are_trained else model(torch.ones(2, 4))
            outputs.sum().backward()
            optimizer.step()
    finally:
        watch.end()
    assert [type(target.module).__name__ for target in watch.found.targets] == found


class HoldsWeights(nn.Module):
    """Holds the weights of its layers without being their parent, as a model of Keras does."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([weights for layer in layers for weights in layer.parameters()])
        self._run = layers.__iter__

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self._run():
            values = layer(values)
        return values


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_a_model_calls_without_being_their_parent_are_its_parts_and_a_tied_head_is_not(tied: bool) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model, head = HoldsWeights(layers), nn.Linear(4, 4, bias=False)
    head.weight = layers[1].weight  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(lambda: None, lambda: None)
    watch.begin()
    try:
        for layer in layers:
            layer(torch.ones(2, 4))
        for _ in range(3):
            outputs = model(torch.ones(2, 4))
            (head(outputs) if tied else outputs).sum().backward()
            optimizer.step()
    finally:
        watch.end()
    assert [type(target.module).__name__ for target in watch.found.targets] == ["HoldsWeights", *(["Linear"] if tied else [])]


AGENT = """
import torch
from torch import nn

class Agent:
    def __init__(self):
        self.first, self.second = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))

    def loss(self, x):
        return (self.first(x) - self.second(x)).square().mean()

class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.cell = nn.Linear(4, 4), nn.GRUCell(4, 4)

    def loss(self, x):
        for part in (self.encoder, self.cell):
            x = part(x)
        return x.square().mean()

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

head = nn.Linear(4, 2)

def main():
    agent, world, actor = Agent(), World(), Policy()
    networks = [agent.first, agent.second, world, actor, head]
    optimizer = torch.optim.SGD([weight for one in networks for weight in one.parameters()], lr=0.01)
    for _ in range(3000):
        x = torch.randn(8, 4)
        loss = agent.loss(x) + world.loss(x) + actor(x).mean() + head(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

main()
"""


def test_networks_that_their_class_does_not_tell_apart_are_named_by_local_variables_and_attributes(
    run: Run, folder: Path
) -> None:
    (folder / "agent.py").write_text(AGENT)
    session, error = run("agent.py", "scope=full,dynamic=static,backend=eager,parts.second.compile=off")
    assert error is session.error is None
    names = [target.name for target in session.found.targets]
    assert names == ["first", "second", "world.encoder", "world.cell", "Policy", "head"]
    assert [target.name for target in session.found.targets if target.stays_eager] == ["second"]
