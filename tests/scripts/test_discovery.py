"""Which of the modules that a script calls are trained, without running a script."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_sweep.script.discover import Watch


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
