"""What a script's runs record for their comparison."""

import torch
from torch import nn

from compile_sweep.script.discover import Target
from compile_sweep.script.numerics import StepRecorder


def test_modules_may_be_called_what_a_dictionary_has_as_a_method() -> None:
    """A recommender with two towers is `users` and `items`; and one name must not hide another."""
    names = ["items", "keys", "training", "agent.actor", "agent_actor", "Linear 2"]
    targets = [Target(layer, layer, name) for name in names for layer in [nn.Linear(2, 2)]]
    recorder = StepRecorder(targets, steps=1)
    losses = [target.module(torch.ones(1, 2)).sum() for target in targets]
    torch.stack(losses).sum().backward()
    recorder.stepped(losses)
    assert len(recorder.trajectory().gradients) == len(names)
    assert all(norms[0] > 0 for norms in recorder.trajectory().gradients.values())
